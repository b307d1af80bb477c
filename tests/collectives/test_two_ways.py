"""Of a call's two ways the one runs that takes less time, as measured: what is lost by finding that out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compcoll.kernels._host import TwoWays

Draw = Callable[[], float]


def run(ways: TwoWays, usual: Draw, other: Draw, seconds: float) -> list[bool]:
    """Make calls for so many seconds; which of them went the other way."""
    taken: list[bool] = []
    spent = 0.0
    while spent < seconds:
        taken.append(ways.other)
        took = other() if taken[-1] else usual()
        ways.took(taken[-1], took)
        spent += took
    return taken


def stalled(seed: int, seconds: float, chance: float, stall: float) -> Draw:
    """Draw times of calls that wait for a core now and then, which is most of what they take in the mean."""
    rng = np.random.default_rng(seed)
    return lambda: seconds * rng.uniform(0.9, 1.1) + stall * (rng.random() < chance)


@pytest.mark.parametrize("seconds", [3e-5, 1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("times", [0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0])
def test_little_is_lost_to_what_takes_longer(seconds: float, times: float) -> None:
    """What the other way takes, over what the usual one does; of 2 s of calls and more, the first tries among them."""
    calls = run(TwoWays(), lambda: seconds, lambda: seconds * times, max(2000 * seconds * min(times, 1.0), 2.0))
    took = sum(seconds * (times if other else 1.0) for other in calls)
    assert took <= 1.05 * len(calls) * seconds * min(times, 1.0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("faster", [False, True])
def test_the_mean_decides_and_not_what_most_calls_take(seed: int, faster: bool) -> None:
    """Most calls of one way are shorter, but it stalls more often: 46 and 30 µs, and 8 ms of 2 and 0.5 % of them."""
    often, seldom = stalled(seed, 3e-5, 0.02, 8e-3), stalled(seed + 100, 4.6e-5, 0.005, 8e-3)
    calls = run(TwoWays(), *((often, seldom) if faster else (seldom, often)), 4.0)
    late = calls[len(calls) // 2 :]
    assert sum(other == faster for other in late) > 0.85 * len(late)


def test_it_comes_back_when_the_machine_changes() -> None:
    ways = TwoWays()
    before = run(ways, lambda: 2e-3, lambda: 1e-3, 4.0)
    after = run(ways, lambda: 1e-3, lambda: 2e-3, 4.0)
    assert np.mean(before[-500:]) > 0.95 and np.mean(after[-500:]) < 0.05


def test_both_are_tried_and_one_slow_first_call_does_not_decide() -> None:
    ways, times = TwoWays(), iter([1.0])
    calls = run(ways, lambda: 1e-2, lambda: next(times, 1e-3), 12.0)
    assert True in calls[:8] and False in calls[:8]
    assert np.mean(calls[-100:]) > 0.9


def test_of_a_few_long_calls_one_that_waited_does_not_decide() -> None:
    """16 ms against 50, but for 0.15 s that the second call took: nobody knows that it was once."""
    ways, times = TwoWays(), iter([16e-3, 0.15])
    calls = run(ways, lambda: next(times, 16e-3), lambda: 50e-3, 2.0)
    assert True in calls[:8] and sum(calls) <= 5
