"""What is measured in passing: sizes go as far as links carry them in time, whatever small calls take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from compcoll import ZFP
from compcoll.layout import World
from compcoll.model.predict import DEFAULTS, Link
from compcoll.tools import tune
from compcoll.tools.timing import Bar, Stopwatch

PAIR = World(2, 1)
SIZES = (1 << 12, 1 << 20, 1 << 22)


class Native:
    """A library whose own allreduce takes no time, and notes whether it is in place."""

    def __init__(self) -> None:
        self.in_place: list[int] = []

    def reductions(self, collective: str, op: str) -> tuple[None, Callable[[Any, Any], Any]]:
        def start(x: Any, out: Any) -> Any:
            assert x is out and (collective, op) == ("allreduce", "sum")
            self.in_place.append(x.nbytes)
            return SimpleNamespace(Test=lambda: True)

        return None, start


class Alone:
    """As much of a transport as measuring in passing needs, for one rank."""

    shared = None

    def __init__(self) -> None:
        self.native = Native()

    @staticmethod
    def tell(work: Callable[[], Any]) -> Any:
        return work()

    @staticmethod
    def gather(work: Callable[[], Any]) -> list[Any]:
        return [work()]

    @staticmethod
    def barrier() -> None:
        pass


class Slow:
    """A communicator whose every allreduce takes two milliseconds."""

    def __init__(self) -> None:
        self.asked: set[tuple[int, str]] = set()

    def allreduce(self, x: Any, *, out: Any, algorithm: str, codec: object) -> None:
        assert codec == ZFP(rate=8)
        self.asked.add((x.nbytes, algorithm))
        time.sleep(2e-3)


@pytest.mark.parametrize(("per_byte", "measured"), [(1e-9, SIZES), (1e-6, SIZES[:1])])
def test_sizes_end_where_links_would_take_too_long(per_byte: float, measured: tuple[int, ...]) -> None:
    comm, profile = Slow(), replace(DEFAULTS, between=Link(1e-5, per_byte))
    transport = Alone()
    series = [each for each in tune._few_series(comm, transport, PAIR) if each.algorithm in ("native", "ring")]
    timings = tune._timings(series, profile, PAIR, Stopwatch(transport, 2.0), Bar(enabled=False), SIZES, 0.01)
    assert {timing.algorithm: tuple(n for n, _ in timing.points) for timing in timings} == {
        "ring": measured,
        "native": measured,
    }
    assert comm.asked == {(nbytes, "ring") for nbytes in measured} and set(transport.native.in_place) == set(measured)
    of_ring = next(timing for timing in timings if timing.algorithm == "ring")
    assert all(seconds >= 2e-3 for _, seconds in of_ring.points)
    assert all(seconds < 2e-3 for timing in timings if timing is not of_ring for _, seconds in timing.points)
