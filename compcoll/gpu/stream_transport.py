"""Messages from GPU to GPU in stream order, for which no host waits, for example by NCCL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ..pending import Pending
from ..transports.base import Wire
from .streams import Timeline

Array = Any
Stream = Any
Event = Any
Message = tuple[Array, int]
"""Bytes in GPU memory, and the other rank."""


class GpuTransport(Protocol):
    """Transport between the GPUs of some ranks. All ranks start the same operations in the same order.

    Attributes
    ----------
    name : str
        Such as ``"NCCL"``.
    """

    name: str

    def exchange(self, leaving: Sequence[Message], arriving: Sequence[Message], stream: Stream) -> None:
        """Put messages on a stream as one group. Messages between two ranks match in the order given."""

    def allreduce(self, x: Array, out: Array, dtype: str, *, mean: bool, stream: Stream) -> None:
        """Put the library's own allreduce on a stream; ``out`` may be ``x``."""

    def watch(self, event: Event, what: str, seconds: float) -> None:
        """Abort all pending work and keep an error if the event does not complete within ``seconds``."""

    def check(self) -> None:
        """Raise the kept error, if there is one."""

    def free(self, seconds: float) -> None:
        """Release all resources together with the other ranks, or alone if these do not arrive within ``seconds``."""


class Bootstrap(Protocol):
    """Creates the transport between one rank's GPU and those of other ranks.

    Attributes
    ----------
    name : str
        The transport's name.
    """

    name: str

    def identity(self) -> tuple[int, bytes]:
        """Return the library's version, and 16 bytes that identify this GPU.

        Raises
        ------
        UnsupportedDevice
            If the library cannot be used here.
        """

    def unique_id(self) -> bytes:
        """Create the 128 bytes with which all ranks join; one rank calls this."""

    def join(self, ranks: int, unique_id: bytes, rank: int) -> GpuTransport:
        """Join the other ranks; return when all have joined."""


@runtime_checkable
class HasBootstrap(Protocol):
    """A transport with its own bootstrap between GPUs."""

    def bootstrap(self, device: Any) -> Bootstrap:
        """Return the bootstrap of this rank's GPU, a `compcoll.gpu.device.CudaDevice`."""


class _Message:
    """A message of a phase. The first test of any of them starts all."""

    __slots__ = ("_go",)

    def __init__(self, go: Callable[[], None]) -> None:
        self._go = go

    def Test(self) -> bool:
        """Put the phase on the stream and return True: kernels, not the host, wait for it."""
        self._go()
        return True


class StreamTransport:
    """One collective's messages in stream order, for algorithms that use one tag for each phase.

    All messages with one tag are put on the stream together when the first of them is tested. So an algorithm must
    start all messages of a phase before it waits for any of them, as `compcoll.algorithms.direct` does.

    Parameters
    ----------
    gpu_transport : GpuTransport
        The transport between the ranks' GPUs.
    timeline : Timeline
        The collective's timeline.
    rank, size, nodes
        As in `Transport`.
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
