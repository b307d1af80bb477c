"""The contract of transports, and the wires that they carry."""

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
        Bytes in use: set by who encodes, and by the transport when a receive completes.
    exact : bool
        Whether that is always the whole buffer, and who receives it knows.
    message : object
        Of the transport's, kept with the wire.
    staging : Wire or None
        In pinned host memory, for a buffer in device memory that travels by way of the host.
    ready : object
        The device's event after which the bytes are there; None: they are.
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
    """A message that is sent or received again and again (MPI-4.1, section 3.9)."""

    def Start(self) -> object:
        """Send or receive the message once more; not before it has tested true."""


class Reposted:
    """A `Persistent` made of single messages, for transports that know no other.

    Attributes
    ----------
    message : Pending or None
        The one under way, or the last.
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

    Wires from one rank to another under one tag arrive in the order in which they were sent. A sent wire must not be
    written, and a received one not be touched, until its `Pending` tests true.

    Attributes
    ----------
    nodes : sequence of int
        For each rank the number of the node (machine) on which it runs, nodes counted from 0 in order of first rank.
    """

    rank: int
    size: int
    nodes: Sequence[int]

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending: ...

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending: ...

    def send_init(self, wire: Wire, dest: int, tag: int) -> Persistent: ...

    def recv_init(self, wire: Wire, source: int, tag: int) -> Persistent: ...

    def forget(self, message: Persistent) -> None:
        """Give back one of these messages, which is not under way."""

    def free(self) -> None: ...


class Native(Protocol):
    """Collectives of the library that carries a transport's messages: MPI's own, or those of a process group.

    Attributes
    ----------
    library : str
        Its name, for people.
    """

    @property
    def library(self) -> str: ...

    def reductions(self, collective: str, op: str) -> tuple[MPIReduction | Function, Callable[[Any, Any], Pending]]:
        """Give the library's own allreduce (of x into x: in place) or reduce_scatter of equal blocks: the blocking and
        the nonblocking one, as functions of input and result.
        """

    def iallgatherv(self, x: Any, out: Any, counts: Sequence[int]) -> Pending:
        """Start its own allgatherv; counts in elements."""

    def ibcast(self, x: Any, root: int) -> Pending:
        """Start its own broadcast, in place."""

    def ialltoall(self, x: Any, out: Any) -> Pending:
        """Start its own alltoall of equal blocks."""


@runtime_checkable
class Connection(Transport, Protocol):
    """A transport among ranks that may give up or die.

    Attributes
    ----------
    lends_core : bool
        Whether a look for a message lets other processes have the core when nothing has come.
    blocks : bool
        Whether ``Test`` of a message waits until it has come, since the library cannot be asked.
    shared : Shared or None
        Memory that the ranks of this one's node have in common: of all nodes with more than one rank, or of none.
    mail : Mail or None
        What handshakes send their messages by inside the node, if not by the transport.
    """

    lends_core: bool
    blocks: bool
    shared: Shared | None
    mail: Mail | None

    @property
    def native(self) -> Native | None:
        """The library's own collectives, if there are any."""

    @property
    def cores(self) -> float | None:
        """The part of the cores that is this rank's; None if it is not known."""

    def together(self) -> AbstractContextManager[None]:
        """Let all ranks do what follows, with collective steps in between: what fails on one fails on all."""

    def takes_device_memory(self) -> bool:
        """Tell whether wires may be in a GPU's memory."""

    def announce(self, text: str) -> None:
        """Tell all others, whatever they wait for, that this rank gives up, and why."""

    def announced(self) -> Mapping[int, str]:
        """Read what others have announced by now."""

    def failure(self, error: BaseException) -> CompcollError | None:
        """Tell what an error of the transport's own says of the other ranks, if it does."""

    def abandon(self) -> None:
        """Wake up whoever waits for messages of this transport, where that is possible: nothing more will come."""


@runtime_checkable
class Located(Protocol):
    """A transport whose ranks know where they are, and can measure together.

    Attributes
    ----------
    nodes : sequence of int
        As of `Transport`.
    """

    nodes: Sequence[int]

    def whereabouts(self) -> tuple[str, tuple[str, ...]]:
        """The library that carries messages and the names of all ranks' hosts, sorted. Collective."""

    def gather(self, work: Callable[[], Result]) -> list[Result]:
        """Gather what some work gave on each rank, of what JSON has; an error on one is one on all. Collective."""

    def tell(self, work: Callable[[], Result]) -> Result:
        """Give every rank what rank 0's work gives, of what JSON has. Collective."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class Tunable(Connection, Located, Protocol):
    """A transport whose links can be measured."""


@runtime_checkable
class Recoverable(Protocol):
    """A transport that can be made anew among the ranks that are alive."""

    def survivors(self, timeout: float) -> Connection:
        """Make a transport like this one among the ranks that are alive. Collective among those."""


class Group:
    """Some ranks of a transport, renumbered from 0, talking under one tag.

    Parameters
    ----------
    transport : Transport
        Carries the wires.
    tag : int
        Tag of all messages. A collective in flight has this one and the next.
    ranks : sequence of int, optional
        The members, in their order in the group; all ranks by default. This rank must be one of them.
    """

    def __init__(self, transport: Transport, tag: int, ranks: Sequence[int] | None = None) -> None:
        self.transport = transport
        self.tag = tag
        self.ranks = range(transport.size) if ranks is None else ranks
        self.rank = transport.rank if ranks is None else ranks.index(transport.rank)
        self.size = len(self.ranks)

    def next_phase(self) -> Group:
        """The same ranks under a tag of their own: receives of a later phase may be posted before an earlier ends."""
        return Group(self.transport, self.tag + 1, self.ranks)

    def isend(self, wire: Wire, dest: int) -> Pending:
        return self.transport.isend(wire, self.ranks[dest], self.tag)

    def irecv(self, wire: Wire, source: int) -> Pending:
        return self.transport.irecv(wire, self.ranks[source], self.tag)
