"""Transports: what carries messages between ranks."""

from __future__ import annotations

from typing import Any

from .base import Connection


def transport_of(comm: Any, *, threads: bool, timeout: float | None = None) -> Connection:
    """The transport for what a `Communicator` was given: an MPI communicator, None for COMM_WORLD, or a transport.

    Raises
    ------
    MPIMissing
        If it is no transport, and there is no MPI library.
    """
    # Its class is asked: attributes of MPI's communicators call MPI, which may have ended.
    if hasattr(type(comm), "announced"):
        return comm  # type: ignore[no-any-return]
    from .mpi import transport_by_mpi  # starts MPI

    return transport_by_mpi(comm, threads=threads, timeout=timeout)
