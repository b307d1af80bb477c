"""The interfaces of transports, and the wires that they carry."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol, TypeVar

from ..errors import CollectiveFailed, CommunicatorBroken, CompcollError, InvalidArgument, UnsupportedRecovery
from ..kernels._host import Function, MPIMessage, MPIReduction
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


class Reposted:
    """A persistent request made of single messages, for transports without persistent requests.

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


Persistent = MPIMessage | Reposted
"""A persistent request: ``Start`` sends or receives the message again, once the previous one has completed (MPI-4.1,
section 3.9).
"""


class Transport(Protocol):
    """Carries wires between the ranks ``0 … size - 1``.

    Wires from one rank to another with one tag arrive in the order in which they were sent. Do not write to a wire that
    is being sent, and do not read or write a wire that is being received, until its request completes.

    Attributes
    ----------
    nodes : sequence of int
        The node (machine) of each rank, numbered from 0 in the order of the nodes' lowest ranks.
    """

    rank: int
    size: int
    nodes: Sequence[int]

    @abstractmethod
    def isend(self, wire: Wire, dest: int, tag: int) -> Pending: ...

    @abstractmethod
    def irecv(self, wire: Wire, source: int, tag: int) -> Pending: ...


class Connection(Transport):
    """A transport for a communicator. It also reports ranks that give up or die.

    A subclass defines the abstract methods. The defaults of the other attributes and methods suit a transport inside
    one process.

    Attributes
    ----------
    lends_core : bool
        Whether polling a message yields the core to other processes if nothing has arrived.
    blocks : bool
        Whether ``Test`` of a message waits until it completes, since the library has no nonblocking test.
    cores : float or None
        The share of the machine's cores for this rank, in cores; None if it is unknown.
    native : LibraryConnection or None
        The library's own collectives; None if it has none.
    shared : Shared or None
        Memory that the ranks of this node share. Either all nodes with more than one rank have it, or none.
    mail : Mail or None
        The path of handshake messages inside the node; None if the transport carries them.
    """

    nodes: Sequence[int] = ()
    lends_core = False
    blocks = False
    cores: float | None = None
    native: LibraryConnection | None = None
    shared: Shared | None = None
    mail: Mail | None = None

    def send_init(self, wire: Wire, dest: int, tag: int) -> Persistent:
        return Reposted(lambda: self.isend(wire, dest, tag))

    def recv_init(self, wire: Wire, source: int, tag: int) -> Persistent:
        return Reposted(lambda: self.irecv(wire, source, tag))

    def release(self, message: Persistent) -> None:
        """Free a persistent message that is not in flight."""

    def free(self) -> None:
        """Free the connection. Collective."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which all ranks do the same collective work. An error on one rank is raised on all."""
        return nullcontext()

    def global_ranks(self) -> Sequence[int]:
        """Return the number of each rank in the whole job: in MPI.COMM_WORLD, or in the default process group."""
        return range(self.size)

    def takes_device_memory(self) -> bool:
        """Return whether wires may be in GPU memory."""
        return False

    @abstractmethod
    def announce(self, text: str) -> None:
        """Inform all other ranks, whatever they wait for, that this rank gives up, and why."""

    @abstractmethod
    def announced(self) -> Mapping[int, str]:
        """Return the announcements received so far, by rank."""

    def failure(self, error: BaseException) -> CompcollError | None:
        """Convert an error of the transport's library that reports a failed rank; return None for other errors."""
        return None

    def abandon(self) -> None:
        """Wake all ranks that wait for messages of this transport, if possible: no more messages will come."""

    def survivors(self, timeout: float) -> Connection:
        """Create a transport like this one between the ranks that are alive. Collective among those.

        Raises
        ------
        UnsupportedRecovery
            If the transport cannot continue without a failed rank.
        """
        raise UnsupportedRecovery(f"{type(self).__name__} cannot continue without a rank: use MPI, which can")


