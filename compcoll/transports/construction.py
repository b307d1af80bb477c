"""Creation of communicators, by all ranks together. Each step has a timeout; if it fails on one rank, it fails on all.

A rank that fails reports this in its next collective step, which may be another step than that of the other ranks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import accumulate
from typing import Any

from .. import __version__
from ..errors import (
    CollectiveMismatch,
    CommunicatorBroken,
    PeerTimeout,
)
from ..pending import keep_forever, start_thread, wait_until
from .base import LibraryConnection, Result, named, summary
from .library import MPI
from .serialization import packed, unpacked

_SECONDS_BETWEEN_CHECKS = 0.02
"""Seconds between two checks whether another rank has given up."""
_VERSION_NBYTES = 64
_COUNT_NBYTES = 8


def duplicate(comm: MPI.Intracomm, seconds: float) -> MPI.Intracomm:
    """Duplicate a communicator and make its errors exceptions. Collective.

    Raises
    ------
    PeerTimeout
        If some rank does not take part in time.
    """
    made, request = comm.Idup()
    _wait(request, made, seconds, f"not all {comm.size} ranks came to create a communicator within {seconds:g} s")
    made.Set_errhandler(MPI.ERRORS_RETURN)
    return made


def _wait(
    request: MPI.Request, buffers: Any, seconds: float, late: str, gave_up: Callable[[], None] = lambda: None
) -> None:
    """Wait for a request that uses these buffers; ``gave_up`` raises if some rank has given up."""
    deadline = time.monotonic() + seconds
    try:
        while not wait_until(request.Test, min(seconds, _SECONDS_BETWEEN_CHECKS)):
            if time.monotonic() > deadline:
                raise PeerTimeout(late)
            gave_up()
    except BaseException:
        keep_forever((request, buffers))  # MPI may still write there
        raise


def in_time(call: Callable[[], Result], seconds: float, late: str) -> Result:
    """Call a function that blocks in MPI and return its result. All ranks must have just agreed to call it.

    If MPI allows several threads, the call runs in a thread, so that this rank can stop waiting. If not, there is no
    timeout.

    Raises
    ------
    PeerTimeout
        If the call has not returned in time.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return call()
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    start_thread("construction", run)
    try:
        return done.result(seconds)
    except FutureTimeout:
        raise PeerTimeout(f"{late} within {seconds:g} s") from None


class Construction(LibraryConnection):
    """A connection over an MPI communicator, with the collective steps of its construction.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        The private communicator.
    seconds : float
        Seconds that each step may last.
    """

    comm: MPI.Intracomm
    seconds: float

    def compare_versions(self) -> None:
        """Check that all ranks run the same version of compcoll. Collective.

        This comes first, since even the construction's messages may differ between versions.

        Raises
        ------
        CollectiveMismatch
            If versions differ.
        """
        own = __version__.encode()[:_VERSION_NBYTES].ljust(_VERSION_NBYTES)
        every = bytearray(_VERSION_NBYTES * self.size)
        self._settled(self.comm.Iallgather([own, MPI.BYTE], [every, MPI.BYTE]), (own, every))
        ranks: dict[str, list[int]] = {}
        for rank in range(self.size):
            version = every[rank * _VERSION_NBYTES :][:_VERSION_NBYTES].decode(errors="replace").rstrip()
            ranks.setdefault(version, []).append(rank)
        if len(ranks) == 1:
            return
        self.given_up = True
        self.free()
        texts = [f"{version} on rank {', '.join(map(str, have))}" for version, have in ranks.items()]
        raise CollectiveMismatch(f"the ranks run different versions of compcoll: {'; '.join(texts)}")

    def _every(self, own: Any) -> list[Any]:
        if self.size == 1:
            return [own]
        data = packed(own)
        count, counts = array("q", [len(data)]), array("q", bytes(_COUNT_NBYTES * self.size))
        self._settled(self.comm.Iallgather([count, MPI.INT64_T], [counts, MPI.INT64_T]), (count, counts))
        every = bytearray(sum(counts))
        self._settled(self.comm.Iallgatherv([data, MPI.BYTE], [every, list(counts), MPI.BYTE]), (data, every))
        ends = accumulate(counts)
        return [unpacked(every[end - n : end]) for end, n in zip(ends, counts, strict=True)]

    def _settled(self, request: MPI.Request, buffers: Any) -> None:
        """Wait for a request; announce an error to the other ranks, and raise if another rank has announced one."""

        def gave_up() -> None:
            if announced := self.announced():
                raise CommunicatorBroken("; ".join(f"rank {rank} gave up: {text}" for rank, text in announced.items()))

        late = f"not all {self.size} ranks continued to create a communicator within {self.seconds:g} s"
        try:
            _wait(request, buffers, self.seconds, late, gave_up)
        except BaseException as error:
            self.given_up = True
            self.announce(summary(error))
            failure = self.failure(error) or named(error, self.rank)
            if failure is error:
                raise
            raise failure from error
