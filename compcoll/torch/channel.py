"""What a process group asks of MPI: to agree on a call, then to run it, one at a time.

A call has two phases. First the ranks agree: a nonblocking allreduce of 16 bytes tells whether all are there and make
the same call. It is polled, so that it can time out, and no buffer is touched before it is over. Then MPI's blocking
collective runs, several times as fast as its nonblocking one on large buffers. A rank that is stuck in there because
another has died cannot be called back: `_Watch` ends the job when time is up.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..algorithms.agree import fingerprint, table
from ..errors import CollectiveMismatch, CommunicatorBroken, InvalidArgument, PeerTimeout
from ..request import keep_forever

_TEXT_NBYTES = 512
_TAGS = 32768  # MPI promises tags up to 32767
_SPINS = 200
_YIELDS = 2000
_NAP = 50e-6


class Call(NamedTuple):
    """What a rank asks for.

    Attributes
    ----------
    text : str
        One line, equal on ranks whose calls belong together.
    digest : int
        Its fingerprint, 62 bits.
    """

    text: str
    digest: int


@lru_cache(maxsize=4096)
def call(*words: Any) -> Call:
    """The call that some words describe."""
    text = " ".join(str(word) for word in words)
    return Call(text, fingerprint(text) >> 2)


def poll(test: Callable[[], bool], seconds: float) -> bool:
    """Call ``test`` until it tells True, or so many seconds have passed; whether it did."""
    for _ in range(_SPINS):
        if test():
            return True
    deadline = time.monotonic() + seconds
    for _ in range(_YIELDS):
        if test():
            return True
        os.sched_yield()
    while not test():
        if time.monotonic() > deadline:
            return False
        time.sleep(_NAP)
    return True


class _Watch:
    """Ends the job when a blocking call of MPI takes longer than its time-out."""

    def __init__(self) -> None:
        self.blocked: dict[int, tuple[float, float, str]] = {}
        self._thread = threading.Thread(target=self._look, name="compcoll-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            now = time.monotonic()
            for since, limit, text in tuple(self.blocked.values()):
                if now - since > limit:
                    end_job(f" Timed out: {text} did not end within {limit:g} s, another rank has probably died")


@lru_cache(maxsize=1)
def _watch() -> _Watch:
    return _Watch()


def end_job(text: str) -> None:
    """Say why, and end all ranks: the others could wait for this one for ever."""
    print(f"compcoll, rank {MPI.COMM_WORLD.rank}: {text}", file=sys.__stderr__, flush=True)
    MPI.COMM_WORLD.Abort(1)


class Channel:
    """An MPI communicator of a process group's own.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Becomes the channel's.
    seconds : float
        The time-out of calls that name none.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        For what `run` is given.
    """

    def __init__(self, comm: MPI.Intracomm, seconds: float) -> None:
        self.comm = comm
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.seconds = seconds
        self.broken: BaseException | None = None
        self._own = np.zeros(2, np.int64)
        self._most = np.zeros(2, np.int64)
        self._outgoing = [self._own, 2, MPI.INT64_T]
        self._incoming = [self._most, 2, MPI.INT64_T]
        self._blocked = _watch().blocked

    def agree(self, call: Call, seconds: float) -> None:
        """Wait until all ranks have come here with the same call.

        Raises
        ------
        PeerTimeout
            If not all came within so many seconds. The channel cannot be used afterwards.
        CollectiveMismatch
            On every rank, if their calls differ.
        """
        if self.broken is not None:
            raise CommunicatorBroken(f"this process group cannot be used any more: {self.broken}") from self.broken
        if self.size == 1:
            return
        own, most, digest = self._own, self._most, call.digest
        own[0], own[1] = digest, -digest
        test = self.comm.Iallreduce(self._outgoing, self._incoming, MPI.MAX).Test
        started = time.monotonic()
        if not (test() or poll(test, seconds)):
            keep_forever((own, most))
            passed = time.monotonic() - started
            self.broken = PeerTimeout(f" Timed out after {passed:.3g} s: not all ranks came to {call.text}")
            raise self.broken
        if most[0] != digest or most[1] != -digest:
            raise CollectiveMismatch(table(self._texts(call.text), self.rank))

    def run(self, call: Call, seconds: float, collective: Callable[..., Any], *arguments: Any) -> None:
        """Agree on a call, then run it.

        Parameters
        ----------
        call : Call
            What all ranks must have.
        seconds : float
            Time-out of either phase; without one (0 or less) the channel's.
        collective : callable
            One of MPI's blocking collectives, a method of ``comm``.
        *arguments
            For it.
        """
        if seconds <= 0:
            seconds = self.seconds
        self.agree(call, seconds)
        thread = threading.get_ident()
        self._blocked[thread] = (time.monotonic(), seconds, call.text)
        try:
            collective(*arguments)
        except MPI.Exception as error:
            self.broken = CommunicatorBroken(f"MPI failed in {call.text}: {error}")
            raise self.broken from error
        finally:
            del self._blocked[thread]

    def free(self) -> None:
        """Give the communicator back, unless something is still under way in it."""
        if self.broken is None and not MPI.Is_finalized():
            self.comm.Free()
        self.broken = CommunicatorBroken("it was destroyed")

    def _texts(self, text: str) -> list[str]:
        """Every rank's line."""
        own = np.frombuffer(text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES), np.uint8)
        texts = np.empty((self.size, _TEXT_NBYTES), np.uint8)
        self.comm.Allgather(own, texts)
        return [bytes(line).decode(errors="ignore").rstrip() for line in texts]


def world() -> tuple[int, int]:
    """The rank of this process among all that MPI knows of, and their number.

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


def open_channel(ranks: list[int], seconds: float) -> Channel:
    """A channel among some ranks of MPI.COMM_WORLD, in the order given; only they call this."""
    group = MPI.COMM_WORLD.group.Incl(ranks)
    tag = call("group", *ranks).digest % _TAGS
    channel = Channel(MPI.COMM_WORLD.Create_group(group, tag), seconds)
    group.Free()
    return channel
