"""The end of all communicators of a process at once: by a fork, whose child must not touch MPI, or the end of MPI."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol

from .errors import CommunicatorBroken

_FORKED = (
    "this process was forked from one that had started MPI: in such a child MPI must not be called. Start processes "
    'before MPI, or by multiprocessing\'s "spawn" or "forkserver"; end a child by os._exit'
)


class Invalidatable(Protocol):
    """An object that cannot be used any more after a fork or the end of MPI."""

    def end(self, error: CommunicatorBroken, forked: bool) -> None:
        """Break it without a call of MPI's; in a forked child no other thread is left, and locks may be held."""


_alive: weakref.WeakSet[Invalidatable] = weakref.WeakSet()
_ended = ""
_before_end: list[Callable[[], None]] = []


def live(owner: Invalidatable) -> None:
    """Break this communicator, too, when the time has come."""
    _alive.add(owner)


def before_end(work: Callable[[], None]) -> None:
    """Call this first when all communicators end while MPI still works."""
    _before_end.append(work)


def check_alive() -> None:
    """Make sure that nothing has ended the communicators.

    Raises
    ------
    CommunicatorBroken
        If something has.
    """
    if _ended:
        raise CommunicatorBroken(_ended)


def is_forked() -> bool:
    """Tell whether this process is the child of one that had started MPI."""
    return _ended == _FORKED


def end_all(why: str, forked: bool = False) -> None:
    """End all communicators. Without a fork, collectives under way may end first."""
    global _ended
    if not forked:
        for work in _before_end:
            work()
    _ended = why
    for owner in tuple(_alive):
        owner.end(CommunicatorBroken(why), forked)


def watch_forks() -> None:
    """End all communicators in children of this process, from now on."""
    os.register_at_fork(after_in_child=lambda: end_all(_FORKED, forked=True))
