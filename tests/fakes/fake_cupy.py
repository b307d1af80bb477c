"""What compcoll uses of CuPy's interface, on host memory: kernels run by the shim, and at once.

It shows that `compcoll.gpu.device` hands over the right things, not when: that is the deferred device's part.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes.cuda_shim import Shim

from compcoll import config
from compcoll.gpu.launches import Launch

MANAGED = 3


class CUDARuntimeError(RuntimeError):
    """CUDA's."""

    def __init__(self, status: int | str) -> None:
        super().__init__(status)
        self.status = status


class _Entered:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class CUDADriverError(RuntimeError):
    """That of CUDA's driver."""


class Device(_Entered):
    compute_capability = "90"

    def __init__(self, index: int) -> None:
        self.id = index

    def synchronize(self) -> None:
        pass


class Event:
    status: ClassVar[dict[int, int]] = {}
    """By what CUDA calls them: 0, they have come; 600, not yet."""
    _handles = iter(range(1, 10**9))

    def __init__(self, disable_timing: bool = False, interprocess: bool = False) -> None:
        assert disable_timing or not interprocess
        self.interprocess = interprocess
        self.ptr = next(self._handles)
        self.status[self.ptr] = 600

    @property
    def done(self) -> bool:
        return self.status[self.ptr] == 0

    def record(self, stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        self.status[self.ptr], self.seconds = 0, perf_counter()

    def synchronize(self) -> None:
        assert self.done


class Stream(_Entered):
    null: Stream
    ptds: Stream
    entered: ClassVar[list[Stream]] = []
    _handles = iter(range(1000, 10**9))

    def __init__(self, null: bool = False, non_blocking: bool = False, priority: int | None = None) -> None:
        self.priority = priority
        self.capturing = False
        self.ptr = 0 if null else next(self._handles)

    @classmethod
    def from_external(cls, other: Any) -> Stream:
        stream = cls()
        stream.ptr = other.__cuda_stream__()[1]
        return stream

    def __enter__(self) -> Stream:
        self.entered.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        assert self.entered.pop() is self

    def is_capturing(self) -> bool:
        return self.capturing

    def wait_event(self, event: Any) -> None:
        assert Event.status[event.ptr] == 0

    def synchronize(self) -> None:
        pass


Stream.null, Stream.ptds = Stream(null=True), Stream()


class Memory:
    def __init__(self, nbytes: int) -> None:
        assert nbytes > 0
        self.array = np.full(nbytes, 0xFF, np.uint8)
        self.managed = False


class MemoryPointer:
    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.array.ctypes.data + offset


class UnownedMemory(Memory):
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        assert owner is not None and device_id >= 0
        self.array = np.frombuffer((ctypes.c_uint8 * size).from_address(ptr), np.uint8)
        self.managed = False


def pinned_pointer(mem: Memory, offset: int) -> memoryview:
    return memoryview(mem.array)[offset:]


class ndarray:
    """GPU memory, as the fake has it."""

    def __init__(self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None) -> None:
        count = int(np.prod(shape))
        dtype = np.dtype(dtype)
        mem = Memory(max(count * dtype.itemsize, 1)) if memptr is None else memptr.mem
        self._is(mem, mem.array[: count * dtype.itemsize].view(dtype).reshape(shape))

    def _is(self, mem: Memory, array: np.ndarray) -> None:
        self.mem, self.array = mem, array
        self.data = MemoryPointer(mem, array.ctypes.data - mem.array.ctypes.data)
        self.device = Device(0)
        for name in ("shape", "strides", "dtype", "ndim", "size", "nbytes", "itemsize", "flags"):
            setattr(self, name, getattr(array, name))

    def _cut(self, array: np.ndarray) -> ndarray:
        other = object.__new__(ndarray)
        other._is(self.mem, array)
        return other

    def __getitem__(self, part: Any) -> ndarray:
        return self._cut(self.array[part])

    def reshape(self, *shape: Any) -> ndarray:
        return self._cut(self.array.reshape(*shape))

    @property
    def T(self) -> ndarray:
        return self._cut(self.array.T)

    def copy(self) -> ndarray:
        return upload(self.array)

    def view(self, dtype: Any) -> ndarray:
        return self._cut(self.array.view(dtype))

    def set(self, values: np.ndarray, stream: Stream | None = None) -> None:
        self.array[...] = values

    def get(self, stream: Stream | None = None, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            return self.array.copy()
        out[...] = self.array
        return out

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


def upload(array: np.ndarray) -> ndarray:
    copy = ndarray(array.shape, array.dtype)
    copy.array[...] = array
    return copy


def zeros(n: Any, dtype: Any) -> ndarray:
    return upload(np.zeros(n, dtype))


class RawModule:
    shim: Shim
    compiled: ClassVar[list[str]] = []
    """Of what CuPy itself compiles, the options."""

    def __init__(self, *, code: str = "", options: tuple[str, ...] = (), path: str = "") -> None:
        assert path or ("Parameters" in code and all(isinstance(option, str) for option in options))
        self._path = path
        if not path:
            self.compiled.append(" ".join(options))

    def compile(self) -> None:
        if Path(self._path).read_bytes() != b"code":
            raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")

    def get_function(self, name: str) -> Any:
        def kernel(grid: tuple[int], block: tuple[int], arguments: tuple[Any]) -> None:
            self.shim.run([Launch(name, *grid, *block, *arguments)])

        return kernel


def memcpy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    assert kind == 4 and isinstance(stream, int)
    ctypes.memmove(target, source, nbytes)


def attributes(pointer: int) -> Any:
    return types.SimpleNamespace(type=2, device=0)


def handle(pointer: int) -> bytes:
    """What opens memory, or an event, in another process."""
    return pointer.to_bytes(64, "little")


def opened(handle: bytes) -> int:
    """Refuse what this process has made itself, as CUDA does."""
    assert isinstance(handle, bytes) and len(handle) == 64
    raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")


class NcclError(RuntimeError):
    """NCCL's."""


class NcclCommunicator:
    """Notes down what it is asked for, by CuPy's names."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    fails = False

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        assert len(commId) == 128
        self.calls.append(("init", ndev, rank))

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self.calls.append(("send", sendbuf, count, datatype, peer, stream))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self.calls.append(("recv", recvbuf, count, datatype, peer, stream))

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self.calls.append(("allReduce", sendbuf, recvbuf, count, datatype, op, stream))

    def check_async_error(self) -> None:
        if self.fails:
            raise NcclError("remote error")

    def abort(self) -> None:
        self.calls.append(("abort",))

    def destroy(self) -> None:
        self.calls.append(("destroy",))


def _nccl() -> Any:
    nccl: Any = types.ModuleType("cupy.cuda.nccl")
    nccl.available, nccl.NcclError, nccl.NcclCommunicator = False, NcclError, NcclCommunicator
    nccl.get_version = nccl.get_build_version = lambda: 22703
    nccl.get_unique_id = lambda: b"id".ljust(128, b"\0")
    nccl.groupStart = lambda: NcclCommunicator.calls.append(("groupStart",))
    nccl.groupEnd = lambda: NcclCommunicator.calls.append(("groupEnd",))
    nccl.NCCL_UINT8, nccl.NCCL_FLOAT16, nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64, nccl.NCCL_BFLOAT16 = 1, 6, 7, 8, 9
    nccl.NCCL_SUM, nccl.NCCL_AVG = 0, 4
    return nccl


_ON_CUPY = ("device", "ipc", "nccl", "runtime")


class _CurrentDevice(threading.local):
    """Each thread's current GPU: the first, as CUDA has it; and the last error of a call."""

    index = 0
    last_error = 0


current = _CurrentDevice()


def query(event: int) -> int:
    if status := Event.status[event]:
        current.last_error = status
    return status


def check_status(status: int) -> None:
    if status:
        current.last_error = 0
        raise CUDARuntimeError(status)


@contextmanager
def installed(shim: Shim) -> Iterator[Any]:
    """`compcoll.gpu.device` on the fake, inside the block."""
    runtime: Any = types.ModuleType("cupy.cuda.runtime")
    runtime.memcpyDefault, runtime.memcpyAsync, runtime.memoryTypeManaged = 4, memcpy, MANAGED
    runtime.getDeviceCount = lambda: 1
    runtime.getDeviceProperties = lambda index: {"name": b"fake", "uuid": b"\x12\x34"}
    runtime.pointerGetAttributes = attributes
    runtime.CUDARuntimeError = CUDARuntimeError
    runtime.eventQuery, runtime.check_status = query, check_status
    runtime.ipcGetMemHandle = runtime.ipcGetEventHandle = handle
    runtime.ipcOpenMemHandle = runtime.ipcOpenEventHandle = opened
    nvtx: Any = types.ModuleType("cupy.cuda.nvtx")
    nvtx.ranges = []
    nvtx.RangePush, nvtx.RangePop = nvtx.ranges.append, lambda: None
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.runtime, cuda.nvtx = runtime, nvtx
    cuda.driver = types.SimpleNamespace(CUDADriverError=CUDADriverError)
    cuda.Device, cuda.Stream, cuda.Event = Device, Stream, Event
    cuda.Memory, cuda.MemoryPointer, cuda.PinnedMemory, cuda.PinnedMemoryPointer = (
        Memory,
        MemoryPointer,
        Memory,
        pinned_pointer,
    )
    cuda.UnownedMemory = UnownedMemory
    cuda.get_current_stream = lambda: Stream.entered[-1] if Stream.entered else Stream.null
    cupy: Any = types.ModuleType("cupy")
    cupy.cuda, cupy.ndarray, cupy.__version__ = cuda, ndarray, "fake"
    cupy.RawModule = type("RawModule", (RawModule,), {"shim": shim})
    cupy.empty, cupy.zeros, cupy.asarray, cupy.asnumpy = ndarray, zeros, upload, ndarray.get
    cupy.empty_like, cupy.copyto = ndarray.copy, lambda target, source: target.set(source.array)
    cupy.uint8 = np.uint8
    cuda.get_elapsed_time = lambda begin, end: 1.0
    runtime.getDevice = lambda: current.index
    runtime.setDevice = lambda index: setattr(current, "index", index)
    cuda.nccl = nccl = _nccl()
    runtime.deviceGetPCIBusId = lambda device: f"0000:0{device}:00.0"
    names = ("cupy", "cupy.cuda", "cupy.cuda.runtime", "cupy.cuda.nvtx", "cupy.cuda.nccl")
    with pytest.MonkeyPatch.context() as patch:
        for name, module in zip(names, (cupy, cuda, runtime, nvtx, nccl)):
            patch.setitem(sys.modules, name, module)
        import compcoll.gpu
        from compcoll.gpu import coder, cubins

        # The shim is the program of all configurations.
        patch.setattr(coder, "configuration", lambda *_: None)
        patch.setattr(cubins, "nvrtc", lambda: None)
        patch.setenv(config.CUBINS, "/dev/null")
        for name in _ON_CUPY:
            patch.delitem(sys.modules, f"compcoll.gpu.{name}", raising=False)
            patch.delattr(compcoll.gpu, name, raising=False)
        yield cupy
    for name in _ON_CUPY:
        sys.modules.pop(f"compcoll.gpu.{name}", None)


class OnGPU:
    """What says that it is in CUDA's memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0
