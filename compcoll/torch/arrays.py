"""Gradients as arrays: NumPy arrays in host memory, or tensors on a GPU with a stream of their own.

A thread other than the caller's may launch work on GPU tensors while the caller launches more. So this work goes to a
separate stream, which waits for what the caller had launched before. A thread that waits for the result makes its
current stream wait for it; the host does not block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InvalidArgument, UnsupportedDevice
from ..gpu.discovery import gpus
from .buffers import array_of
from .job_queue import JobQueue, Work
from .streams import StreamOrder

Array = Any
"""A NumPy array, or a tensor on a GPU: both support slicing and assignment to slices."""

HostArray = npt.NDArray[Any]


class _Arrays:
    """Base of `HostArrays` and `GPUArrays`: submits jobs on tensors."""

    def ordered(self, *tensors: Tensor) -> StreamOrder | None:
        """Record the place in stream order of a job that is submitted now; None on the host."""
        return None

    def submit(self, jobs: JobQueue, job: Callable[[], Any], *tensors: Tensor) -> Work:
        """Submit a job on some tensors to a queue; on a GPU it launches on this object's stream."""
        return jobs.submit(job, self.ordered(*tensors))

    def run(self, jobs: JobQueue, job: Callable[[], Any], *tensors: Tensor) -> None:
        """Run a job on some tensors after all jobs before it; the host waits for messages, not for kernels."""
        jobs.run(job, self.ordered(*tensors))


class HostArrays(_Arrays):
    """Operations on gradients in host memory; they run at once."""

    array = staticmethod(array_of)

    @staticmethod
    def copy(array: HostArray) -> HostArray:
        """Copy an array."""
        return array.copy()

    @staticmethod
    def wide(array: HostArray) -> HostArray:
        """Convert an array to one dimension and to the type it is summed in: float32 for 16-bit floats."""
        return np.ascontiguousarray(array, np.float32 if array.dtype.itemsize == 2 else array.dtype).reshape(-1)

    @staticmethod
    def residual(array: HostArray) -> HostArray:
        """Wrap the memory in which a feedback keeps its residual."""
        return array

    @staticmethod
    def put(values: HostArray, target: HostArray) -> None:
        """Copy residuals, current or saved, into the target."""
        target[...] = values

    @staticmethod
    def fetched(residual: HostArray) -> HostArray:
        """Return residuals in host memory."""
        return residual


class GPUArrays(_Arrays):
    """Operations on gradients on a GPU, ordered by one stream; the methods are those of `HostArrays`.

    Parameters
    ----------
    device : torch.device
        The GPU; also an attribute.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @staticmethod
    def array(tensor: Tensor) -> Tensor:
        """View a contiguous tensor's memory, one-dimensional."""
        return tensor.detach().view(-1)

    @staticmethod
    def copy(array: Tensor) -> Tensor:
        """Copy an array, on the current stream."""
        return array.clone()

    @staticmethod
    def wide(array: Tensor) -> Tensor:
        """Convert a tensor to one dimension and to the type it is summed in: float32 for 16-bit floats."""
        return (array.float() if array.dtype.itemsize == 2 else array).reshape(-1)

    @staticmethod
    def residual(array: Any) -> Tensor:
        """Wrap the memory in which a feedback keeps its residual, as a tensor."""
        return torch.from_dlpack(array)

    @staticmethod
    def put(values: Tensor | HostArray, target: Tensor) -> None:
        """Copy residuals, current or saved on the host, into the target."""
        target.copy_(_tensor_of(values))

    def fetched(self, residual: Tensor | HostArray) -> HostArray:
        """Copy residuals to host memory, after all jobs."""
        with torch.cuda.stream(self._stream):
            copy: HostArray = _tensor_of(residual).cpu().numpy()
        return copy

    def ordered(self, *tensors: Tensor) -> StreamOrder:
        return StreamOrder(self.device, self._stream, tensors)


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of a model's parameters.

    Raises
    ------
    InvalidArgument
        If they are on several devices.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise InvalidArgument(f"the model's parameters are on {sorted(map(str, devices))}: one device is needed")
    return devices.pop()


def arrays_on(device: torch.device) -> HostArrays | GPUArrays:
    """Return the operations for gradients on a device.

    Raises
    ------
    UnsupportedDevice
        If it is neither the CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return HostArrays()
    if device.type == "cuda":
        return GPUArrays(device)
    raise UnsupportedDevice(f"gradients on {device} cannot be compressed: only those on the CPU or on a CUDA device")


@lru_cache(maxsize=1)
def gpu_can_encode() -> bool:
    """Return whether codecs can run on a GPU, which needs CuPy and a GPU."""
    return bool(gpus()[0])


def _tensor_of(values: Tensor | HostArray) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(values)
