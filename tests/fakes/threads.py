"""Ranks of a loopback world as threads, each with a communicator of its own, for code that blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from compcoll import Communicator
from compcoll.kernels._host import Function
from compcoll.transports.loopback import Loopback

Value = TypeVar("Value")
SECONDS = 120.0


class _Exchange:
    """One collective of a rank's, which ends when all others have laid their arrays down."""

    def __init__(self, slots: list[np.ndarray | None], end: Callable[[list[Any]], None]) -> None:
        self._slots, self._end, self._done = slots, end, False

    def Test(self) -> bool:
        if not self._done and all(part is not None for part in self._slots):
            self._end(self._slots)
            self._done = True
        return self._done

    def wait(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.Test():
            assert time.monotonic() < deadline, "not all ranks came"
            time.sleep(1e-4)


class _Native:
    """What an MPI would do itself, between threads: everybody lays its array down, and all look at all."""

    library = "MPI"

    def __init__(self, calls: dict[int, list[np.ndarray | None]], size: int, rank: int) -> None:
        self._calls, self._size, self._rank = calls, size, rank
        self._number = 0

    def _start(self, x: np.ndarray, end: Callable[[list[Any]], None]) -> _Exchange:
        slots = self._calls.setdefault(self._number, [None] * self._size)
        self._number += 1
        slots[self._rank] = x.copy()
        return _Exchange(slots, end)

    def reductions(self, collective: str, op: str, root: None = None) -> tuple[Function, Callable[[Any, Any], Any]]:
        assert collective == "allreduce"
        add = {"min": np.min, "max": np.max}.get(op, np.sum)

        def start(x: np.ndarray, out: np.ndarray) -> _Exchange:
            return self._start(x, lambda parts: out.__setitem__(..., add(parts, axis=0)))

        return Function(lambda x, out: start(x, out).wait(), -1), start

    def iallgatherv(self, x: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> _Exchange:
        whole = out.reshape(-1)
        return self._start(x.reshape(-1), lambda parts: whole.__setitem__(..., np.concatenate(parts)))

    def ibcast(self, x: np.ndarray, root: int) -> _Exchange:
        return self._start(x, lambda parts: x.__setitem__(..., parts[root]))


def world(size: int) -> list[Communicator]:
    """A communicator for each of so many ranks, to be used by a thread each."""
    loopback = Loopback(size)
    calls: dict[int, list[np.ndarray | None]] = {}
    for transport in loopback.transports:
        transport.mail = transport.shared = None  # whose waits are for ranks that are processes
        transport.native = _Native(calls, size, transport.rank)  # type: ignore[assignment]
    return [Communicator(transport, progress="sleep", timeout=SECONDS) for transport in loopback.transports]


def on_ranks(ranks: int | Sequence[Communicator], do: Callable[[Communicator], Value]) -> list[Value]:
    """Run a function of a communicator on every rank at once; the results in the ranks' order."""
    comms = world(ranks) if isinstance(ranks, int) else ranks
    with ThreadPoolExecutor(len(comms)) as pool:
        return [future.result(2 * SECONDS) for future in [pool.submit(do, comm) for comm in comms]]
