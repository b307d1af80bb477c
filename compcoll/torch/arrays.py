"""Gradients as arrays: NumPy arrays in host memory, or tensors on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InvalidArgument, UnsupportedDevice
from ..gpu.discovery import gpus

Array = Any
"""A NumPy array, or a tensor on a GPU: both support slicing and assignment to slices."""

HostArray = npt.NDArray[Any]


def copy_of(array: Array) -> Array:
    """Copy an array; a tensor on the current stream."""
    return array.clone() if isinstance(array, Tensor) else array.copy()


def wide(array: Array) -> Array:
    """Convert an array to one dimension and to the type it is summed in: float32 for 16-bit floats."""
    half = array.dtype.itemsize == 2
    if isinstance(array, Tensor):
        return (array.float() if half else array).reshape(-1)
    return np.ascontiguousarray(array, np.float32 if half else array.dtype).reshape(-1)


def residual_of(memory: Any) -> Array:
    """View the memory in which a feedback keeps its residual."""
    return memory if isinstance(memory, np.ndarray) else torch.from_dlpack(memory)


def put(values: Array, target: Array) -> None:
    """Copy values into the target, where saved values are in host memory."""
    if isinstance(target, Tensor):
        target.copy_(values if isinstance(values, Tensor) else torch.from_numpy(values))
    else:
        target[...] = values


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
            f"gradients on {device} cannot be compressed: only those on the CPU or on a CUDA device"
        )


@lru_cache(maxsize=1)
def gpu_can_encode() -> bool:
    """Return whether codecs can run on a GPU, which needs CuPy and a GPU."""
    return bool(gpus()[0])
