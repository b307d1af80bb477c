"""CUDA IPC through CuPy: processes of one machine share GPU memory and events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime as api

from .runtime import CudaRuntime

Array = Any


class CudaIPC:
    """Interprocess memory and events of one GPU.

    Parameters
    ----------
    runtime : CudaRuntime
        The runtime of this rank's GPU.
    """

    name = "CUDA IPC"

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._memory: list[int] = []
        self._events: list[SimpleNamespace] = []

    def memory_handle(self, memory: Array) -> bytes:
        """Return the 64-byte handle with which other processes open ``memory``, a whole allocation."""
        with self._runtime.current:
            return bytes(api.ipcGetMemHandle(self._runtime.address(memory)))

    def event(self) -> tuple[cupy.cuda.Event, bytes]:
        """Create an interprocess event; return it and the 64-byte handle with which other processes open it."""
        with self._runtime.current:
            event = cupy.cuda.Event(disable_timing=True, interprocess=True)
            return event, bytes(api.ipcGetEventHandle(event.ptr))

    def open_memory(self, handle: bytes, nbytes: int) -> Array:
        """Open another process's memory."""
        with self._runtime.current:
            self._memory.append(api.ipcOpenMemHandle(handle))
            memory = cupy.cuda.UnownedMemory(self._memory[-1], nbytes, self, self._runtime.device.id)
            return cupy.ndarray(nbytes, np.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def open_event(self, handle: bytes) -> SimpleNamespace:
        """Open another process's event."""
        with self._runtime.current:
            self._events.append(SimpleNamespace(ptr=api.ipcOpenEventHandle(handle)))
            return self._events[-1]

    def close(self) -> None:
        """Close all opened memory and events."""
        with self._runtime.current:
            while self._memory:
                api.ipcCloseMemHandle(self._memory.pop())
            while self._events:
                api.eventDestroy(self._events.pop().ptr)
