"""A watch over work that no wait of the host's stands for, such as that of a GPU's stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from ..errors import CollectiveFailed, CompcollError, PeerTimeout
from .steps import THREADS, Pending

_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_WITHOUT_WORK = 10.0  # after which the thread ends, until there is some again


class _Watched(NamedTuple):
    done: Pending
    what: str
    seconds: float


class Watch:
    """A thread that looks after work of a stream, which ends in order, and ends what does not end by itself.

    Parameters
    ----------
    name : str
        Who works, for errors.
    look : callable
        Raises the error of whoever works, if there is one.
    abort : callable
        Ends all that was given to it.
    entered : callable
        Makes what the thread needs, for as long as it runs.

    Attributes
    ----------
    error : CompcollError or None
        What went wrong. Nothing more must be given to it then.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], object],
        abort: Callable[[], object],
        entered: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._name = name
        self._look, self._abort, self._entered = look, abort, entered
        self._under_way: deque[_Watched] = deque()
        self._lock = threading.Condition()
        self._running = self._ending = False
        self.error: CompcollError | None = None

    def add(self, done: Pending, what: str, seconds: float) -> None:
        """Look after work whose end ``done`` tells; it may take so many seconds from when all before it has ended."""
        with self._lock:
            self._under_way.append(_Watched(done, what, seconds))
            if self._running:
                self._lock.notify_all()
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name=f"{THREADS}watch", daemon=True).start()
        except RuntimeError:  # the system gives no more: nobody looks
            self._running = False
            raise

    def finish(self, seconds: float) -> bool:
        """Wait until nothing is under way and nobody looks any more, for so many seconds; tell whether that is so."""
        with self._lock:
            self._ending = True
            self._lock.notify_all()
            return self._lock.wait_for(lambda: not self._running, seconds)

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        with self._entered():
            since = time.monotonic()
            while True:
                with self._lock:
                    if not self._under_way:
                        self._lock.wait_for(lambda: self._under_way or self._ending, _SECONDS_WITHOUT_WORK)
                        if not self._under_way:
                            self._running = False
                            self._lock.notify_all()
                            return
                        since = time.monotonic()
                    first = self._under_way[0]
                try:
                    ended = first.done.Test()
                    self._look()
                    if not ended and time.monotonic() > since + first.seconds:
                        raise PeerTimeout(
                            f"{first.what} by {self._name} has not ended within {first.seconds:g} s: some rank did not "
                            f"come to it, or has died; {self._name}'s communicator was aborted"
                        )
                except Exception as error:
                    self._give_up(first, error)
                    return
                if ended:
                    with self._lock:
                        self._under_way.popleft()
                    since = time.monotonic()
                else:
                    time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _give_up(self, first: _Watched, error: Exception) -> None:
        if isinstance(error, CompcollError):
            self.error = error
        else:
            self.error = CollectiveFailed(f"{first.what} by {self._name}: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        with suppress(Exception):
            self._abort()
        with self._lock:
            self._under_way.clear()
            self._running = False
            self._lock.notify_all()
