"""The channel from a process group to MPI: it runs collectives, each after a handshake of all ranks.

compcoll's collectives make this handshake themselves: their first messages show whether all ranks make the same call,
and every wait has a time-out. All other collectives are MPI's blocking ones, which are faster than its nonblocking ones
on large buffers. The communicator's handshake checks the call before a blocking collective runs. A rank cannot be
interrupted if it is stuck in a blocking collective because another rank has died. So `watched` ends the job when the
time-out is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ...communicator import Communicator
from ...errors import CommunicatorBroken, InvalidArgument, PeerTimeout
from ...plan.signature import Signature, fingerprint
from ...transports.job_end import end_job
from ...transports.library import MPI
from ..background import Background
from ..streams import StreamOrder

SECONDS_TO_MEET = 60.0
"""The shortest time-out for ranks that have just started, since some may start much later than others."""

_TAGS = 32768  # MPI promises tags up to 32767
_SECONDS_BETWEEN_POLLS = 0.5


@lru_cache(maxsize=4096)
def signature(*words: object) -> Signature:
    """Make the signature of a call from words; handshakes compare the signatures of all ranks."""
    return Signature(" ".join(str(word) for word in words))


_blocked: dict[int, tuple[float, float, str]] = {}
"""For each thread in a blocking MPI call: when the call began, its time-out in seconds, and its description."""


def _end_late_calls() -> float:
    now = time.monotonic()
    for since, limit, text in tuple(_blocked.values()):
        if now - since > limit:
            end_job(f" Timed out: {text} did not end within {limit:g} s, another rank has probably died")
    return _SECONDS_BETWEEN_POLLS


_watch = Background("watch", _end_late_calls)


@contextmanager
def watched(what: str, seconds: float) -> Iterator[None]:
    """Enclose blocking MPI calls in a `with` block: the job ends if the block takes longer than `seconds`."""
    _watch.start()
    _blocked[threading.get_ident()] = (time.monotonic(), seconds, what)
    try:
        yield
    finally:
        del _blocked[threading.get_ident()]


Tensors = Sequence[Tensor] | Sequence[Sequence[Tensor]]


class Collective(NamedTuple):
    """A collective call with checked arguments, ready to run.

    Attributes
    ----------
    run : callable
        Runs the collective, without arguments.
    result : tensors or None
        Value of the future that the caller gets.
    signature : Signature or None
        Signature that the handshake before ``run`` compares; None if ``run`` makes the handshake.
    order : StreamOrder or None
        Place in the stream order of a GPU; None for tensors in host memory.
    blocks : bool
        Whether ``run`` may block in MPI, where a rank cannot be interrupted. Ignored if there is no signature: ``run``
        then has time-outs.
    """

    run: Callable[[], object]
    result: Tensors | None
    signature: Signature | None = None
    order: StreamOrder | None = None
    blocks: bool = True


class Channel:
    """The communicators that a process group's ranks share.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Communicator that the channel takes over.
    seconds : float
        Time-out of calls that do not set one, in seconds.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        Communicator of MPI's blocking collectives.
    communicator : Communicator
        Communicator of compcoll's collectives, and of handshakes.
    limit : float
        Time-out of the running call, in seconds.
    one_node : bool
        Whether all ranks are on one node.
    """

    def __init__(self, comm: MPI.Intracomm, seconds: float) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self.communicator = Communicator(comm, timeout=seconds)
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self.one_node = self.size > 1 and len(set(self.communicator.nodes)) == 1
        self.seconds = self.limit = seconds
        self.broken: BaseException | None = None

    def run(self, collective: Collective, seconds: float) -> Tensors | None:
        """Run a collective after the handshake of all ranks.

        Parameters
        ----------
        collective : Collective
            What to run.
        seconds : float
            Time-out of the handshake, and again of the collective; the channel's time-out if <= 0.

        Returns
        -------
        tensors or None
            Result of the collective.
        """
        if self.broken is not None:
            raise CommunicatorBroken(f"this process group cannot be used any more: {self.broken}") from self.broken
        self.limit = seconds = seconds if seconds > 0 else self.seconds
        run, result, call, _, blocks = collective
        try:
            if call is not None:
                self.communicator._agree(call, seconds)
            if call is None or not blocks:
                run()
            else:
                with watched(call.call, seconds):
                    run()
            return result
        except MPI.Exception as error:
            self.broken = CommunicatorBroken(f"MPI failed in {call.call if call else 'a reduction'}: {error}")
            raise self.broken from error
        except PeerTimeout as error:
            self.broken = PeerTimeout(f" Timed out after {seconds:.3g} s: {error}", error.missing)
            raise self.broken from error

    def free(self) -> None:
        """Free the communicators, unless an operation may still be in progress on them."""
        if self.broken is None:
            self.communicator.free()
            if not MPI.Is_finalized():
                self.comm.Free()
        self.broken = CommunicatorBroken("it was destroyed")


def world() -> tuple[int, int]:
    """Return the rank of this process in MPI.COMM_WORLD, and the number of ranks there.

    Raises
    ------
    InvalidArgument
        If MPI does not let several threads call it.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise InvalidArgument(
            "the PyTorch backend needs MPI_THREAD_MULTIPLE, but MPI was initialised with less: set "
            'mpi4py.rc.thread_level = "multiple" before MPI starts, or use an MPI that was built with threads'
        )
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def create_channel(ranks: list[int], seconds: float) -> Channel:
    """Make a channel among some ranks of MPI.COMM_WORLD, in the order given. Collective among these ranks."""
    with watched(f"a process group of ranks {ranks}", max(seconds, SECONDS_TO_MEET)):
        group = MPI.COMM_WORLD.group.Incl(ranks)
        comm = MPI.COMM_WORLD.Create_group(group, fingerprint(f"group {ranks}") % _TAGS)
        group.Free()
        return Channel(comm, seconds)
