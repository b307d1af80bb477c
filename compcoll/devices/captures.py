"""Calls of compcoll's own threads, while another thread of the process captures a CUDA graph."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

from ..progress import THREADS

_THREAD_LOCAL = 1
"""CUDA's CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""


class _Thread(threading.local):
    """Whether the thread has the mode that it should have. Python calls ``__init__`` in each thread."""

    def __init__(self) -> None:
        self.ready = not threading.current_thread().name.startswith(THREADS)


_thread = _Thread()


@functools.cache
def _exchange() -> Callable[[Any], int] | None:
    """Find the driver's function; None without a driver, or if CUDA is older than 10.1."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def leave_captures_alone() -> None:
    """Let the calls of one of compcoll's threads not end the captures of other threads. CUDA must be initialized.

    In CUDA's default mode, a query of an event or an allocation fails while another thread captures, and ends the
    capture (https://github.com/pytorch/pytorch/pull/148594). Each thread has its own mode; the user's keep theirs.
    """
    if not _thread.ready:
        exchange = _exchange()  # a thread without a context may be refused: then its next call tries again
        _thread.ready = exchange is None or exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL))) == 0
