"""Memory and kernels of a CUDA GPU, for CuPy arrays and all arrays with DLPack or the CUDA Array Interface."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

import cupy
import numpy as np
from cupy.cuda import nvtx
from cupy.cuda import runtime as api

from .. import config
from ..dtypes import DTYPES, HALVES, computed_on, numpy_dtype
from ..errors import InvalidArgument, InvalidBuffer, UnsupportedDevice, UnsupportedDType
from ..host.foreign import BFLOAT16, gpu_memory, is_torch
from .coder import DeviceCoder
from .ipc import CudaIPC
from .nccl import NCCL
from .quantizer import DeviceIntegers, DeviceNumberCoder, DeviceVotes
from .runtime import CudaRuntime
from .selection import SelectionKernels
from .streams import Streams
from .szp import DeviceSzpCoder, SzpStatus

Array = Any
Coding = TypeVar("Coding")

_DEFAULT_STREAMS = {0: cupy.cuda.Stream.null, 1: cupy.cuda.Stream.null, 2: cupy.cuda.Stream.ptds}
"""CuPy's default streams, by CUDA handle."""


class _Handle:
    """Passes the caller's stream handle to CuPy, which asks for ``__cuda_stream__``."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Show a block, or each call of a function, as an NVTX range in profiles."""
    nvtx.RangePush(name)
    try:
        yield
    finally:
        nvtx.RangePop()


def _in_profiles(coder: Coding, *names: str) -> Coding:
    """Wrap the named methods as NVTX ranges if these are enabled, and return the object."""
    if config.nvtx():
        for name in names or ("encode", "decode"):
            setattr(coder, name, nvtx_range(f"compcoll {name}")(getattr(coder, name)))
    return coder


