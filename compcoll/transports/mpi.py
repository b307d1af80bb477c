"""The transport that sends wires by MPI."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from .. import config, lifetime
from ..errors import CommunicatorBroken, CompcollError, InvalidArgument, PeerFailed, UnsupportedRecovery
from ..kernels._host import Function, MPILibrary, MPIMessage, MPIProbe, MPIReduction
from ..pending import NeedsPolling, Pending, keep_forever, wait_until
from ..stats import UNKNOWN
from . import deferred_free
from .base import Persistent, Wire
from .construction import Construction, duplicate, in_time
from .job_end import end_job_with_uncaught_errors, survives_failures
from .library import MPI, check_process, gpu_awareness, warn_if_alone
from .nodes import find_nodes, host_name

_OPERATIONS = {
    "sum": MPI.SUM,
    "mean": MPI.SUM,  # multiplied by 1/p afterwards
    "max": MPI.MAX,
    "min": MPI.MIN,
    "prod": MPI.PROD,
    "land": MPI.LAND,
    "band": MPI.BAND,
    "lor": MPI.LOR,
    "bor": MPI.BOR,
    "lxor": MPI.LXOR,
    "bxor": MPI.BXOR,
}
_REDUCED = (*"?bBhHiIlLqQfd", "Zf", "Zd")  # buffer formats whose datatypes MPI can reduce
_ANNOUNCEMENT_TAG = 3  # one of the four tags below those of collectives
_ANNOUNCEMENT_NBYTES = 512
_SECONDS_TO_LEARN = 0.5
_FAILURES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


def check_recovery() -> None:
    """Check that MPI can continue without a failed rank.

    Raises
    ------
    UnsupportedRecovery
        If it cannot.
    """
    if not survives_failures():
        raise UnsupportedRecovery(
            "MPI goes on without a rank only with User-Level Failure Mitigation, which is not switched on here: "
            "start the job by Open MPI 5's mpirun --with-ft ulfm"
        )


def predefined(op: Any) -> str | None:
    """Return the name of a predefined operation of MPI; None for anything else."""
    if not isinstance(op, MPI.Op):
        return None
    return next((name for name, operation in _OPERATIONS.items() if op == operation), None)


class _Receiving:
    """A receive in flight, which sets its wire's number of bytes."""

    __slots__ = ("_message", "_wire")

    def __init__(self, message: MPIMessage, wire: Wire) -> None:
        self._message: MPIMessage | None = message
        self._wire = wire

    def Test(self) -> bool:
        if self._message is not None and self._message.Test():
            self._wire.nbytes = self._message.nbytes
            self._message = None
        return self._message is None


@lru_cache
def _function(name: str) -> int:
    """Return the address of an MPI function in the library that mpi4py has loaded."""
    loaded = ctypes.CDLL(MPI.__file__, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0


def _handle(of: MPI.Datatype | MPI.Op | MPI.Comm) -> int:
    """Return the C handle of an MPI object as a number; it is an integer or an address."""
    return int.from_bytes(ctypes.string_at(MPI._addressof(of), MPI._sizeof(of)), sys.byteorder)


@lru_cache(maxsize=1)
def _library() -> MPILibrary:
    return MPILibrary(
        _function("MPI_Start"),
        _function("MPI_Test"),
        _function("MPI_Get_count"),
        _function("MPI_Iprobe"),
        _handle(MPI.BYTE),
        int(MPI.IN_PLACE),
        {code: _handle(MPI.Datatype.fromcode(code)) for code in _REDUCED},
        MPI._sizeof(MPI.Datatype),
        MPI._sizeof(MPI.Status),
        MPI.Exception,
    )


def _receive(request: MPI.Request, wire: Wire, source: int) -> MPIMessage:
    """Return the message of a receive. If the wire is exact, a message of another length is an error."""
    expected = wire.buffer.nbytes if wire.exact else None
    return MPIMessage(_library(), request, MPI._addressof(request), source, expected)


def _before_finalize(owner: MPI.Comm, key: int, value: Any) -> None:
    if not lifetime.is_forked():
        lifetime.end_all("MPI was finalized")


@lru_cache(maxsize=1)
def _end_all_in_time() -> None:
    """Have all communicators invalidated in forked children, and before MPI ends.

    MPI_Finalize first deletes the attributes of COMM_SELF, which calls `_before_finalize`.
    """
    lifetime.watch_forks()
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_before_finalize), True)


def check_usable(comm: MPI.Comm) -> None:
    """Check that communicators can still be used, and that a `Communicator` can be made of this one.

    Raises
    ------
    InvalidArgument
        If it is no intracommunicator, or null.
    CommunicatorBroken
        If compcoll's communicators were ended.
    """
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise InvalidArgument(f"comm={comm!r}: an mpi4py intracommunicator is needed")
    lifetime.check_alive()


