"""Requests of compressed collectives that MPI's own functions, such as Waitall, complete.

A request is one of MPI's generalized requests (MPI-4.1, section 13.2), which completes when the thread that advances
the collective says so. `mpi4py.MPI.Request` and its functions therefore wait for it, test it and free it like any
other request.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from ..execute.engine import Request
from ..transports.library import MPI


def begun(request: Request, store: Callable[[], None]) -> MPI.Request:
    """Return the MPI request of a collective under way, which calls ``store`` when the collective has succeeded.

    If the collective fails, mpi4py prints the error, and the function that completes the request raises
    `mpi4py.MPI.Exception`.
    """
    stored = False

    def query(status: MPI.Status) -> None:  # MPI may ask several times
        nonlocal stored
        request.test()  # raises the error
        if not stored:
            stored = True
            store()

    in_mpi = MPI.Grequest.Start(query)
    once = threading.Lock()

    def complete() -> None:
        if once.acquire(blocking=False):
            in_mpi.Complete()

    request.on_end = complete
    if request.done:  # before `on_end` was set
        complete()
    return in_mpi


class Prequest(MPI.Prequest):
    """A persistent request: every `Start` begins a new collective with the same arguments.

    The functions that complete requests take it. `mpi4py.MPI.Prequest.Startall` does not: call `Start` of each.

    Parameters
    ----------
    begin : callable
        Begins the collective and returns its request.
    """

    def __new__(cls, begin: Callable[[], MPI.Request]) -> Prequest:
        self = super().__new__(cls)
        self._begin = begin
        return self

    _begin: Any

    def Start(self) -> None:
        """Begin the collective."""
        if self != MPI.REQUEST_NULL:
            raise MPI.Exception(MPI.ERR_REQUEST)  # the last run has not been completed
        started = self._begin()
        ctypes.memmove(MPI._addressof(self), MPI._addressof(started), MPI._sizeof(started))

    def Free(self) -> None:  # noqa: N802  mpi4py's name
        """Release the arguments. A run under way ends first."""
        self.Wait()
        self._begin = None

    def free(self) -> None:
        self.Free()