class CudaDevice:
    """Memory and kernels of one GPU, for one communicator.

    Parameters
    ----------
    index : int
        CUDA's number of the device.

    Attributes
    ----------
    name : str
        ``"cuda "`` and the GPU's name.
    """

    def __init__(self, index: int) -> None:
        found = names()
        if index >= len(found):
            raise UnsupportedDevice(f"an array is on CUDA device {index}, but CuPy finds only {', '.join(found)}")
        self.index = index
        self.name = f"cuda {found[index]}"
        self.runtime = CudaRuntime(index)
        self.streams = Streams(self.runtime)
        self._coders: dict[tuple[str, int, int, int, int, str], DeviceCoder] = {}
        self._launching = threading.Lock()
        self._szp_status: SzpStatus | None = None

    def bootstrap(self) -> NCCL:
        """Return the NCCL bootstrap that connects this GPU with those of other ranks."""
        return NCCL(self.runtime)

    def sharing(self) -> CudaIPC:
        """Return the object that shares this GPU's memory and events with other processes of the machine."""
        return CudaIPC(self.runtime)

    def coder(self, kernel: tuple[str, int, int], dtype: str, *, variant: int = 0, seed: int = 0) -> DeviceCoder:
        key = (*kernel, variant, seed, dtype)
        if key not in self._coders:
            made = DeviceCoder(self.runtime, kernel, dtype, variant=variant, seed=seed)
            self._coders[key] = _in_profiles(made)
        return self._coders[key]

    def integers(self, bits: int, levels: int, block: int, dtype: str) -> DeviceIntegers:
        return _in_profiles(DeviceIntegers(self.runtime, bits, levels, block, dtype))

    def votes(self, ranks: int, block: int, dtype: str) -> DeviceVotes:
        return _in_profiles(DeviceVotes(self.runtime, ranks, block, dtype))

    def szp(self, dtype: str, tolerance: float | None, relative: float | None, ranks: int) -> DeviceSzpCoder:
        return _in_profiles(DeviceSzpCoder(self.runtime, self._szp(), dtype, tolerance, relative, ranks))

    def largest(self, x: Array, dtype: str) -> float:
        """Return the largest finite magnitude of an array, after the work on the stream of the next kernels."""
        return self._szp().find_largest(x, dtype)

    def _szp(self) -> SzpStatus:
        if self._szp_status is None:
            self._szp_status = SzpStatus(self.runtime)
        return self._szp_status

    def passes(self, dtype: str) -> SelectionKernels:
        """Return the kernels of sparsification for ``dtype``, ``"float32"`` or ``"float64"``."""
        return _in_profiles(SelectionKernels(self.runtime, dtype), "find", "take", "add", "subtract")

    def number_coder(self, numbers: Array, op: str) -> DeviceNumberCoder:
        """Return a coder that moves numbers of the dtype of ``numbers`` and combines them by ``"sum"`` or ``"max"``."""
        return _in_profiles(DeviceNumberCoder(self.runtime, numbers.dtype, op))

    def caller(self, x: Any, stream: Any) -> cupy.cuda.Stream:
        """Return ``stream`` for CuPy. The default is PyTorch's current stream if ``x`` is a tensor, else CuPy's.

        Raises
        ------
        InvalidArgument
            If ``stream`` is no CUDA stream, or captures a graph.
        """
        found = self._stream_of(x, stream)
        try:
            capturing = found.is_capturing()
        except api.CUDARuntimeError:  # raised for the default stream while a stream that synchronizes with it captures
            capturing = True
        if capturing:
            raise InvalidArgument(
                "the caller's stream captures a CUDA graph, but a collective cannot be captured, since the host waits "
                "for other ranks: call it before or after the capture"
            )
        return found

    def _stream_of(self, x: Any, stream: Any) -> cupy.cuda.Stream:
        if stream is None:
            if is_torch(x):
                handle = sys.modules["torch"].cuda.current_stream(self.index).cuda_stream
            else:
                with self.runtime.current:
                    handle = cupy.cuda.get_current_stream().ptr
        elif hasattr(stream, "__cuda_stream__"):
            handle = stream.__cuda_stream__()[1]
        else:
            handle = getattr(stream, "ptr", getattr(stream, "cuda_stream", stream))
        if not isinstance(handle, int):
            raise InvalidArgument(
                f"stream={stream!r} is no CUDA stream: give one of CuPy or PyTorch, or its handle as an integer"
            )
        if handle in _DEFAULT_STREAMS:
            return _DEFAULT_STREAMS[handle]
        with self.runtime.current:
            return cupy.cuda.Stream.from_external(_Handle(handle))

    def view(self, x: Any, what: str) -> tuple[str, Array]:
        """Return the element type of an array on this GPU and its memory as a flat CuPy array, without a copy.

        Raises
        ------
        InvalidBuffer, UnsupportedDevice, UnsupportedDType
            If the array is on the host or another GPU, in managed memory, not C-contiguous, or not of numbers.
        """
        if not gpu_memory(x):
            raise InvalidBuffer(
                f"{what} is a {type(x).__module__}.{type(x).__qualname__} on the host, but the other arrays of this "
                f"call are on CUDA device {self.index}: all must be on one device"
            )
        array, dtype = as_cupy(x, what)
        if not array.flags.c_contiguous:
            raise InvalidBuffer(
                f"{what} of shape {array.shape} and strides {array.strides} is not C-contiguous: make a copy that is"
            )
        if array.size:
            found = api.pointerGetAttributes(array.data.ptr)
            if found.type == api.memoryTypeManaged:
                raise UnsupportedDevice(f"{what} is in managed memory: copy it to plain device memory")
            if found.device != self.index:
                raise UnsupportedDevice(
                    f"{what} is on CUDA device {found.device}, but this communicator uses device {self.index}: "
                    "use one communicator for each device"
                )
        flat = array.reshape(-1)
        return dtype, flat.view(np.uint16) if dtype in HALVES else flat

    def flat_out(self, out: Any, x: Any, flat: Array, shape: tuple[int, ...]) -> Array:
        """Return the memory of a result buffer as a flat array; ``flat`` itself if it is the same memory.

        Raises
        ------
        InvalidBuffer, UnsupportedDevice
            If the buffer has another shape or type, is on another device, or partly overlaps the input.
        """
        dtype, memory = self.view(out, "out")
        if tuple(out.shape) != shape or out.dtype != x.dtype:
            raise InvalidBuffer(f"out is {dtype}{list(out.shape)}, but the result is {x.dtype}{list(shape)}")
        if memory.data.ptr == flat.data.ptr and memory.nbytes == flat.nbytes:
            return flat
        if memory.data.ptr < flat.data.ptr + flat.nbytes and flat.data.ptr < memory.data.ptr + memory.nbytes:
            raise InvalidBuffer("out overlaps x without being x: give memory of its own")
        return memory

    def empty_like(self, x: Any, shape: tuple[int, ...], caller: cupy.cuda.Stream, dtype: str | None = None) -> Any:
        """Return a new array, PyTorch's if ``x`` is, else CuPy's, with the element type of ``x`` or ``dtype``."""
        if is_torch(x):
            torch = sys.modules["torch"]
            kind = x.dtype if dtype is None else getattr(torch, dtype)
            if torch.cuda.current_stream(self.index).cuda_stream == caller.ptr:
                return x.new_empty(shape, dtype=kind)
            with torch.cuda.stream(torch.cuda.ExternalStream(caller.ptr, device=self.index)):
                return x.new_empty(shape, dtype=kind)
        with self.current_stream(caller):
            return cupy.empty(shape, x.dtype if dtype is None else numpy_dtype(dtype))

    def given_back(self, result: Any, x: Any, caller: cupy.cuda.Stream) -> Any:
        """Return a result as an array of x's library.

        CuPy arrays become JAX's or numba's without a copy, ordered after the caller's work.
        """
        kind = type(x).__module__.partition(".")[0]
        with self.current_stream(caller):
            if kind in ("jax", "jaxlib"):
                return import_module("jax.dlpack").from_dlpack(result)
            if kind == "numba":
                return import_module("numba.cuda").as_cuda_array(result, sync=False)
        return result

    @staticmethod
    def is_of_one_thread(stream: cupy.cuda.Stream) -> bool:
        """Return whether a stream is CUDA's per-thread default stream, a different one in each thread."""
        return stream is cupy.cuda.Stream.ptds

    @contextmanager
    def current_stream(self, stream: cupy.cuda.Stream) -> Iterator[None]:
        """Make a stream CuPy's current stream in this thread. DLPack orders it after the work of an array's owner."""
        with self.runtime.current, stream:
            yield

    @contextmanager
    def launching_on(self, stream: cupy.cuda.Stream) -> Iterator[None]:
        """Launch the kernels of this block on a stream, one thread at a time."""
        with self._launching:
            self.runtime.launching = stream
            yield

    def to_host(self, x: Array, stream: cupy.cuda.Stream) -> Array:
        """Copy to host memory, after the work on a stream."""
        with self.runtime.current:
            return x.get(stream=stream)

    def from_host(self, source: Array, target: Array, stream: cupy.cuda.Stream) -> None:
        """Copy from host memory, in stream order."""
        with self.runtime.current:
            target.set(source, stream=stream)

    def zeros_residual(self, n: int, dtype: str) -> Array:
        """Return a zero residual for ``n`` values: float64 for float64, else float32."""
        with self.runtime.current:
            zeros = cupy.zeros(n, computed_on(dtype).numpy)
            cupy.cuda.get_current_stream().synchronize()
            return zeros

    @staticmethod
    def owns(coder: Any) -> bool:
        """Return whether a coder runs on a GPU."""
        return isinstance(coder, DeviceCoder | DeviceSzpCoder)

    @staticmethod
    def holds(array: Any) -> bool:
        """Return whether an array is in GPU memory."""
        return isinstance(array, cupy.ndarray)

    @staticmethod
    def shown(transport: Any) -> Any:
        """Wrap a transport's sends as NVTX ranges if these are enabled, and return the transport."""
        if config.nvtx():
            transport.isend = nvtx_range("compcoll send")(transport.isend)
        return transport