def check_running() -> None:
    """Check that MPI was initialized and not finalized.

    Raises
    ------
    CommunicatorBroken
        If not.
    """
    if MPI.Is_finalized() or not MPI.Is_initialized():
        raise CommunicatorBroken("MPI was finalized, or not initialized by MPI.Init")


class MPITransport(Construction):
    """A transport on a private duplicate of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Duplicated, collectively, so that messages never mix with the caller's; COMM_WORLD by default.
    threads : bool
        Whether several threads will use the transport.
    timeout : float, optional
        Seconds that each step of the construction may last; by default COMPCOLL_TIMEOUT, or 1800.

    Attributes
    ----------
    lends_core : bool
        Whether a poll yields the core if no message has arrived. Open MPI does if it knows that processes share cores.
    cores : float
        This rank's share of the cores that it may use, if all ranks of the machine that share them use equally many.
        With containers or network name spaces, ranks of one machine may be on several nodes.
    """

    library = "MPI"
    cores: float
    lends_core = MPI.Get_library_version().startswith("Open MPI")  # its mpi_yield_when_idle

    def __init__(self, comm: MPI.Comm | None = None, *, threads: bool = False, timeout: float | None = None) -> None:
        comm = MPI.COMM_WORLD if comm is None else comm
        check_usable(comm)
        check_process()
        check_running()
        _end_all_in_time()
        end_job_with_uncaught_errors()
        warn_if_alone()
        self._persistent: list[MPIMessage] = []
        self._announced: dict[int, str] = {}
        try:
            self.seconds, refused = config.timeout(timeout), None
        except InvalidArgument as error:
            self.seconds, refused = config.DEFAULT_TIMEOUT, error
        self.comm = duplicate(MPI.Intracomm(comm), self.seconds)  # not of a subclass, such as `compcoll.Intracomm`
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.compare_versions()

        def check() -> deferred_free.PendingFrees:
            if refused is not None:
                raise refused
            if threads and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                raise InvalidArgument(
                    'progress="thread" needs MPI_THREAD_MULTIPLE, but MPI was initialised with less: '
                    'use progress="wait", or set mpi4py.rc.thread_level = "multiple" before MPI starts'
                )
            return deferred_free.pending_frees(self.comm)

        frees = self.gather(check)
        with self.together():
            self._find_nodes()
            deferred_free.free_deferred(self, self.comm, self._persistent, frees)

    def _find_nodes(self) -> None:
        """Find all ranks' nodes, and this node's shared memory and cores."""
        progress = MPIProbe(_library(), _handle(self.comm), MPI.ANY_SOURCE, _ANNOUNCEMENT_TAG)
        find_nodes(self, host_name(), progress)

    def global_ranks(self) -> Sequence[int]:
        ours, world = self.comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = ours.Translate_ranks(None, world)
        ours.Free()
        world.Free()
        return ranks

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        return self.comm.Isend([wire.buffer, wire.nbytes, MPI.BYTE], dest, tag)

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        return _Receiving(_receive(self.comm.Irecv([wire.buffer, MPI.BYTE], source, tag), wire, source), wire)

    def send_init(self, wire: Wire, dest: int, tag: int) -> Persistent:
        request = self.comm.Send_init([wire.buffer, MPI.BYTE], dest, tag)
        return self._kept(MPIMessage(_library(), request, MPI._addressof(request), None, None))

    def recv_init(self, wire: Wire, source: int, tag: int) -> Persistent:
        return self._kept(_receive(self.comm.Recv_init([wire.buffer, MPI.BYTE], source, tag), wire, source))

    def _kept(self, message: MPIMessage) -> MPIMessage:
        self._persistent.append(message)
        return message

    def release(self, message: Persistent) -> None:
        if not MPI.Is_finalized():
            kept = next(index for index, each in enumerate(self._persistent) if each is message)
            self._persistent.pop(kept).Free()

    def reductions(
        self, collective: str, op: str, root: int | None = None
    ) -> tuple[MPIReduction | Function, Callable[[Any, Any], Pending]]:
        comm, operation, in_place = self.comm, _OPERATIONS[op], MPI.IN_PLACE
        if root is not None:
            to = root

            def reduce(x: Any, out: Any) -> None:
                comm.Reduce(in_place if out is x else x, out, operation, to)

            def ireduce(x: Any, out: Any) -> Pending:
                return NeedsPolling(comm.Ireduce(in_place if out is x else x, out, operation, to), x.nbytes)

            return Function(reduce, UNKNOWN), ireduce
        block, start = {
            "allreduce": (comm.Allreduce, comm.Iallreduce),
            "reduce_scatter": (comm.Reduce_scatter_block, comm.Ireduce_scatter_block),
        }[collective]
        reduction = MPIReduction(
            _library(),
            _function(f"MPI_{block.__name__}"),
            _handle(comm),
            _handle(operation),
            1 if collective == "allreduce" else self.size,
            lambda x, out: block(in_place if out is x else x, out, operation),
        )
        return reduction, lambda x, out: NeedsPolling(start(in_place if out is x else x, out, operation), x.nbytes)

    def iallgatherv(self, x: Any, out: Any, counts: Sequence[int]) -> Pending:
        return NeedsPolling(self.comm.Iallgatherv(x, [out, counts]), out.nbytes)

    def ibcast(self, x: Any, root: int) -> Pending:
        return NeedsPolling(self.comm.Ibcast(x, root), x.nbytes)

    def ialltoall(self, x: Any, out: Any) -> Pending:
        return NeedsPolling(self.comm.Ialltoall(x, out), x.nbytes)

    def ialltoallv(self, x: Any, out: Any, sent: Sequence[int], received: Sequence[int]) -> Pending:
        return NeedsPolling(self.comm.Ialltoallv([x, sent], [out, received]), x.nbytes)

    def igather(self, x: Any, out: Any, root: int) -> Pending:
        return NeedsPolling(self.comm.Igather(x, out, root), x.nbytes)

    def iscatter(self, x: Any, out: Any, root: int) -> Pending:
        return NeedsPolling(self.comm.Iscatter(x if self.rank == root else None, out, root), out.nbytes)

    def whereabouts(self) -> tuple[str, tuple[str, ...]]:
        library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 \n")
        return library, tuple(sorted(set(self.gather(MPI.Get_processor_name))))

    def barrier(self) -> None:
        self.comm.Barrier()

    def takes_device_memory(self) -> bool:
        return gpu_awareness().aware

    def announce(self, text: str) -> None:
        message = text.encode()[:_ANNOUNCEMENT_NBYTES].ljust(_ANNOUNCEMENT_NBYTES)
        for rank in range(self.size):
            if rank != self.rank:
                with contextlib.suppress(MPI.Exception):  # the rank has died
                    keep_forever((message, self.comm.Isend([message, MPI.BYTE], rank, _ANNOUNCEMENT_TAG)))

    def announced(self) -> Mapping[int, str]:
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, _ANNOUNCEMENT_TAG, status):
            message = bytearray(_ANNOUNCEMENT_NBYTES)
            self.comm.Recv([message, MPI.BYTE], status.source, _ANNOUNCEMENT_TAG)
            self._announced[status.source] = message.decode(errors="ignore").rstrip()
        return self._announced

    def failure(self, error: BaseException) -> CompcollError | None:
        if not isinstance(error, MPI.Exception):
            return None
        known = error.Get_error_class() in _FAILURES
        if not known and not survives_failures():
            return None
        # After a communicator was revoked, it takes a while until MPI reports the rank that has died.
        failed: tuple[int, ...] = ()

        def learned() -> bool:
            nonlocal failed
            MPI.COMM_SELF.Iprobe()  # MPI detects failures only during calls
            failed = self._failed()
            return bool(failed)

        if not wait_until(learned, _SECONDS_TO_LEARN):
            return CommunicatorBroken("another rank has given up this communicator") if known else None
        # Open MPI 5.0's nonblocking collectives sometimes report the death of a rank as MPI_ERR_OTHER.
        return PeerFailed(f"rank {', '.join(map(str, failed))} of {self.size} has died", failed)

    def _failed(self) -> tuple[int, ...]:
        failed, own = self.comm.Get_failed(), self.comm.Get_group()
        ranks = failed.Translate_ranks(list(range(failed.size)), own) if failed.size else []
        failed.Free()
        own.Free()
        return tuple(sorted(ranks))

    def abandon(self) -> None:
        if survives_failures():
            self.comm.Revoke()

    def survivors(self, timeout: float) -> MPITransport:
        """Create a transport like this one between the ranks that are alive. Collective among those.

        Raises
        ------
        UnsupportedRecovery
            If MPI cannot continue without a failed rank.
        PeerTimeout
            If not all ranks that are alive take part in time.
        """
        lifetime.check_alive()
        check_recovery()
        self.comm.Revoke()
        survivors = in_time(self.comm.Shrink, timeout, "not all ranks that are alive came to shrink the communicator")
        assert isinstance(survivors, MPI.Intracomm)
        survivors.Set_errhandler(MPI.ERRORS_RETURN)
        transport = type(self)(survivors, timeout=timeout)
        survivors.Free()
        return transport

    def free(self) -> None:
        """Free the private communicator unless MPI has already ended."""
        if not MPI.Is_finalized() and self.comm != MPI.COMM_NULL:
            for request in self._persistent:
                request.Free()
            self._persistent.clear()
            self.comm.Free()
