"""A watchdog for work on GPU streams that no host waits for."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CollectiveFailed, CompcollError, PeerTimeout
from ..pending import Pending, start_thread

if TYPE_CHECKING:
    from .runtime import CudaRuntime

Array = Any
Event = Any
Message = tuple[Array, int]
"""Bytes in GPU memory, and the rank that receives or sends them."""

_SECONDS_BETWEEN_POLLS = 0.02
_SECONDS_WITHOUT_WORK = 10.0  # then the thread ends; new work starts another one


class _Watched(NamedTuple):
    done: Pending
    what: str
    seconds: float


class NCCLBase(ABC):
    """One rank's NCCL communicator. A thread polls its work, and aborts all of it if some is late.

    Subclasses call NCCL. All ranks must start the same operations in the same order.

    Parameters
    ----------
    runtime : CudaRuntime
        The runtime of this rank's GPU.

    Attributes
    ----------
    error : CompcollError or None
        The first error. After an error, no more work may be started.
    """

    name = "NCCL"

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._under_way: deque[_Watched] = deque()
        self._lock = threading.Condition()
        self._running = self._ending = False
        self.error: CompcollError | None = None

    @abstractmethod
    def exchange(self, leaving: Sequence[Message], arriving: Sequence[Message], stream: Any) -> None:
        """Put messages on a stream as one group. Messages between two ranks match in the order given."""

    @abstractmethod
    def allreduce(self, x: Array, out: Array, dtype: str, *, mean: bool, stream: Any) -> None:
        """Put NCCL's own allreduce on a stream; ``out`` may be ``x``."""

    @abstractmethod
    def _look(self) -> None:
        """Raise NCCL's error, if there is one."""

    @abstractmethod
    def _abort(self) -> None:
        """Abort all pending work, without waiting for other ranks."""

    @abstractmethod
    def _leave(self) -> None:
        """Destroy the communicator, together with the other ranks."""

    def watch(self, event: Event, what: str, seconds: float) -> None:
        """Abort all work if an event does not complete within ``seconds`` after all events watched earlier."""
        with self._lock:
            self._under_way.append(_Watched(self._runtime.pending(event), what, seconds))
            if self._running:
                self._lock.notify_all()
                return
            self._running = True
        try:
            start_thread("watch", self._run)
        except RuntimeError:  # the system has no more threads
            self._running = False
            raise

    def check(self) -> None:
        """Raise the first error, if there is one."""
        if self.error is not None:
            raise self.error

    def free(self, seconds: float) -> None:
        """Destroy the communicator, which waits for the other ranks; abort it if work does not end within ``seconds``.

        NCCL allows only one of the two, and only once.
        """
        with self._lock:
            self._ending = True
            self._lock.notify_all()
            ended = self._lock.wait_for(lambda: not self._running, seconds)
        if self.error is not None:
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

    def _at_the_end(self, work: Callable[[], None]) -> None:
        with self._runtime.current, suppress(Exception):  # no caller is left to handle an error of NCCL
            work()

    def _run(self) -> None:
        with self._runtime.current:
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
                            f"{first.what} by {self.name} has not ended within {first.seconds:g} s: some rank did not "
                            f"start it, or has died; {self.name}'s communicator was aborted"
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
            self.error = CollectiveFailed(f"{first.what} by {self.name}: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        with suppress(Exception):
            self._abort()
        with self._lock:
            self._under_way.clear()
            self._running = False
            self._lock.notify_all()
