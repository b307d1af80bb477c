"""Requests that an algorithm's steps wait for: their order, and how long to spin and sleep."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Protocol

from .errors import PeerTimeout
from .kernels._host import poll, sleeps_within


class Pending(Protocol):
    """A request that an algorithm waits for: a message, or an event of a device."""

    def Test(self) -> bool:
        """Return whether the request has completed, without blocking. Not called again after it returned True."""


Steps = Generator[Pending | None, None, Any]
"""An algorithm as a generator. It yields the requests that it waits for (None: no wait), and returns the result."""


THREADS = "compcoll-"
"""The prefix of the names of compcoll's threads."""

WaitPolicy = tuple[int, int]
"""How long a rank waits for a message before it does something else: a number of spins, then milliseconds of sleeping,
in which other processes can use the core.
"""


give_way = ctypes.CDLL(None).sched_yield
"""Yields the core to other processes, and the GIL to other threads. Before Python 3.12 os.sched_yield keeps the GIL."""

_SPIN_SECONDS, _SPIN_SECONDS_PER_BYTE = 0.1, 1e-7
_POLLS_AT_ONCE = 16
_spin_seconds: dict[int, float] = {}


class NeedsPolling:
    """One of MPI's nonblocking collectives, which progresses only while it is polled: sleeping would delay it.

    Parameters
    ----------
    started : Pending
        The collective's request.
    nbytes : int
        Bytes of its array. After 0.1 s plus 0.1 µs per byte a wait sleeps anyway: another rank has probably stopped.
    """

    __slots__ = ("Test",)

    def __init__(self, started: Pending, nbytes: int) -> None:
        self.Test = partial(poll, started.Test, _POLLS_AT_ONCE, 0)
        _spin_seconds[id(self)] = _SPIN_SECONDS + nbytes * _SPIN_SECONDS_PER_BYTE

    def __del__(self, kept: dict[int, float] = _spin_seconds) -> None:  # an argument, since globals may be gone at exit
        kept.pop(id(self), None)


def spin_seconds() -> float:
    """Return the seconds for which waits must not sleep because MPI's own collectives need polling; else 0."""
    return max(tuple(_spin_seconds.values()), default=0.0)


class OrderingTicket:
    """A place in a queue. MPI matches collectives by the order of their calls, which must be the same on all ranks.

    Parameters
    ----------
    before : OrderingTicket or None
        The ticket in front of this one.

    Attributes
    ----------
    before : OrderingTicket or None
        The ticket in front; None once all tickets in front are known to be over.
    used : bool
        Whether the owner has used its turn or does not need it, so that the next ticket's turn may come.
    """

    __slots__ = ("before", "used")

    used: bool
    before: OrderingTicket | None

    def __init__(self, before: OrderingTicket | None) -> None:
        self.before = None if before is not None and before.used and before.before is None else before
        self.used = False

    @property
    def over(self) -> bool:
        return self.used and self.Test()

    def Test(self) -> bool:
        """Return whether all tickets in front are over."""
        if self.before is not None and self.before.over:
            self.before = None
        return self.before is None


_SPINS = 50


def start_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread.

    Raises
    ------
    RuntimeError
        If the system has no more threads.
    """
    thread = threading.Thread(target=work, name=f"{THREADS}{name}", daemon=True)
    thread.start()
    return thread


def wait_until(test: Callable[[], bool], seconds: float) -> bool:
    """Poll a function until it returns True: spin, then sleep. Return False if it has not after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not poll(test, _SPINS, sleeps_within(seconds)):
        if time.monotonic() > deadline:
            return False
    return True


def wait_for(pending: Pending, seconds: float, what: str) -> None:
    """Wait on the host for a request that usually completes soon: spin first, then sleep.

    Raises
    ------
    PeerTimeout
        If it has not completed after ``seconds``; ``what`` begins the message.
    """
    if not wait_until(pending.Test, seconds):
        raise PeerTimeout(f"{what} within {seconds:g} s")


def keep_forever(thing: Any) -> None:
    """Never free this object, not even when the interpreter exits: MPI may still write to its memory."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
