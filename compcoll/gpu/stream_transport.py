"""Messages from GPU to GPU in stream order, for example by NCCL. No host waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ..pending import Pending
from ..transports.base import Transport, Wire
from .streams import Timeline
from .watchdog import NCCLBase


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
        """Create the 128 bytes that all ranks pass to `join`. One rank calls this."""

    def join(self, ranks: int, unique_id: bytes, rank: int) -> NCCLBase:
        """Join the other ranks; return when all have joined."""


@runtime_checkable
class HasBootstrap(Protocol):
    """A transport with its own bootstrap between GPUs."""

    def bootstrap(self, device: Any) -> Bootstrap:
        """Return the bootstrap of this rank's GPU, a `compcoll.gpu.device.CudaDevice`."""


class _Message:
    """The request of one message of a phase. Testing any of these requests starts the whole phase."""

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
    gpu_transport : NCCLBase
        The transport between the ranks' GPUs.
    timeline : Timeline
        The collective's timeline.
    ranks : Transport
        A transport between the same ranks, which supplies ranks and nodes only.
    """

    def __init__(self, gpu_transport: NCCLBase, timeline: Timeline, ranks: Transport) -> None:
        self.rank, self.size, self.nodes = ranks.rank, ranks.size, ranks.nodes
        self._gpu_transport = gpu_transport
        self._timeline = timeline
        self._leaving: dict[int, list[tuple[Wire, int]]] = defaultdict(list)
        self._arriving: dict[int, list[tuple[Wire, int]]] = defaultdict(list)

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
