"""Times that all ranks agree on, and a bar that tells how far a measurement is."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from statistics import median
from types import TracebackType

from .transports.mpi import MPITransport

_SHORTEST = 3e-4
"""What is over sooner is done several times in a row."""

_MOST = 50
"""Repetitions at most."""


class Stopwatch:
    """Times what all ranks do together.

    Parameters
    ----------
    transport : MPITransport
        Between the ranks.
    seconds : float
        When to stop, counted from now.
    """

    def __init__(self, transport: MPITransport, seconds: float) -> None:
        self._transport = transport
        self._deadline = time.perf_counter() + seconds

    def affords(self, seconds: float) -> bool:
        """Whether that much time is left. Collective."""
        return bool(self._transport.tell(time.perf_counter() + seconds < self._deadline))

    def seconds(self, work: Callable[[], None], budget: float) -> float:
        """The median over repetitions of what the slowest rank takes. Collective.

        Parameters
        ----------
        work : callable
            What is timed; done once before.
        budget : float
            Seconds that this may take, about; but three repetitions there are.
        """
        work()
        once = self._slowest([self._once(work, 1)])[0]
        row, repetitions = self._transport.tell(
            (max(int(_SHORTEST / max(once, 1e-9)), 1), min(max(int(budget / max(once, _SHORTEST)), 3), _MOST))
        )
        return median(self._slowest([self._once(work, row) for _ in range(repetitions)]))

    def _once(self, work: Callable[[], None], row: int) -> float:
        self._transport.comm.Barrier()
        started = time.perf_counter()
        for _ in range(row):
            work()
        return (time.perf_counter() - started) / row

    def _slowest(self, seconds: list[float]) -> list[float]:
        """For each repetition the longest time of any rank."""
        every: list[list[float]] = self._transport.comm.allgather(seconds)
        return [max(same) for same in zip(*every, strict=True)]


class Bar:
    """A progress bar on a terminal; elsewhere nothing.

    Parameters
    ----------
    enabled : bool
        Whether this rank is to show it.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, part: float, what: str) -> None:
        """Show what is done next, and which part of all is done."""
        if self._enabled:
            full = round(20 * part)
            line = f"[{'#' * full}{' ' * (20 - full)}] {part:4.0%} {what}"
            print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
