"""Quick profiles: sizes go as far as links carry them in time, whatever small calls take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from compcoll import ZFP
from compcoll.layout import World
from compcoll.plan.cost import DEFAULTS, Link, Timing
from compcoll.tools import tune
from compcoll.tools.tune import Stopwatch

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
    """As much of a transport as a quick profile needs, for one rank."""

    shared = None

    def __init__(self) -> None:
        self.native = Native()

    @staticmethod
    def broadcast(work: Callable[[], Any]) -> Any:
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
        assert codec == ZFP(rate=8) or algorithm == "dissemination"
        self.asked.add((x.nbytes, algorithm))
        time.sleep(2e-3)


@pytest.mark.parametrize(("per_byte", "measured"), [(1e-9, SIZES), (1e-6, SIZES[:1])])
def test_sizes_end_where_links_would_take_too_long(per_byte: float, measured: tuple[int, ...]) -> None:
    comm, profile = Slow(), replace(DEFAULTS, between=Link(1e-5, per_byte))
    transport = Alone()
    series = [each for each in tune.quick_series(comm, transport, PAIR) if each.algorithm in ("native", "ring")]
    timings = tune.timings_of(series, profile, PAIR, Stopwatch(transport, 2.0), SIZES, 0.01)
    assert {timing.algorithm: tuple(n for n, _ in timing.points) for timing in timings} == {
        "ring": measured,
        "native": measured,
    }
    assert comm.asked == {(nbytes, "ring") for nbytes in measured} and set(transport.native.in_place) == set(measured)
    of_ring = next(timing for timing in timings if timing.algorithm == "ring")
    assert all(seconds >= 2e-3 for _, seconds in of_ring.points)
    assert all(seconds < 2e-3 for timing in timings if timing is not of_ring for _, seconds in timing.points)


def test_what_scatters_counts_as_slow_of_ours_and_as_fast_of_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of both go from 1 to 4 ms: what tells nothing leaves it to the library's own."""
    now, taken = [0.0], itertools.cycle([1e-3, 2e-3, 3e-3, 4e-3])
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work() -> None:
        now[0] += next(taken)

    transport = Alone()
    own, *ours = tune.quick_series(Slow(), transport, PAIR)
    assert own.algorithm == "native" and ours
    watch = Stopwatch(transport, 1e9)
    parts = ([own.part_of(1 << 20)], None, [ours[0].part_of(1 << 20)])
    (fast,), (middle,), (slow,) = (watch.each([work], 0.4, each) for each in parts)
    assert 1e-3 <= fast <= 2e-3 < middle < 3e-3 <= slow <= 4e-3
    assert {each.part for each in ours} == {1 - own.part} and {
        each.part for each in tune.series_of(Slow(), transport, PAIR)
    } == {0.5}
    assert {each.part_of(1 << 24) for each in (own, *ours)} == {0.5}, "large arrays outlast what scatters"


def test_a_disturbed_visit_leaves_a_size_to_the_librarys_own() -> None:
    """Both take 2 ms; then the library's own is disturbed during one of two visits, ours are by luck not."""
    taken = {"native": iter([2e-3, 6e-3]), "ring": iter([2.5e-3, 1.5e-3])}
    series = [each for each in tune.quick_series(Slow(), Alone(), PAIR) if each.algorithm in taken]
    assert [each.algorithm for each in series] == ["native", "ring"]

    def each(works: object, budget: float, parts: object) -> list[float]:
        return [next(taken[timed.algorithm]) for timed in series]

    watch = SimpleNamespace(affords=lambda seconds: True, each=each)
    visits = (1 << 20, 1 << 20)
    timings = tune.timings_of(series, DEFAULTS, PAIR, watch, visits, 0.3)
    assert {timing.algorithm: timing.points for timing in timings} == {
        "native": ((1 << 20, 2e-3),),
        "ring": ((1 << 20, 2.5e-3),),
    }
    assert all(tune.QUICK_SIZES.count(nbytes) == 2 for nbytes in tune.QUICK_SIZES if nbytes <= tune.SCATTERED)


@pytest.mark.parametrize(
    ("nbytes", "per_byte", "counts"),
    [(1 << 14, 1e-9, 600e-6), (1 << 18, 1e-9, 400e-6), (1 << 14, 1e-8, 400e-6)],
)
def test_a_codec_gains_nothing_where_the_wire_takes_little(nbytes: int, per_byte: float, counts: float) -> None:
    """400 µs instead of the library's 600 count where a tenth of those is for bytes that the codec saves: of 16 KiB
    12 of 16 µs at 1 GB/s.
    """
    profile = replace(DEFAULTS, between=Link(1e-4, per_byte))
    own = Timing("native", "none", 32.0, PAIR, ((nbytes, 600e-6),))
    plain = Timing("dissemination", "none", 32.0, PAIR, ((nbytes, 300e-6),))
    coded = Timing("dissemination", "zfp", 8.0, PAIR, ((nbytes, 400e-6),))
    slow = replace(coded, points=((nbytes, 700e-6),))
    every = (own, plain, coded, slow)
    seen = [tune.believed(each, every, profile).points[0][1] for each in every]
    assert seen == [600e-6, 300e-6, counts, 700e-6]
    assert tune.believed(coded, (coded,), profile) == coded
