"""The interfaces of transports, and the wires that they carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..errors import CompcollError
from ..kernels._host import Function, MPIReduction
from ..pending import Pending
from .shared import Mail, Shared

Result = TypeVar("Result")


class Wire:
    """Memory for encoded bytes.

    Attributes
    ----------
    buffer : array of uint8
        The memory, as long as the longest wire expected.
    nbytes : int
        Bytes in use: set by the encoding, and by the transport when a receive completes.
    exact : bool
        Whether the wire always fills the buffer, so that the receiving rank knows its length.
    message : object
        A cache for the transport.
    staging : Wire or None
        Pinned host memory, for a buffer in device memory that is sent through the host.
    ready : object
        The device's event after which the bytes are valid; None if they already are.
    """

    __slots__ = ("buffer", "exact", "message", "nbytes", "ready", "staging")

    def __init__(self, buffer: Any, *, exact: bool = True) -> None:
        self.buffer = buffer
        self.nbytes: int = buffer.nbytes
        self.exact = exact
        self.message: Any = None
        self.staging: Wire | None = None
        self.ready: Any = None

    @property
    def content(self) -> Any:
        """The bytes in use, without a copy."""
        return self.buffer if self.nbytes == self.buffer.nbytes else self.buffer[: self.nbytes]


class Persistent(Pending, Protocol):
    """A persistent request: a message that is sent or received repeatedly (MPI-4.1, section 3.9)."""

    def Start(self) -> object:
        """Send or receive the message again. The previous one must have completed."""


class Reposted:
    """A `Persistent` made of single messages, for transports without persistent requests.

    Attributes
    ----------
    message : Pending or None
        The message in flight, or the last one.
    """

    __slots__ = ("_post", "message")

    def __init__(self, post: Callable[[], Pending]) -> None:
        self._post = post
        self.message: Pending | None = None

    def Start(self) -> None:
        self.message = self._post()

    def Test(self) -> bool:
        return self.message is None or self.message.Test()


@runtime_checkable
class Transport(Protocol):
    """Carries wires between the ranks ``0 … size - 1``.

    Wires from one rank to another with one tag arrive in the order in which they were sent. Do not write to a wire that
    is being sent, and do not read or write a wire that is being received, until its request completes.

    Attributes
    ----------
    nodes : sequence of int
        The number of each rank's node (machine), counted from 0 in order of first rank.
    """

    rank: int
    size: int
    nodes: Sequence[int]

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending: ...

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending: ...

    def send_init(self, wire: Wire, dest: int, tag: int) -> Persistent: ...

    def recv_init(self, wire: Wire, source: int, tag: int) -> Persistent: ...

    def forget(self, message: Persistent) -> None:
        """Free a persistent message that is not in flight."""

    def free(self) -> None: ...


class Native(Protocol):
    """Collectives of the library that carries a transport's messages: MPI's, or those of a process group.

    Attributes
    ----------
    library : str
        The library's name, for error texts and reports.
    """

    @property
    def library(self) -> str: ...

    def reductions(self, collective: str, op: str) -> tuple[MPIReduction | Function, Callable[[Any, Any], Pending]]:
        """Return the library's blocking and nonblocking allreduce or reduce_scatter, as functions of input and result.

        An allreduce of x into x works in place; a reduce_scatter has equal blocks.
        """

    def iallgatherv(self, x: Any, out: Any, counts: Sequence[int]) -> Pending:
        """Start the library's allgatherv; counts in elements."""

    def ibcast(self, x: Any, root: int) -> Pending:
        """Start the library's broadcast, in place."""

    def ialltoall(self, x: Any, out: Any) -> Pending:
        """Start the library's alltoall of equal blocks."""


@runtime_checkable
class Connection(Transport, Protocol):
    """A transport between ranks that may give up or die.

    Attributes
    ----------
    lends_core : bool
        Whether polling a message yields the core to other processes if nothing has arrived.
    blocks : bool
        Whether ``Test`` of a message waits until it completes, since the library has no nonblocking test.
    shared : Shared or None
        Memory that the ranks of this node share. Either all nodes with more than one rank have it, or none.
    mail : Mail or None
        The path of handshake messages inside the node; None if the transport carries them.
    """

    lends_core: bool
    blocks: bool
    shared: Shared | None
    mail: Mail | None

    @property
    def native(self) -> Native | None:
        """The library's own collectives; None if it has none."""

    @property
    def cores(self) -> float | None:
        """The share of the machine's cores for this rank, in cores; None if it is unknown."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which all ranks do the same collective work. An error on one rank is raised on all."""

    def takes_device_memory(self) -> bool:
        """Return whether wires may be in GPU memory."""

    def announce(self, text: str) -> None:
        """Inform all other ranks, whatever they wait for, that this rank gives up, and why."""

    def announced(self) -> Mapping[int, str]:
        """Return the announcements received so far, by rank."""

    def failure(self, error: BaseException) -> CompcollError | None:
        """Convert an error of the transport's library that reports a failed rank; return None for other errors."""

    def abandon(self) -> None:
        """Wake all ranks that wait for messages of this transport, if possible: no more messages will come."""


@runtime_checkable
class Located(Protocol):
    """A transport whose ranks know their hosts and can measure together.

    Attributes
    ----------
    nodes : sequence of int
        See `Transport`.
    """

    nodes: Sequence[int]

    def whereabouts(self) -> tuple[str, tuple[str, ...]]:
        """Return the library that carries messages and the sorted names of all ranks' hosts. Collective."""

    def gather(self, work: Callable[[], Result]) -> list[Result]:
        """Call ``work`` on each rank and return all results, which JSON must support. Collective.

        An error on one rank is raised on all.
        """

    def tell(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` on rank 0 and return its result, which JSON must support, on all ranks. Collective."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class Tunable(Connection, Located, Protocol):
    """A transport whose links can be measured."""


@runtime_checkable
class Recoverable(Protocol):
    """A transport that can be rebuilt between the ranks that are alive."""

    def survivors(self, timeout: float) -> Connection:
        """Create a transport like this one between the ranks that are alive. Collective among those."""


class Group:
    """Some ranks of a transport, renumbered from 0, that use one tag.

    Parameters
    ----------
    transport : Transport
        Carries the wires.
    tag : int
        The tag of all messages. A collective in flight may use this tag and the next three.
    ranks : sequence of int, optional
        The members, in the group's order, including this rank; all ranks by default.
    """

    def __init__(self, transport: Transport, tag: int, ranks: Sequence[int] | None = None) -> None:
        self.transport = transport
        self.tag = tag
        self.ranks = range(transport.size) if ranks is None else ranks
        self.rank = transport.rank if ranks is None else ranks.index(transport.rank)
        self.size = len(self.ranks)

    def next_phase(self) -> Group:
        """Return the same ranks with the next tag, so that receives can be posted before the earlier phase ends."""
        return Group(self.transport, self.tag + 1, self.ranks)

    def isend(self, wire: Wire, dest: int) -> Pending:
        return self.transport.isend(wire, self.ranks[dest], self.tag)

    def irecv(self, wire: Wire, source: int) -> Pending:
        return self.transport.irecv(wire, self.ranks[source], self.tag)
