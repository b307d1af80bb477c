"""Private communicators whose owners nobody has any more. MPI gives a communicator back on all its ranks together: so
these are, when the next one of the same ranks is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .library import MPI


class Freed(Protocol):
    """A message that is sent or received again and again."""

    def Free(self) -> None: ...  # noqa: N802


class _Forgotten(NamedTuple):
    serial: int
    comm: MPI.Intracomm
    messages: Sequence[Freed]


Told = tuple[int, list[int]]
"""The message of a rank to the others: the largest number that it has given, and those of what it has forgotten."""

_forgotten: list[_Forgotten] = []
_last = 0


def _same_ranks(one: MPI.Intracomm, other: MPI.Intracomm) -> bool:
    groups = one.Get_group(), other.Get_group()
    same = MPI.Group.Compare(*groups) == MPI.IDENT
    for group in groups:
        group.Free()
    return same


def told(comm: MPI.Intracomm) -> Told:
    """Collect what this rank has to tell the ranks of a communicator."""
    _forgotten[:] = [each for each in _forgotten if each.comm != MPI.COMM_NULL]  # else it was freed
    return _last, [each.serial for each in _forgotten if _same_ranks(each.comm, comm)]


def give_back(owner: object, comm: MPI.Intracomm, messages: Sequence[Freed], heard: Sequence[Told]) -> None:
    """Free what all ranks of a communicator have forgotten, and from now on watch its owner. Collective.

    Parameters
    ----------
    owner : object
        Uses it, with these messages.
    heard : sequence
        What each of its ranks had to tell.
    """
    global _last
    # The same on all these ranks, and larger than what any has given before.
    _last = max(last for last, _ in heard) + 1
    everywhere = frozenset.intersection(*(frozenset(serials) for _, serials in heard))
    for each in sorted(_forgotten, key=lambda each: each.serial):
        if each.serial in everywhere and _same_ranks(each.comm, comm):
            for message in each.messages:
                message.Free()
            each.comm.Free()
    weakref.finalize(owner, _forgotten.append, _Forgotten(_last, comm, messages)).atexit = False
