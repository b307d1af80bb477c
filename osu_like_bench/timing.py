"""Contenders timed in turns, so that noise hits all of them equally."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

FEWEST = 3
"""Rounds that are timed even if the first takes longer than the time allowed."""

_LONGEST_BATCH = 64
_BEYOND = 0.98  # half of the normal distribution's 1.96, as the count below the median has a variance of n/4


@dataclass(frozen=True)
class Limits:
    """The limits of a measurement: rounds and time.

    Attributes
    ----------
    warmup, iterations : int
        Rounds before the clock runs, and timed rounds at most.
    seconds : float
        Time allowed for the timed rounds of one contender; a quarter of it for its warm-up.
    """

    warmup: int
    iterations: int
    seconds: float

    @staticmethod
    def of(arguments: argparse.Namespace, warmup: int, iterations: int, time_cap: float) -> Limits:
        """Return the command line's limits, or these defaults; who gives ``-i`` gets no time limit by default."""
        cap = time_cap if arguments.iterations is None else 0.0
        cap = cap if arguments.time_cap is None else arguments.time_cap
        return Limits(
            warmup if arguments.warmup is None else arguments.warmup,
            arguments.iterations or iterations,
            cap or float("inf"),
        )


@dataclass(frozen=True)
class Times:
    """Seconds of the timed iterations of one contender.

    Attributes
    ----------
    p99 : float
        The 99th percentile.
    low, high : float
        The median's 95 % confidence interval, whatever the distribution; minimum and maximum where there are too few
        iterations for it (H. A. David, H. N. Nagaraja, "Order Statistics", 2003, section 7.1).
    """

    mean: float
    median: float
    p99: float
    min: float
    max: float
    iterations: int
    low: float
    high: float

    @staticmethod
    def of(seconds: Seconds) -> Times:
        """Summarise seconds, one value an iteration."""
        ordered, n = np.sort(seconds).tolist(), len(seconds)
        outside = max(int(n / 2 - _BEYOND * n**0.5), 0)
        return Times(
            float(seconds.mean()),
            float(np.median(seconds)),
            float(np.percentile(seconds, 99)),
            ordered[0],
            ordered[-1],
            n,
            low=ordered[outside],
            high=ordered[-1 - outside],
        )

    def fields(self, unit: str = "us") -> dict[str, Any]:
        """Return a record's fields, such as ``avg_us``, in microseconds or in milliseconds (``ms``)."""
        scale = {"us": 1e6, "ms": 1e3}[unit]
        named = {"avg": self.mean, "median": self.median, "p99": self.p99, "median_low": self.low}
        named |= {"median_high": self.high, "min": self.min, "max": self.max}
        return {f"{name}_{unit}": scale * value for name, value in named.items()} | {"iterations": self.iterations}


def elapsed(run: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    started = perf_counter()
    run()
    return perf_counter() - started


def measure(
    contenders: Sequence[Callable[[], Any]],
    limits: Limits,
    *,
    barrier: Callable[[], Any] = lambda: None,
    slowest: Callable[[Seconds], Seconds] = lambda seconds: seconds,
    clock: Callable[[Callable[[], Any]], float] = elapsed,
) -> list[Times]:
    """Time some contenders in turns.

    Every round runs each contender once, after a barrier, in an order drawn anew: what one leaves in the caches helps
    or hurts all others alike. The time of an iteration is that of the slowest rank. Ranks exchange times after a batch
    of rounds, and so agree on when to stop.

    Parameters
    ----------
    contenders : sequence of callable
        What to time.
    limits : Limits
        How long.
    barrier : callable
        Lets no rank begin before all have arrived.
    slowest : callable
        Replaces seconds by the largest of all ranks.
    clock : callable
        Runs a contender and returns its seconds.
    """
    draws, order = random.Random(0), list(range(len(contenders)))  # the same on all ranks

    def rounds(most: int, fewest: int, seconds: float) -> Seconds:
        done: list[Seconds] = []
        count, spent = 0, 0.0
        while count < most and (count < fewest or spent < seconds * len(contenders)):
            # As many rounds as the time left allows, but at most as many as were tried already.
            left = seconds * len(contenders) - spent
            affordable = left * count / spent if spent else 1
            batch = np.empty((int(max(min(affordable, count, most - count, _LONGEST_BATCH), 1)), len(contenders) + 1))
            for row in batch:
                begun = perf_counter()
                draws.shuffle(order)
                for index in order:
                    barrier()
                    row[index] = clock(contenders[index])
                row[-1] = perf_counter() - begun
                count += 1
            batch = slowest(batch)
            spent += float(batch[:, -1].sum())
            done.append(batch[:, :-1])
        return np.concatenate(done) if done else np.empty((0, len(contenders)))

    rounds(limits.warmup, min(limits.warmup, 1), limits.seconds / 4)
    seconds = rounds(limits.iterations, min(limits.iterations, FEWEST), limits.seconds)
    return [Times.of(column) for column in seconds.T]
