"""Invalidation of all communicators of a process: in a forked child, which must not call MPI, or when MPI ends."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol

from .errors import CommunicatorBroken

_FORKED = (
    "this process was forked from one that had started MPI, so it must not call MPI: start processes before MPI, or "
    'with multiprocessing\'s "spawn" or "forkserver"; end a forked child with os._exit'
)


class Invalidatable(Protocol):
    """An object that cannot be used after a fork or the end of MPI."""

    def invalidate(self, error: CommunicatorBroken, forked: bool) -> None:
        """Invalidate the object without calling MPI. In a forked child, locks that other threads held stay locked."""


_alive: weakref.WeakSet[Invalidatable] = weakref.WeakSet()
_ended = ""
_before_end: list[Callable[[], None]] = []


def live(owner: Invalidatable) -> None:
    """Register a communicator for `end_all`."""
    _alive.add(owner)


def before_end(work: Callable[[], None]) -> None:
    """Register a function that `end_all` calls first, while MPI still works."""
    _before_end.append(work)


def check_alive() -> None:
    """Check that communicators can still be used.

    Raises
    ------
    CommunicatorBroken
        If `end_all` was called.
    """
    if _ended:
        raise CommunicatorBroken(_ended)


def is_forked() -> bool:
    """Return whether this process was forked from one that had started MPI."""
    return _ended == _FORKED


def end_all(why: str, forked: bool = False) -> None:
    """Invalidate all communicators. Unless ``forked``, first call the functions registered with `before_end`."""
    global _ended
    if not forked:
        for work in _before_end:
            work()
    _ended = why
    for owner in tuple(_alive):
        owner.invalidate(CommunicatorBroken(why), forked)


def watch_forks() -> None:
    """Invalidate all communicators in children that this process forks from now on."""
    os.register_at_fork(after_in_child=lambda: end_all(_FORKED, forked=True))
