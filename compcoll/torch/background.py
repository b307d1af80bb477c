"""Background threads that call one function repeatedly."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache

import torch

from ..gpu.captures import use_thread_local_capture_mode
from ..pending import start_thread

_SECONDS_AT_THE_END = 2.0

_ending: weakref.WeakSet[Background] = weakref.WeakSet()


@lru_cache(maxsize=1)
def _end_all_at_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """End the threads before MPI and the interpreter end; wait at most two seconds for each."""
    for background in tuple(_ending):
        background.close(_SECONDS_AT_THE_END)


class Background:
    """A daemon thread that calls a function repeatedly, and sleeps in between for the seconds that it returns.

    Parameters
    ----------
    name : str
        Name of the thread, after the prefix of all threads of compcoll.
    look : callable
        Called without arguments; returns the seconds until the next call, or None to sleep until `wake`.
    ends_at_exit : bool
        Whether to end the thread when the interpreter begins to shut down. Set this if the thread may be in C++ for
        long, or has jobs to finish. Otherwise the thread runs until the interpreter is gone.
    """

    def __init__(self, name: str, look: Callable[[], float | None], *, ends_at_exit: bool = False) -> None:
        self._name, self._look = name, look
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        # Not queue.SimpleQueue: if its get() is late for its time-out, it then waits without one (CPython 3.11).
        self._woken = threading.Event()
        if ends_at_exit:
            _ending.add(self)
            _end_all_at_exit()

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = start_thread(self._name, self._run)

    def wake(self) -> None:
        """Make the thread call its function now."""
        self._woken.set()
        self.start()

    def close(self, seconds: float | None = None) -> None:
        """End the thread after one more call, and wait at most `seconds` for that; without limit by default."""
        self._closed = True
        if self._thread is not None:
            self.wake()
            if self._thread is not threading.current_thread():
                self._thread.join(seconds)

    def _run(self) -> None:
        closed = False
        while not closed:
            closed = self._closed
            if torch.cuda.is_initialized():
                use_thread_local_capture_mode()
            pause = self._look()
            if not closed:
                self._woken.wait(pause)
                self._woken.clear()
