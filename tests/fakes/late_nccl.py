"""NCCL as the deferred device has it: messages come when both streams have come to them, as late as that may be.

A receive takes what is in the sender's memory when the sender's stream comes to its send; until all ranks have put
their part on a stream, whoever waits for one waits in vain.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from fakes.deferred import BLOCKED, Event, Stream, memory_of

from compcoll.dtypes import HALVES
from compcoll.errors import CompcollError
from compcoll.gpu.watchdog import Message


class _Part:
    """One rank's memory that others read, when its stream comes to it."""

    def __init__(self, array: Any, stream: Stream) -> None:
        self._array = array
        self._stream = stream
        self._place = stream.added
        self.taken: np.ndarray | None = None

    def take(self) -> np.ndarray | None:
        """What is there after all work before; None if that cannot be done yet."""
        if self.taken is None and self._stream.run_up_to(self._place):
            self.taken = memory_of(self._array).copy()
        return self.taken


class LateNCCL:
    """What the ranks' carriers have in common.

    Attributes
    ----------
    calls : list of tuple
        What was put on streams: rank, verb and how many parts.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.sent: dict[tuple[int, int], deque[_Part]] = defaultdict(deque)
        self.sums: dict[int, dict[int, _Part]] = defaultdict(dict)
        self.calls: list[tuple[Any, ...]] = []
        self.joined: list[int] = []


class LateCarrier:
    """One rank's (the contract is `compcoll.gpu.watchdog.NCCLBase`)."""

    name = "late NCCL"

    def __init__(self, common: LateNCCL, rank: int) -> None:
        self._common = common
        self._rank = rank
        self._sequence_number = 0
        self.error: CompcollError | None = None
        self.watched: list[tuple[Event, str, float]] = []
        self.freed = False

    def exchange(self, leaving: Sequence[Message], arriving: Sequence[Message], stream: Stream) -> None:
        common, rank = self._common, self._rank
        common.calls.append((rank, "exchange", len(leaving), len(arriving)))
        parts = [_Part(array, stream) for array, _ in leaving]
        for part, (_, dest) in zip(parts, leaving):
            common.sent[rank, dest].append(part)
        expected: list[_Part | None] = [None] * len(arriving)

        def work() -> Any:
            for index, (_, source) in enumerate(arriving):
                if expected[index] is None and common.sent[source, rank]:
                    expected[index] = common.sent[source, rank].popleft()
            came = [None if part is None else part.take() for part in expected]
            if any(each is None for each in came):
                return BLOCKED
            for part in parts:
                part.take()
            for (array, _), content in zip(arriving, came):
                target = memory_of(array)
                assert target.nbytes == content.nbytes
                target[:] = content
            return None

        stream.add(work)

    def allreduce(self, x: Any, out: Any, dtype: str, *, mean: bool, stream: Stream) -> None:
        common, number = self._common, self._sequence_number
        self._sequence_number += 1
        common.calls.append((self._rank, "allreduce", dtype, mean))
        assert dtype not in HALVES
        common.sums[number][self._rank] = _Part(x, stream)

        def work() -> Any:
            parts = common.sums[number]
            came = [parts[rank].take() for rank in sorted(parts)]
            if len(came) < common.ranks or any(each is None for each in came):
                return BLOCKED
            total = np.sum(came, axis=0)
            memory_of(out)[:] = total / common.ranks if mean else total
            return None

        stream.add(work)

    def watch(self, event: Event, what: str, seconds: float) -> None:
        self.watched.append((event, what, seconds))

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def free(self, seconds: float) -> None:
        self.freed = True


class LateJoining:
    """One rank's way to join (the contract is `compcoll.gpu.stream_transport.Bootstrap`)."""

    name = "late NCCL"

    def __init__(self, common: LateNCCL, rank: int, *, gpu: int | None = None, version: int = 22000) -> None:
        self._common = common
        self._version, self._gpu = version, rank if gpu is None else gpu
        self.refused: CompcollError | None = None
        self.fails: Exception | None = None
        self.gpu_transport: LateCarrier | None = None

    def identity(self) -> tuple[int, bytes]:
        if self.refused is not None:
            raise self.refused
        return self._version, self._gpu.to_bytes(16, "little")

    def unique_id(self) -> bytes:
        return b"\0invited\0".ljust(128, b"!")

    def join(self, ranks: int, unique_id: bytes, rank: int) -> LateCarrier:
        assert ranks == self._common.ranks and unique_id == self.unique_id()
        if self.fails is not None:
            raise self.fails
        self._common.joined.append(rank)
        self.gpu_transport = LateCarrier(self._common, rank)
        return self.gpu_transport
