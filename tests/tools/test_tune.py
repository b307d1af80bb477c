"""What is measured in passing: sizes go as far as links carry them in time, whatever small calls take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compcoll import ZFP
from compcoll.layout import World
from compcoll.model.predict import DEFAULTS, Link
from compcoll.tools import tune
from compcoll.tools.timing import Bar, Stopwatch

PAIR = World(2, 1)
SIZES = (1 << 12, 1 << 20, 1 << 22)


class Alone:
    """As much of a transport as a stopwatch needs, for one rank."""

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

    rank = 0

    def __init__(self) -> None:
        self.asked: set[tuple[int, str]] = set()

    def allreduce(self, x: Any, *, out: Any, algorithm: str, codec: object) -> None:
        self.asked.add((x.nbytes, algorithm))
        time.sleep(2e-3)


@pytest.mark.parametrize(("per_byte", "measured"), [(1e-9, SIZES), (1e-6, SIZES[:1])])
def test_sizes_end_where_links_would_take_too_long(per_byte: float, measured: tuple[int, ...]) -> None:
    comm, profile = Slow(), replace(DEFAULTS, between=Link(1e-5, per_byte))
    series = [tune._Timed("ring", ZFP(rate=8), 8.0), tune._Timed("native", None, 32.0)]
    in_place: list[int] = []

    def own(values: Any) -> None:
        in_place.append(values.nbytes)

    watch = Stopwatch(Alone(), 2.0)
    timings = tune._timings(comm, profile, PAIR, watch, Bar(enabled=False), series, SIZES, 0.01, own)
    assert {timing.algorithm: tuple(n for n, _ in timing.points) for timing in timings} == {
        "ring": measured,
        "native": measured,
    }
    assert comm.asked == {(nbytes, "ring") for nbytes in measured} and set(in_place) == set(measured)
    of_ring = next(timing for timing in timings if timing.algorithm == "ring")
    assert all(seconds >= 2e-3 for _, seconds in of_ring.points)
    assert all(seconds < 2e-3 for timing in timings if timing is not of_ring for _, seconds in timing.points)
