"""Steps of an algorithm: what they wait for, in which order, and for how long."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Generator
from functools import partial
from typing import Any, Protocol

from .errors import CompcollError, PeerTimeout
from .kernels._host import poll, sleeps_within


class Pending(Protocol):
    """Something that an algorithm waits for: a message, or an event of a device."""

    def Test(self) -> bool:
        """Tell whether it has come, without blocking. Not called again once it has."""


Steps = Generator[Pending | None, None, Any]
"""An algorithm: yields what it must wait for (None: nothing on this device), returns the result."""


THREADS = "compcoll-"
"""The beginning of the names of compcoll's own threads."""

WaitPolicy = tuple[int, int]
"""The time that a message is waited for before a rank does something else: so many looks, and then so many
milliseconds of naps, in which others have the core.
"""


class Peers(Protocol):
    """The other ranks, when something goes wrong."""

    def gave_up(self) -> bool:
        """Tell whether some other rank has given up."""

    def ask(self, waiting: str, limit: float) -> CompcollError:
        """Give up, after so many seconds or since another rank did: tell all others, and find out who is missing."""


give_way = ctypes.CDLL(None).sched_yield
"""Lets others have the core, and this rank's other threads the GIL: before Python 3.12 os.sched_yield keeps that."""

_SPIN_SECONDS, _SPIN_SECONDS_PER_BYTE = 0.1, 1e-7
_POLLS_AT_ONCE = 16
_spin_seconds: dict[int, float] = {}


class NeedsPolling:
    """One of MPI's own collectives, which gets on only while somebody looks at it: naps in between would make it wait.

    Parameters
    ----------
    started : Pending
        Tells whether it has ended.
    nbytes : int
        Of its array. Naps do begin after so long that some rank must have been stopped.
    """

    __slots__ = ("Test",)

    def __init__(self, started: Pending, nbytes: int) -> None:
        self.Test = partial(poll, started.Test, _POLLS_AT_ONCE, 0)
        _spin_seconds[id(self)] = _SPIN_SECONDS + nbytes * _SPIN_SECONDS_PER_BYTE

    def __del__(self, kept: dict[int, float] = _spin_seconds) -> None:  # there also when the interpreter ends
        kept.pop(id(self), None)


def spin_seconds() -> float:
    """Seconds for which no wait naps, since collectives of MPI's own need looks; 0 if there are none."""
    return max(tuple(_spin_seconds.values()), default=0.0)


class OrderingTicket:
    """A place in a line: what MPI matches by the order of the calls must not depend on what comes first.

    Parameters
    ----------
    before : OrderingTicket or None
        The place in front of this one.

    Attributes
    ----------
    before : OrderingTicket or None
        The same; None once all in front are known to be over.
    used : bool
        Whether the next one may have it; set also when there was nothing to use it for.
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
        """Tell whether all in front are over."""
        if self.before is not None and self.before.over:
            self.before = None
        return self.before is None


_SPINS = 50


def wait_for(pending: Pending, seconds: float, what: str) -> None:
    """Wait on the host for something that comes soon as a rule, and leave others the core if it does not.

    Raises
    ------
    PeerTimeout
        If it has not come after so many seconds; ``what`` says what that is.
    """
    deadline = time.monotonic() + seconds
    while not poll(pending.Test, _SPINS, sleeps_within(seconds)):
        if time.monotonic() > deadline:
            raise PeerTimeout(f"{what} within {seconds:g} s")


def keep_forever(thing: Any) -> None:
    """Never free this, not even when the interpreter ends: MPI may still write to its memory."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
