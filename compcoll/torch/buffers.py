"""Access to the memory of tensors on the CPU and on GPUs, and their element types.

Memory is accessed by ``data_ptr``, never by ``Tensor.numpy()``, which marks a storage as not resizable.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InvalidArgument, InvalidBuffer, UnsupportedDevice
from ..gpu.discovery import gpus

Array = Any
"""A NumPy array, or a tensor on a GPU: both support slicing and assignment to slices."""

HostArray = npt.NDArray[Any]

COMPRESSIBLE = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}

_ARRAY_TYPES = {
    **COMPRESSIBLE,
    **{
        dtype: np.dtype(str(dtype).removeprefix("torch."))
        for bits in (8, 16, 32, 64)
        for dtype in (getattr(torch, f"int{bits}"), getattr(torch, f"uint{bits}"))
    },
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.bool: np.dtype(np.uint8),
}

_WRITABLE = 0x200  # PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def on_host(tensor: Any) -> bool:
    """Return whether a value is a dense tensor in host memory."""
    return isinstance(tensor, Tensor) and tensor.is_cpu and tensor.layout is torch.strided


def check(tensor: Any) -> None:
    """Check that a value is a dense tensor in host memory.

    Raises
    ------
    InvalidBuffer
        If it is no dense tensor.
    UnsupportedDevice
        If it is not in host memory.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidBuffer(f"a {type(tensor).__name__} was given: a torch.Tensor is needed")
    if not tensor.is_cpu:
        raise UnsupportedDevice(
            f"a tensor on {tensor.device} was given: a call's tensors must be dense, and all on the CPU or on one "
            "CUDA device"
        )
    if tensor.layout != torch.strided:
        raise InvalidBuffer(
            f"a tensor of layout {tensor.layout} was given: a dense one is needed, see Tensor.to_dense()"
        )


def nbytes_of(tensor: Tensor) -> int:
    """Return the size of a tensor's elements in bytes."""
    return int(tensor.numel()) * int(tensor.element_size())


def array_of(tensor: Tensor) -> Any:
    """Return a flat view of a contiguous tensor: on a GPU a tensor, else a NumPy array (of bytes for booleans)."""
    if tensor.is_cuda:
        return tensor.detach().view(-1)
    if not (nbytes := nbytes_of(tensor)):
        return np.empty(0, _ARRAY_TYPES[tensor.dtype])
    return np.frombuffer(_view(tensor.data_ptr(), nbytes, _WRITABLE), _ARRAY_TYPES[tensor.dtype])


def copy_of(array: Array) -> Array:
    """Copy an array. A GPU tensor is copied on the current stream."""
    return array.clone() if isinstance(array, Tensor) else array.copy()


def wide(array: Array) -> Array:
    """Convert an array to one dimension and to the type it is summed in: float32 for 16-bit floats."""
    half = array.dtype.itemsize == 2
    if isinstance(array, Tensor):
        return (array.float() if half else array).reshape(-1)
    return np.ascontiguousarray(array, np.float32 if half else array.dtype).reshape(-1)


def residual_of(memory: Any) -> Array:
    """View the memory of a feedback's residual as a NumPy array or a GPU tensor."""
    return memory if isinstance(memory, np.ndarray) else torch.from_dlpack(memory)


def put(values: Array, target: Array) -> None:
    """Copy values into an array. The values may be in host memory even if the target is a GPU tensor."""
    if isinstance(target, Tensor):
        target.copy_(values if isinstance(values, Tensor) else torch.from_numpy(values))
    else:
        target[...] = values


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's memory has neither gaps nor overlaps, in any order of its axes."""
    covered = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != covered:
                return False
            covered *= length
    return True


class Packed:
    """Several tensors in one contiguous block: their own memory if they lie side by side in this order, else a new one.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Tensors of one element type.
    filled : bool
        Whether a new block starts with their values.
    """

    def __init__(self, tensors: Sequence[Tensor], *, filled: bool) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.sizes = [int(tensor.numel()) for tensor in tensors]
        own = len(tensors) == 1 and tensors[0].is_contiguous()
        self.shared = own or _side_by_side(tensors)
        if own:
            self.memory = self.tensors[0].view(-1)
        elif self.shared:
            self.memory = torch.as_strided(self.tensors[0], (sum(self.sizes),), (1,))
        elif filled:
            self.memory = torch.cat([tensor.reshape(-1) for tensor in self.tensors])
        else:
            self.memory = self.tensors[0].new_empty(sum(self.sizes))

    def unpack(self) -> None:
        """Copy the values of a new block back to the tensors."""
        if not self.shared:
            for tensor, part in zip(self.tensors, self.memory.split(self.sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    start, other_start = one.data_ptr(), other.data_ptr()
    return bool(start < other_start + nbytes_of(other) and other_start < start + nbytes_of(one))


def _side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Return whether contiguous tensors of one storage follow each other in memory."""
    first = tensors[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != address:
            return False
        address += nbytes_of(tensor)
    return len(tensors) > 1


def split_counts(sizes: Sequence[int], tensor: Tensor, ranks: int, which: str) -> list[int]:
    """Convert split sizes, in rows along the first axis, to elements for each rank. No sizes mean equal shares.

    Raises
    ------
    InvalidArgument
        If the sizes do not add up to the tensor's first axis.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    row = math.prod(tensor.shape[1:])
    if not sizes:
        if rows % ranks:
            raise InvalidArgument(
                f"{which}: tensor's dim 0 does not divide equally across group size: {rows} rows for {ranks} ranks"
            )
        return [rows // ranks * row] * ranks
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise InvalidArgument(f"{which}: split sizes {list(sizes)} must be {ranks} numbers whose sum is {rows}")
    return [size * row for size in sizes]


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of a model's parameters.

    Raises
    ------
    InvalidArgument
        If they are on several devices.
    UnsupportedDevice
        As `check_device`.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise InvalidArgument(f"the model's parameters are on {sorted(map(str, devices))}: one device is needed")
    (device,) = devices
    check_device(device)
    return device


def check_device(device: torch.device) -> None:
    """Check that gradients on a device can be compressed.

    Raises
    ------
    UnsupportedDevice
        If it is neither the CPU nor a CUDA device.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedDevice(
            f"gradients on {device} cannot be compressed: move the model to the CPU or to a CUDA device"
        )


@lru_cache(maxsize=1)
def gpu_can_encode() -> bool:
    """Return whether codecs can run on a GPU, which needs CuPy and a GPU."""
    return bool(gpus()[0])
