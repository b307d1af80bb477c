"""Watchdogs over GPU streams for which no host waits, and over the transport between GPUs."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

from ..errors import CollectiveFailed, CompcollError, PeerTimeout
from ..pending import Pending, start_thread

Event = Any
_SECONDS_BETWEEN_POLLS = 0.02
_SECONDS_WITHOUT_WORK = 10.0  # after which the thread ends, until work is added again


class _Watched(NamedTuple):
    done: Pending
    what: str
    seconds: float


class Watchdog:
    """A thread that polls the work of a stream, which completes in order, and aborts it after a time limit.

    Parameters
    ----------
    name : str
        The library that works, for errors.
    look : callable
        Raises the library's error, if there is one.
    abort : callable
        Aborts all work.
    entered : callable
        Returns a context manager, entered while the thread runs.

    Attributes
    ----------
    error : CompcollError or None
        The first error. No more work must be added then.
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
        """Watch work that ends with ``done``, within ``seconds`` after all earlier work has ended."""
        with self._lock:
            self._under_way.append(_Watched(done, what, seconds))
            if self._running:
                self._lock.notify_all()
                return
            self._running = True
        try:
            start_thread("watch", self._run)
        except RuntimeError:  # the system has no more threads
            self._running = False
            raise

    def finish(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until all work and the thread have ended; return whether they have."""
        with self._lock:
            self._ending = True
            self._lock.notify_all()
            return self._lock.wait_for(lambda: not self._running, seconds)

    def check(self) -> None:
        """Raise the first error, if there is one."""
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
                    time.sleep(_SECONDS_BETWEEN_POLLS)

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


class Watched(Protocol):
    """The part of a GPU's runtime that watchdogs need.

    Attributes
    ----------
    current : context manager
        Makes the GPU the thread's current one.
    """

    @property
    def current(self) -> AbstractContextManager[object]: ...

    def pending(self, event: Event) -> Pending:
        """Return the event as a request that the host can test."""


class NCCLBase(ABC):
    """Errors and shutdown of one rank's NCCL communicator, whichever library calls NCCL.

    Parameters
    ----------
    runtime : Watched
        The runtime of this rank's GPU.
    """

    name = "NCCL"

    def __init__(self, runtime: Watched) -> None:
        self._runtime = runtime
        self._watch = Watchdog(self.name, self._look, self._abort, lambda: runtime.current)
        self.check = self._watch.check

    @abstractmethod
    def _look(self) -> None:
        """Raise NCCL's error, if there is one."""

    @abstractmethod
    def _abort(self) -> None:
        """Abort all pending work, without the other ranks."""

    @abstractmethod
    def _leave(self) -> None:
        """Destroy the communicator, together with the other ranks."""

    def watch(self, event: Event, what: str, seconds: float) -> None:
        """Watch an event (the contract is `compcoll.gpu.stream_transport.GpuTransport`)."""
        self._watch.add(self._runtime.pending(event), what, seconds)

    def free(self, seconds: float) -> None:
        """End the communicator, once: NCCL allows either an abort or a destruction, which waits for the other ranks."""
        ended = self._watch.finish(seconds)
        if self._watch.error is not None:
            return
        if not ended:
            self._at_the_end(self._abort)
            return
        try:
            leaving = start_thread("free", lambda: self._at_the_end(self._leave))
        except RuntimeError:  # the system has no more threads
            self._at_the_end(self._abort)
            return
        leaving.join(seconds)

    def _at_the_end(self, work: Any) -> None:
        with self._runtime.current, suppress(Exception):  # an error of NCCL has no caller any more
            work()
