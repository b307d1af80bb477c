"""Arrays of other libraries: the kind of their memory, and NumPy views of host arrays without a copy."""

from __future__ import annotations

import numbers
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import DTYPES
from ..errors import InvalidBuffer

Array = npt.NDArray[Any]

_GPU = {2: "CUDA", 13: "CUDA managed"}
"""DLPack's DLDeviceType of memory that GPU kernels can read."""

_HOST = (1, 3)
"""DLPack's DLDeviceType of memory that the host can read: host memory, and pinned memory."""

BFLOAT16 = "torch.bfloat16"
"""PyTorch's name of bfloat16, whose tensors NumPy can only view as integers."""


def gpu_memory(x: Any) -> str:
    """Return the kind of GPU memory that an object reports; empty for everything else."""
    try:
        if hasattr(x, "__dlpack_device__"):
            return _GPU.get(int(x.__dlpack_device__()[0]), "")
        return "CUDA" if hasattr(x, "__cuda_array_interface__") else ""
    except Exception:  # an object that cannot report its device is refused later as a host array
        return ""


def is_torch(x: Any) -> bool:
    """Return whether an object is a PyTorch tensor, without importing PyTorch."""
    return "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor)


def is_foreign(x: Any) -> bool:
    """Return whether an object is an array in host memory, but not a NumPy array."""
    if isinstance(x, np.ndarray | np.generic) or _is_mpi_constant(x):
        return False
    try:
        if hasattr(x, "__dlpack_device__"):
            return int(x.__dlpack_device__()[0]) in _HOST
        memoryview(x)
    except Exception:  # an object that cannot report its device is refused later
        return False
    return True


def _is_mpi_constant(x: Any) -> bool:
    """Return whether an object is MPI.IN_PLACE or a similar constant, which shows an empty buffer."""
    return type(x).__module__ == "mpi4py.MPI" and hasattr(x, "__int__")


def remedy(x: Any) -> str:
    """Return advice for an argument that is not an array, for an error message; empty if there is none."""
    if _is_mpi_constant(x):
        return "; for a result in place, pass the array both as x and as out"
    if x is None:
        return "; every rank must pass one, also in a broadcast, where it gives shape and type"
    if isinstance(x, list | tuple) and any(hasattr(part, "dtype") and part.ndim for part in x):
        return "; pass the array alone, without its size and type"
    if isinstance(x, np.ma.MaskedArray):
        return "; x.filled() makes one"
    if isinstance(x, str):
        return "; numpy.frombuffer(x.encode(), numpy.uint8) makes one"
    return "; numpy.asarray(x) makes one" if isinstance(x, list | tuple | numbers.Number | np.ndarray) else ""


def as_numpy(x: Any, what: str) -> Array:
    """View an array in host memory as a NumPy array.

    Raises
    ------
    InvalidBuffer
        If it does not export its memory.
    """
    try:
        if is_torch(x):
            x = x.detach()
            if str(x.dtype) == BFLOAT16:  # NumPy does not support it in DLPack
                return np.from_dlpack(x.view(sys.modules["torch"].int16)).view(DTYPES["bfloat16"].numpy)
        if not hasattr(x, "__dlpack__"):
            return np.asarray(memoryview(x))
        return np.asarray(x) if str(getattr(x, "dtype", "")) == "bfloat16" else np.from_dlpack(x)
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidBuffer(f"{what}, a {type(x).__module__}.{type(x).__qualname__}: {error}") from error


def like(result: Any, x: Any) -> Any:
    """Convert a result to x's kind: a tensor for a tensor, a memoryview if x only has the buffer protocol.

    Results that are not arrays are returned unchanged.
    """
    if not isinstance(result, np.ndarray):
        return result
    if is_torch(x):
        torch = sys.modules["torch"]
        if result.dtype == DTYPES["bfloat16"].numpy:
            return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(result)
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__().asarray(result)
    return result if hasattr(x, "__dlpack__") else result.data
