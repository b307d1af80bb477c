"""Streams, events, copies and kernels of one GPU, through CuPy."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime as api

from ..errors import UnsupportedDevice
from ..pending import THREADS, Pending
from . import cubins
from .captures import use_thread_local_capture_mode
from .launches import Launch
from .programs import Program

Array = Any

_NOT_READY = 600
"""CUDA's cudaErrorNotReady: the event is not complete."""


_FIRST = -5
"""The highest stream priority of any GPU. CUDA clamps it to this GPU's range."""


class _Done:
    """A request that completes when an event of the GPU does."""

    __slots__ = ("_event",)

    def __init__(self, event: cupy.cuda.Event) -> None:
        self._event = event

    def Test(self) -> bool:
        use_thread_local_capture_mode()
        status = api.eventQuery(self._event.ptr)
        try:
            # Reset CUDA's last error: otherwise PyTorch raises it if both use the same libcudart.
            api.check_status(status)
        except api.CUDARuntimeError:
            if status != _NOT_READY:  # a kernel has failed; `Event.done` would return False for ever
                raise
            return False
        return True

    def __repr__(self) -> str:
        return "an event of the GPU"


_warned: set[str] = set()
"""The GPU architectures for which a failed compilation has already caused a warning."""


def _made(program: Program, arch: str) -> list[Path]:
    """Compile a program once for the node and return its file. Return no file on failure: CuPy may then succeed."""
    try:
        path = cubins.make(program, arch)
    except UnsupportedDevice as error:
        if arch not in _warned:  # other programs mostly fail for the same reason
            _warned.add(arch)
            warnings.warn(f"{error} (each rank compiles with CuPy for itself)", RuntimeWarning, stacklevel=2)
        return []
    return [] if path is None else [path]


def _address(array: Array) -> int:
    return int(array.data.ptr if isinstance(array, cupy.ndarray) else array.ctypes.data)


class _Current:
    """Context manager that makes a GPU the thread's current one.

    The previous GPU is restored at exit, except in compcoll's own threads: selecting a GPU that the process does not
    use creates a context of hundreds of megabytes on it (https://github.com/pytorch/pytorch/issues/94864).
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._before = threading.local()

    def __enter__(self) -> None:
        before = api.getDevice()
        if before != self._index:
            api.setDevice(self._index)
        use_thread_local_capture_mode()
        stack = self._before.__dict__.setdefault("stack", [])
        stack.append(before)

    def __exit__(self, *_: object) -> None:
        before = self._before.stack.pop()
        if before != self._index and not threading.current_thread().name.startswith(THREADS):
            api.setDevice(before)


class CudaRuntime:
    """Streams, events, copies and kernels of one GPU. Work on a stream runs asynchronously and in order.

    Parameters
    ----------
    index : int
        CUDA's number of the device.

    Attributes
    ----------
    current : context manager
        Makes the GPU the thread's current one.
    launching : Stream
        The stream on which coders launch kernels.
    """

    def __init__(self, index: int) -> None:
        self.device = cupy.cuda.Device(index)
        self.current = _Current(index)
        self._modules: dict[Program, cupy.RawModule] = {}
        self._functions: dict[tuple[Program, str], cupy.RawKernel] = {}
        self._scratch: dict[int, Array] = {}
        self.launching = self.stream()

    def place(self) -> bytes:
        """Return 16 bytes that identify this GPU among those of all machines."""
        # CuPy returns the UUID, a char[16], as a C string, which ends at the first zero byte.
        uuid = api.getDeviceProperties(self.device.id)["uuid"]
        return blake2b(uuid + api.deviceGetPCIBusId(self.device.id).encode(), digest_size=16).digest()

    def stream(self) -> cupy.cuda.Stream:
        """Create a stream that is independent of the default stream and has the highest priority."""
        with self.current:
            return cupy.cuda.Stream(non_blocking=True, priority=_FIRST)

    def record(self, stream: cupy.cuda.Stream, event: cupy.cuda.Event | None = None) -> cupy.cuda.Event:
        """Record an event, a new one by default: it completes when all work put on the stream so far is done."""
        with self.current:
            event = cupy.cuda.Event(disable_timing=True) if event is None else event
            event.record(stream)
            return event

    def wait(self, stream: cupy.cuda.Stream, event: cupy.cuda.Event) -> None:
        """Make later work on a stream wait for the event. The host does not wait."""
        with self.current:
            stream.wait_event(event)

    def pending(self, event: cupy.cuda.Event) -> Pending:
        """Return the event as a request on which the host can wait."""
        return _Done(event)

    def copy(self, source: Array, target: Array, nbytes: int, stream: cupy.cuda.Stream) -> None:
        """Copy bytes between device memory and pinned host memory, in stream order."""
        if nbytes:
            with self.current:
                api.memcpyAsync(_address(target), _address(source), nbytes, api.memcpyDefault, stream.ptr)

    def device_bytes(self, nbytes: int) -> Array:
        """Allocate device memory by cudaMalloc, since MPI cannot share a pool's memory between processes."""
        with self.current:
            memory = cupy.cuda.Memory(max(nbytes, 1))
            return cupy.ndarray(nbytes, np.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def pinned_bytes(self, nbytes: int) -> Array:
        """Allocate pinned host memory."""
        with self.current:
            memory = cupy.cuda.PinnedMemory(max(nbytes, 1))
            return np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    @staticmethod
    def address(array: Array | None) -> int:
        """Return the address of an array in GPU memory, or in pinned memory, which kernels can use; 0 for None."""
        return 0 if array is None else _address(array)

    def scratch(self, nbytes: int) -> int:
        """Return the address of scratch memory of the stream `launching`, whose kernels use it one after the other."""
        if not nbytes:
            return 0
        held = self._scratch.get(self.launching.ptr)
        if held is None or held.nbytes < nbytes:
            held = self._scratch[self.launching.ptr] = self.device_bytes(nbytes)
        return self.address(held)

    def launch(self, program: Program, launches: Sequence[Launch]) -> None:
        """Launch kernels on the stream `launching`, which runs them one after the other."""
        with self.current, self.launching:
            for function, grid, block, argument in launches:
                self._function(program, function)((grid,), (block,), (argument,))

    def _function(self, program: Program, name: str) -> cupy.RawKernel:
        key = program, name
        if key not in self._functions:
            if program not in self._modules:
                self._modules[program] = self._load(program)
            self._functions[key] = self._modules[program].get_function(name)
        return self._functions[key]

    def _load(self, program: Program) -> cupy.RawModule:
        """Load a program's cached machine code, or compile it once for the node.

        Without a compiler or a writable folder, CuPy compiles it in each rank.
        """
        arch = self.device.compute_capability
        for paths in (cubins.kept, _made):
            for path in paths(program, arch):
                module = cupy.RawModule(path=str(path))
                try:
                    module.compile()
                except (cupy.cuda.driver.CUDADriverError, OSError):  # built by a compiler newer than the driver
                    continue
                return module
        return cupy.RawModule(code=program.source, options=program.options)
