"""Times that all ranks agree on, and a bar that tells how far a measurement is."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ..transports.base import Located

_SHORTEST = 1e-5
"""The time below which work is repeated in a row; which no program does, and finds its code and memory at hand."""

_MOST = 200
"""Repetitions at most."""


class Stopwatch:
    """Times what all ranks do together.

    Parameters
    ----------
    transport : Located
        Between the ranks.
    seconds : float
        When to stop, counted from now.
    """

    def __init__(self, transport: Located, seconds: float) -> None:
        self._transport = transport
        self._deadline = time.perf_counter() + seconds

    def affords(self, seconds: float) -> bool:
        """Tell whether that much time is left. Collective."""
        return self._transport.tell(lambda: time.perf_counter() + seconds < self._deadline)

    def seconds(self, work: Callable[[], Any], budget: float) -> float:
        """Measure one thing like `each`."""
        return self.each([work], budget)[0]

    def each(
        self, works: Sequence[Callable[[], Any]], budget: float, parts: Sequence[float] | None = None
    ) -> list[float]:
        """The medians over repetitions of what the slowest rank takes, of things that take turns: in an order drawn
        anew each time, so that none finds its memory in the caches because of what always runs before it. Collective.

        Parameters
        ----------
        works : sequence of callable
            What is timed; done once before.
        budget : float
            Seconds that all of this may take, about; but three repetitions there are.
        parts : sequence of float, optional
            For each, another part of its repetitions than half of them, that took at most what is told.
        """
        for work in works:
            work()
        once = self._slowest([self._once(work, 1) for work in works])
        rows = [max(int(_SHORTEST / max(seconds, 1e-9)), 1) for seconds in once]
        turn = sum(max(seconds, _SHORTEST) for seconds in once)
        repetitions = min(max(int(budget / turn), 3), _MOST)
        draws, order = random.Random(0), list(range(len(works)))  # the same on all ranks
        times: list[list[float]] = [[] for _ in works]
        for _ in range(repetitions):
            draws.shuffle(order)
            for index in order:
                times[index].append(self._once(works[index], rows[index]))
        return [
            float(np.quantile(self._slowest(own), part))
            for own, part in zip(times, parts or [0.5] * len(works), strict=True)
        ]

    def _once(self, work: Callable[[], Any], row: int) -> float:
        self._transport.barrier()
        started = time.perf_counter()
        for _ in range(row):
            work()
        return (time.perf_counter() - started) / row

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Find the longest time of any rank for each repetition."""
        every: list[list[float]] = self._transport.gather(lambda: seconds)
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
