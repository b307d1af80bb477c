"""Set the stream capture mode of compcoll's threads, so that other threads can capture CUDA graphs."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

from ..pending import THREADS

_THREAD_LOCAL = 1
"""CUDA's CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""


class _Thread(threading.local):
    """Records whether this thread's mode needs no change. Python calls ``__init__`` once in each thread."""

    def __init__(self) -> None:
        self.mode_is_set = not threading.current_thread().name.startswith(THREADS)


_thread = _Thread()


@functools.cache
def _exchange() -> Callable[[Any], int] | None:
    """Return the driver's function that sets the mode; None without a driver, or if CUDA is older than 10.1."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def use_thread_local_capture_mode() -> None:
    """Set the stream capture mode of one of compcoll's threads to thread-local. CUDA must be initialized.

    In CUDA's default mode, a thread that queries an event or allocates memory invalidates the capture of another
    thread (https://github.com/pytorch/pytorch/pull/148594). Threads of the user keep their mode.
    """
    if not _thread.mode_is_set:
        exchange = _exchange()  # the call may fail in a thread without a context: the thread's next call tries again
        _thread.mode_is_set = exchange is None or exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL))) == 0