def named(error: BaseException, rank: int) -> BaseException:
    """Return an error that names the rank, caused by ``error``. Errors of compcoll and interrupts stay as they are."""
    if isinstance(error, CompcollError) or not isinstance(error, Exception):
        return error
    failure = CollectiveFailed(f"rank {rank}, while creating a communicator: {summary(error)}")
    failure.__cause__ = error
    return failure


def summary(error: BaseException | None) -> str:
    """Return an error's class and text; empty without an error."""
    return "" if error is None else f"{type(error).__name__}: {error}"


class LibraryConnection(Connection):
    """A connection through a library that has its own collectives: MPI, or a process group of PyTorch.

    Attributes
    ----------
    library : str
        The library's name, for error texts and reports.
    given_up : bool
        Whether the connection has failed and all ranks know it.
    """

    library: ClassVar[str]
    given_up = False

    @property
    def native(self) -> LibraryConnection:  # type: ignore[override]
        return self

    @abstractmethod
    def reductions(
        self, collective: str, op: str, root: int | None = None
    ) -> tuple[MPIReduction | Function, Callable[[Any, Any], Pending]]:
        """Return the library's blocking and nonblocking reduction, as functions of input and result.

        An allreduce or a reduce of x into x works in place; a reduce_scatter has equal blocks. A reduce has a ``root``,
        and the result is None on the other ranks.
        """

    @abstractmethod
    def iallgatherv(self, x: Any, out: Any, counts: Sequence[int]) -> Pending:
        """Start the library's allgatherv; counts in elements."""

    @abstractmethod
    def ibcast(self, x: Any, root: int) -> Pending:
        """Start the library's broadcast, in place."""

    @abstractmethod
    def ialltoall(self, x: Any, out: Any) -> Pending:
        """Start the library's alltoall of equal blocks."""

    @abstractmethod
    def ialltoallv(self, x: Any, out: Any, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """Start the library's alltoallv; counts in elements."""

    @abstractmethod
    def igather(self, x: Any, out: Any, root: int) -> Pending:
        """Start the library's gather of equal blocks; ``out`` is None on ranks other than the root."""

    @abstractmethod
    def iscatter(self, x: Any, out: Any, root: int) -> Pending:
        """Start the library's scatter of equal blocks; only the root's ``x`` is read."""

    @abstractmethod
    def whereabouts(self) -> tuple[str, tuple[str, ...]]:
        """Return the library that carries messages and the sorted names of all ranks' hosts. Collective."""

    def gather(self, work: Callable[[], Result]) -> list[Result]:
        """Call ``work`` on each rank and return all results, which JSON must support: tuples become lists. Collective.

        Raises
        ------
        CompcollError
            On all ranks, if ``work`` raised on some rank. The transport is then freed.
        """
        failed: BaseException | None = None
        result: Result | None = None
        try:
            result = work()
        except BaseException as error:
            failed = error
        every: list[tuple[str, bool, Any]] = self._every((summary(failed), isinstance(failed, InvalidArgument), result))
        failures = {rank: (text, refused) for rank, (text, refused, _) in enumerate(every) if text}
        if not failures:
            return [result for _, _, result in every]
        self.given_up = True
        self.free()
        if failed is not None:
            raise named(failed, self.rank)
        texts = [
            f"rank {rank} {'refused its settings' if refused else 'failed'}: {text}"
            for rank, (text, refused) in failures.items()
        ]
        kind = InvalidArgument if all(refused for _, refused in failures.values()) else CommunicatorBroken
        raise kind("; ".join(texts))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks, which may contain collective steps. An error on one rank is raised on all."""
        try:
            yield
        except BaseException as error:
            if not self.given_up:
                failed = error

                def fail() -> None:
                    raise failed

                self.gather(fail)
            raise
        self.gather(lambda: None)

    @abstractmethod
    def _every(self, own: Any) -> list[Any]:
        """Pass this rank's value, which JSON must support, to all ranks, and return all ranks' values. Collective."""

    def broadcast(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` on rank 0 and return its result, which JSON must support, on all ranks. Collective."""
        return self.gather(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""


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
