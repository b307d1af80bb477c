"""Wires that go from GPU to GPU in the order of a stream, so that no host waits for them: by NCCL, for one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ..pending import Pending
from ..transports.base import Persistent, Wire
from .streams import Timeline

Array = Any
Stream = Any
Event = Any
Message = tuple[Array, int]
"""Bytes in a GPU's memory, and the other rank."""


class GpuTransport(Protocol):
    """Carries bytes between the GPUs of some ranks. All ranks give it the same work in the same order.

    Attributes
    ----------
    name : str
        Such as ``"NCCL"``.
    """

    name: str

    def exchange(self, leaving: Sequence[Message], arriving: Sequence[Message], stream: Stream) -> None:
        """Put messages on a stream, all at once; those between two ranks come in the order in which they are sent."""

    def allreduce(self, x: Array, out: Array, dtype: str, *, mean: bool, stream: Stream) -> None:
        """Put its own allreduce on a stream; ``out`` may be ``x``."""

    def watch(self, event: Event, what: str, seconds: float) -> None:
        """See to it that the event comes in so many seconds; if not, end all that is under way, and keep the error."""

    def check(self) -> None:
        """Raise the error that was kept, if there is one."""

    def free(self, seconds: float) -> None:
        """Give back what it has, together with the other ranks; without them, if they do not come in time."""


class Bootstrap(Protocol):
    """The way in which one rank's GPU joins others.

    Attributes
    ----------
    name : str
        Of what carries.
    """

    name: str

    def identity(self) -> tuple[int, bytes]:
        """The version of what carries, and 16 bytes that tell this GPU from all others.

        Raises
        ------
        UnsupportedDevice
            If it cannot be used here.
        """

    def unique_id(self) -> bytes:
        """128 bytes, made by one rank, with which all join."""

    def join(self, ranks: int, unique_id: bytes, rank: int) -> GpuTransport:
        """Join; returns when all ranks have."""


@runtime_checkable
class HasBootstrap(Protocol):
    """A transport whose ranks' GPUs join each other in a way of its own."""

    def bootstrap(self, device: Any) -> Bootstrap:
        """The way of one rank's GPU, which `compcoll.devices` has as a device."""


class _Message:
    """A message of a phase, all of which go at once when the first is asked for."""

    __slots__ = ("_go",)

    def __init__(self, go: Callable[[], None]) -> None:
        self._go = go

    def Test(self) -> bool:
        """Put the phase on the stream: kernels, not the host, wait for it."""
        self._go()
        return True


class StreamTransport:
    """One collective's messages in the order of a stream, for algorithms whose phases have a tag each.

    What is sent and received under one tag is put on the stream at once, when an algorithm asks for the first of it.
    So all of a phase must be started before any of it is waited for, as `compcoll.algorithms.direct` does.

    Parameters
    ----------
    gpu_transport : GpuTransport
        Between the ranks' GPUs.
    timeline : Timeline
        Of the collective.
    rank, size, nodes
        As of `Transport`.
    """

    def __init__(
        self, gpu_transport: GpuTransport, timeline: Timeline, rank: int, size: int, nodes: Sequence[int]
    ) -> None:
        self._gpu_transport = gpu_transport
        self._timeline = timeline
        self._leaving: dict[int, list[tuple[Wire, int]]] = defaultdict(list)
        self._arriving: dict[int, list[tuple[Wire, int]]] = defaultdict(list)
        self.rank, self.size, self.nodes = rank, size, nodes

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        self._leaving[tag].append((wire, dest))
        return _Message(lambda: self._go(tag))

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        self._arriving[tag].append((wire, source))
        return _Message(lambda: self._go(tag))

    def _go(self, tag: int) -> None:
        leaving, arriving = self._leaving.pop(tag, []), self._arriving.pop(tag, [])
        if leaving or arriving:
            stream = self._timeline.exchanging([wire for wire, _ in leaving])
            self._gpu_transport.exchange(
                [(wire.content, dest) for wire, dest in leaving],
                [(wire.buffer, source) for wire, source in arriving],
                stream,
            )
            self._timeline.exchanged([wire for wire, _ in arriving])

    def send_init(self, wire: Wire, dest: int, tag: int) -> Persistent:
        raise NotImplementedError("messages of a stream are not sent again")

    recv_init = send_init

    def forget(self, message: Persistent) -> None:
        """Give nothing back."""

    def free(self) -> None:
        """The carrier belongs to somebody else."""