def as_cupy(x: Any, what: str) -> tuple[Array, str]:
    """View an array as a CuPy array; return it and the name of its element type. Tensors of bfloat16 become int16."""
    if isinstance(x, cupy.ndarray):
        array = x
    else:
        name = str(getattr(x, "dtype", ""))
        try:
            if is_torch(x):
                x = x.detach()
                x = x.view(sys.modules["torch"].int16) if name == BFLOAT16 else x
            array = cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
        except Exception as error:
            raise InvalidBuffer(
                f"CuPy cannot view {what}, a {type(x).__module__}.{type(x).__qualname__} of {name}: {error}"
            ) from error
        if name == BFLOAT16:
            return array, "bfloat16"
    if array.dtype.kind not in "biufc" and array.dtype != DTYPES["bfloat16"].numpy:
        raise UnsupportedDType(f"elements of type {array.dtype} cannot be sent: numbers are needed")
    return array, array.dtype.name


def synchronize(x: Array) -> None:
    """Wait until the work on the current stream of an array's GPU is done."""
    with x.device:
        cupy.cuda.get_current_stream().synchronize()


def names() -> list[str]:
    """Return the names of this machine's GPUs.

    Raises
    ------
    UnsupportedDevice
        If CUDA finds none.
    """
    try:
        return [api.getDeviceProperties(index)["name"].decode() for index in range(api.getDeviceCount())]
    except api.CUDARuntimeError as error:
        raise UnsupportedDevice(f"CuPy {cupy.__version__} finds no GPU: {error}") from error


def device_of(x: Any, *, shared: bool = False) -> CudaDevice:
    """Return an array's device: a new `CudaDevice`, or with ``shared`` the one that all such calls share.

    Raises
    ------
    UnsupportedDevice
        If CUDA finds none.
    """
    index = int(x.__dlpack_device__()[1]) if hasattr(x, "__dlpack_device__") else int(cupy.asarray(x).device.id)
    return _shared(index) if shared else CudaDevice(index)


_shared = lru_cache(CudaDevice)
