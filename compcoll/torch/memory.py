"""Memory of tensors as NumPy arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..devices.arrays import NUMPY_DTYPES

FLOATING = {getattr(torch, name): dtype for name, dtype in NUMPY_DTYPES.items()}
"""torch's element types that codecs take, and NumPy's."""


def array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """A contiguous CPU tensor's memory as a flat array. The tensor must live as long; its storage stays resizable,
    which it does not after ``tensor.numpy()``.
    """
    dtype = FLOATING.get(tensor.dtype)
    if dtype is None:
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if not tensor.numel():
        return np.empty(0, dtype)
    memory = (ctypes.c_byte * (tensor.numel() * dtype.itemsize)).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype)
