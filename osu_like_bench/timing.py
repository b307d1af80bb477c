"""Time contenders alternately, so that noise affects all of them equally."""

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
"""Minimum number of timed rounds, whatever the time limit."""

_LONGEST_BATCH = 64
_BEYOND = 0.98  # half of the normal distribution's 1.96: the number of values below the median has variance n/4


@dataclass(frozen=True)
class Limits:
    """The limits of a measurement: rounds and time.

    Attributes
    ----------
    warmup, iterations : int
        Number of warm-up rounds, and maximum number of timed rounds.
    seconds : float
        Time limit for the timed rounds of one contender. Its warm-up has a quarter of it.
    """

    warmup: int
    iterations: int
    seconds: float

    @staticmethod
    def of(arguments: argparse.Namespace, warmup: int, iterations: int, time_cap: float) -> Limits:
        """Return the limits of the command line, with these defaults. With ``-i``, the default is no time limit."""
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
        The median's 95 % confidence interval, for any distribution; minimum and maximum if there are too few iterations
        (H. A. David, H. N. Nagaraja, "Order Statistics", 2003, section 7.1).
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
        """Compute the statistics of seconds, one value per iteration."""
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
    """Time contenders alternately.

    Every round runs each contender once, after a barrier, in a new random order, so that the cache contents that one
    leaves help or hurt all others equally. The time of an iteration is that of the slowest rank. Ranks exchange times
    after each batch of rounds, and so agree on when to stop.

    Parameters
    ----------
    contenders : sequence of callable
        The functions to time.
    limits : Limits
        Limits of rounds and time.
    barrier : callable
        Waits for all ranks.
    slowest : callable
        Takes seconds and returns the largest of all ranks, element by element.
    clock : callable
        Runs a contender and returns its seconds.
    """
    draws, order = random.Random(0), list(range(len(contenders)))  # the same on all ranks

    def rounds(most: int, fewest: int, seconds: float) -> Seconds:
        done: list[Seconds] = []
        count, spent = 0, 0.0
        while count < most and (count < fewest or spent < seconds * len(contenders)):
            # The batch has as many rounds as the remaining time allows, but at most doubles the number of rounds.
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
