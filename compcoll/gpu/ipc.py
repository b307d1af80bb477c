"""GPU memory and events shared by the processes of one machine: CUDA's interprocess communication, by CuPy."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime as api

from .runtime import CudaRuntime

Array = Any


class _Opened:
    """Another process's event."""

    def __init__(self, pointer: int) -> None:
        self.ptr = pointer


class CudaIPC:
    """Interprocess memory and events of one GPU (the contract is `compcoll.gpu.ipc_transport.Sharing`).

    Parameters
    ----------
    runtime : CudaRuntime
        The runtime of this rank's GPU.
    """

    name = "CUDA IPC"

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._memory: list[int] = []
        self._events: list[_Opened] = []

    def memory_handle(self, memory: Array) -> bytes:
        with self._runtime.current:
            return bytes(api.ipcGetMemHandle(self._runtime.address(memory)))

    def event(self) -> tuple[cupy.cuda.Event, bytes]:
        with self._runtime.current:
            event = cupy.cuda.Event(disable_timing=True, interprocess=True)
            return event, bytes(api.ipcGetEventHandle(event.ptr))

    def open_memory(self, handle: bytes, nbytes: int) -> Array:
        with self._runtime.current:
            self._memory.append(api.ipcOpenMemHandle(handle))
            memory = cupy.cuda.UnownedMemory(self._memory[-1], nbytes, self, self._runtime.device.id)
            return cupy.ndarray(nbytes, np.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def open_event(self, handle: bytes) -> _Opened:
        with self._runtime.current:
            self._events.append(_Opened(api.ipcOpenEventHandle(handle)))
            return self._events[-1]

    def close(self) -> None:
        with self._runtime.current:
            while self._memory:
                api.ipcCloseMemHandle(self._memory.pop())
            while self._events:
                api.eventDestroy(self._events.pop().ptr)
