"""Statistics of a model's communication."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field

from ..communicator import Communicator
from ..plan import choose
from ..stats import Stats

_adding = threading.Lock()  # buckets end in several threads
_LEAST = {"allreduce": 2, "reduce_scatter": 1}
"""Least number of times that a rank sends its buffer, without its own share. Other collectives: once to each rank."""


@dataclass
class TrainingStats:
    """Sums over the collectives of this rank.

    Attributes
    ----------
    calls : Counter
        Number of collectives, by algorithm and codec.
    raw_nbytes : int
        Bytes of this rank's buffers.
    wire_nbytes : int
        Bytes that this rank sent. MPI's own collectives do not report them, so the least possible number is counted.
    raw_sent_nbytes : int
        Bytes that this rank would have sent without a codec, by the same algorithms.
    encode_seconds, decode_seconds, wait_seconds, total_seconds : float
        Times in the thread that runs the collectives.
    steps : int
        Steps of an optimizer that counts them.
    peak_step_nbytes : float
        Most bytes that this rank sent during one step. Bytes sent while several steps run count for each in equal
        shares.
    """

    calls: Counter[str] = field(default_factory=Counter)
    raw_nbytes: int = 0
    wire_nbytes: int = 0
    raw_sent_nbytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0
    total_seconds: float = 0.0
    steps: int = 0
    peak_step_nbytes: float = 0.0

    @property
    def mean_step_nbytes(self) -> float:
        """Mean bytes that this rank sent in a step; 0 before any step."""
        return self.wire_nbytes / self.steps if self.steps else 0.0

    @property
    def ratio(self) -> float:
        """Raw bytes sent divided by wire bytes sent; 1 before anything was sent."""
        return self.raw_sent_nbytes / self.wire_nbytes if self.wire_nbytes else 1.0

    def add(self, stats: Stats, ranks: int) -> int:
        """Add a collective among some ranks, and return the bytes that this rank sent."""
        wire_nbytes, raw_sent_nbytes = stats.wire_nbytes, stats.raw_sent_nbytes
        if stats.algorithm == choose.NATIVE:
            of_buffer = _LEAST.get(stats.collective, ranks) * (ranks - 1) / ranks
            wire_nbytes = raw_sent_nbytes = round(stats.raw_nbytes * of_buffer)
        with _adding:
            self.calls[stats.algorithm if stats.codec is None else f"{stats.algorithm}, {stats.codec}"] += 1
            self.raw_nbytes += stats.raw_nbytes
            self.wire_nbytes += wire_nbytes
            self.raw_sent_nbytes += raw_sent_nbytes
            self.encode_seconds += stats.encode_seconds
            self.decode_seconds += stats.decode_seconds
            self.wait_seconds += stats.wait_seconds
            self.total_seconds += stats.total_seconds
        return wire_nbytes

    def add_last(self, communicator: Communicator) -> int:
        """Add the last collective that a communicator completed, as `add` does."""
        assert communicator.stats is not None
        return self.add(communicator.stats, communicator.size)


class RecentSteps:
    """Bytes sent during each of the last steps.

    Parameters
    ----------
    count : int
        Number of steps.
    """

    def __init__(self, count: int) -> None:
        self._nbytes: deque[float] = deque(maxlen=count)

    def begin(self) -> None:
        """Begin a step and drop the oldest."""
        self._nbytes.append(0.0)

    def spread(self, nbytes: int) -> float:
        """Add bytes sent while all these steps ran, in equal shares; return the most bytes of a step."""
        share = nbytes / len(self._nbytes)
        for _ in range(len(self._nbytes)):
            self._nbytes.append(self._nbytes.popleft() + share)
        return max(self._nbytes)
