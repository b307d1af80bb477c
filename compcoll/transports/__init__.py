"""Transports: they carry messages between ranks."""

from __future__ import annotations

from typing import Any

from .base import Connection


def transport_of(comm: Any, *, threads: bool, timeout: float | None = None) -> Connection:
    """Return the transport for a `Communicator`'s argument: an MPI communicator, None for COMM_WORLD, or a transport.

    Raises
    ------
    MPIMissing
        If ``comm`` is not a transport and there is no MPI library.
    """
    if isinstance(comm, Connection):
        return comm
    from .mpi import MPITransport  # starts MPI

    return MPITransport(comm, threads=threads, timeout=timeout)
