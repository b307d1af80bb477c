"""Deferred freeing of private MPI communicators whose owners were garbage-collected.

Freeing an MPI communicator is collective. So it is done when the same ranks create their next communicator.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from ..kernels._host import MPIMessage
from .library import MPI


class _Deferred(NamedTuple):
    serial: int
    comm: MPI.Intracomm
    messages: Sequence[MPIMessage]


PendingFrees = tuple[int, list[int]]
"""A rank's message to the others: the largest serial number so far, and those of its communicators to free."""

_deferred: list[_Deferred] = []
_last = 0


def _same_ranks(one: MPI.Intracomm, other: MPI.Intracomm) -> bool:
    groups = one.Get_group(), other.Get_group()
    same = MPI.Group.Compare(*groups) == MPI.IDENT
    for group in groups:
        group.Free()
    return same


def pending_frees(comm: MPI.Intracomm) -> PendingFrees:
    """Return this rank's message to the ranks of ``comm``: the communicators with equal ranks that it can free."""
    _deferred[:] = [each for each in _deferred if each.comm != MPI.COMM_NULL]  # COMM_NULL: already freed
    return _last, [each.serial for each in _deferred if _same_ranks(each.comm, comm)]


def free_deferred(
    owner: object, comm: MPI.Intracomm, messages: Sequence[MPIMessage], frees: Sequence[PendingFrees]
) -> None:
    """Free the communicators that all ranks of ``comm`` can free, and register ``comm`` for later. Collective.

    Parameters
    ----------
    owner : object
        The owner of ``comm``: when it is garbage-collected, ``comm`` and ``messages`` can be freed.
    comm : mpi4py.MPI.Intracomm
        A new private communicator.
    messages : sequence
        Persistent messages on ``comm``.
    frees : sequence
        The message of each of its ranks, as returned by `pending_frees`.
    """
    global _last
    # Equal on all these ranks, and larger than any earlier serial number.
    _last = max(last for last, _ in frees) + 1
    everywhere = frozenset.intersection(*(frozenset(serials) for _, serials in frees))
    for each in sorted(_deferred, key=lambda each: each.serial):
        if each.serial in everywhere and _same_ranks(each.comm, comm):
            for message in each.messages:
                message.Free()
            each.comm.Free()
    weakref.finalize(owner, _deferred.append, _Deferred(_last, comm, messages)).atexit = False
