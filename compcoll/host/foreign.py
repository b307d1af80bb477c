"""Arrays of other libraries: where their memory is, and host arrays seen as NumPy's, without a copy."""

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
"""DLPack's DLDeviceType of memory that kernels can read."""

_HOST = (1, 3)
"""DLPack's DLDeviceType of memory that the host reads: its own, and pinned."""

BFLOAT16 = "torch.bfloat16"
"""PyTorch's name of it: its tensors show NumPy its bits only."""


def gpu_memory(x: Any) -> str:
    """Name the kind of GPU memory that an object tells that it is; empty for everything else."""
    try:
        if hasattr(x, "__dlpack_device__"):
            return _GPU.get(int(x.__dlpack_device__()[0]), "")
        return "CUDA" if hasattr(x, "__cuda_array_interface__") else ""
    except Exception:  # what cannot even tell where it is will be refused as a host array
        return ""


def is_torch(x: Any) -> bool:
    """Tell whether an object is a tensor of PyTorch's, which is not imported for it."""
    return "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor)


def is_foreign(x: Any) -> bool:
    """Tell whether an object is an array in host memory, but none of NumPy's."""
    if isinstance(x, np.ndarray | np.generic) or _is_mpi_constant(x):
        return False
    try:
        if hasattr(x, "__dlpack_device__"):
            return int(x.__dlpack_device__()[0]) in _HOST
        memoryview(x)
    except Exception:  # what cannot even tell where it is will be refused as no array
        return False
    return True


def _is_mpi_constant(x: Any) -> bool:
    """Tell whether an object is MPI.IN_PLACE or the like, which show a buffer of nothing."""
    return type(x).__module__ == "mpi4py.MPI" and hasattr(x, "__int__")


def remedy(x: Any) -> str:
    """Say what to give instead of something that is no array; empty where nobody knows."""
    if _is_mpi_constant(x):
        return "; to have the result in place of x, give x as out, too"
    if x is None:
        return "; every rank gives one, in a broadcast, too, where it tells shape and type"
    if isinstance(x, list | tuple) and any(hasattr(part, "dtype") and part.ndim for part in x):
        return "; give the array alone: its type and size are known"
    if isinstance(x, np.ma.MaskedArray):
        return "; x.filled() makes one"
    if isinstance(x, str):
        return "; numpy.frombuffer(x.encode(), numpy.uint8) makes one"
    return "; numpy.asarray(x) makes one" if isinstance(x, list | tuple | numbers.Number | np.ndarray) else ""


def as_numpy(x: Any, what: str) -> Array:
    """An array in host memory, as NumPy's: the same memory.

    Raises
    ------
    InvalidBuffer
        If it does not let others see its memory.
    """
    try:
        if is_torch(x):
            x = x.detach()
            if str(x.dtype) == BFLOAT16:  # which NumPy does not take by DLPack
                return np.from_dlpack(x.view(sys.modules["torch"].int16)).view(DTYPES["bfloat16"].numpy)
        if not hasattr(x, "__dlpack__"):
            return np.asarray(memoryview(x))
        return np.asarray(x) if str(getattr(x, "dtype", "")) == "bfloat16" else np.from_dlpack(x)
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidBuffer(f"{what}, a {type(x).__module__}.{type(x).__qualname__}: {error}") from error


def like(result: Any, x: Any) -> Any:
    """A result as an array of x's kind: a tensor of a tensor, a memoryview of what has only the buffer protocol.

    What is no array is returned as it is.
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
