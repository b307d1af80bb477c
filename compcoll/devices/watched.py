"""Common parts of all that carry bytes from GPU to GPU: a watch that ends what does not end, and a way to leave."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from ..progress import THREADS, Pending, Watch

Event = Any


class Watchable(Protocol):
    """A GPU, as far as it is watched.

    Attributes
    ----------
    current : context manager
        Makes the GPU the thread's current one.
    """

    @property
    def current(self) -> AbstractContextManager[object]: ...

    def pending(self, event: Event) -> Pending:
        """The event as something that the host looks at."""


class WatchedCarrier(ABC):
    """One rank's part of NCCL, whoever calls it: errors, and how it ends.

    Parameters
    ----------
    runtime : Watchable
        Of this rank's GPU.
    """

    name = "NCCL"

    def __init__(self, runtime: Watchable) -> None:
        self._runtime = runtime
        self._watch = Watch(self.name, self._look, self._abort, lambda: runtime.current)
        self.check = self._watch.check

    @abstractmethod
    def _look(self) -> None:
        """Raise NCCL's error, if there is one."""

    @abstractmethod
    def _abort(self) -> None:
        """End all that is under way, without the other ranks."""

    @abstractmethod
    def _leave(self) -> None:
        """Give the communicator back, together with the other ranks."""

    def watch(self, event: Event, what: str, seconds: float) -> None:
        """See to it that an event comes (the contract is `compcoll.transports.streamed.Carrier`)."""
        self._watch.add(self._runtime.pending(event), what, seconds)

    def free(self, seconds: float) -> None:
        """Leave the others. NCCL bears one end alone: an abort, or a destruction, which waits for the other ranks."""
        ended = self._watch.finish(seconds)
        if self._watch.error is not None:
            return
        if not ended:
            self._at_the_end(self._abort)
            return
        leaving = threading.Thread(target=self._at_the_end, args=(self._leave,), name=f"{THREADS}free", daemon=True)
        try:
            leaving.start()
        except RuntimeError:  # the system gives no more
            self._at_the_end(self._abort)
            return
        leaving.join(seconds)

    def _at_the_end(self, work: Any) -> None:
        with self._runtime.current, suppress(Exception):  # of NCCL's: nobody is left to be told
            work()
