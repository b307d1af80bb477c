"""Gradients as arrays: NumPy's in host memory, or tensors on a GPU, in the order of a stream of their own.

What is done to tensors of a GPU is launched by another thread than the caller's, while that launches more. So it goes
to a stream that waits for what the caller had launched before, and whoever waits for the result has the current stream
wait for it: the host does not.
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
"""A NumPy array, or a tensor on a GPU: both can be cut, and parts of them set."""

HostArray = npt.NDArray[Any]


class _Arrays:
    """What host and GPU have in common."""

    def ordered(self, *tensors: Tensor) -> StreamOrder | None:
        """Note the order of a job on some tensors, which is submitted now; on the host there is none."""
        return None

    def submit(self, jobs: JobQueue, job: Callable[[], Any], *tensors: Tensor) -> Work:
        """Put a job on some tensors in a queue; on a GPU it launches on the stream of these arrays."""
        return jobs.submit(job, self.ordered(*tensors))

    def run(self, jobs: JobQueue, job: Callable[[], Any], *tensors: Tensor) -> None:
        """Run a job on some tensors, and all those in front of it: the host waits for messages, not for kernels."""
        jobs.run(job, self.ordered(*tensors))


class HostArrays(_Arrays):
    """Works on gradients in host memory, at once."""

    array = staticmethod(array_of)

    @staticmethod
    def copy(array: HostArray) -> HostArray:
        """Copy an array."""
        return array.copy()

    @staticmethod
    def wide(array: HostArray) -> HostArray:
        """Convert an array to the type that it is added in, which is float32 for halves: one-dimensional."""
        return np.ascontiguousarray(array, np.float32 if array.dtype.itemsize == 2 else array.dtype).reshape(-1)

    @staticmethod
    def residual(array: HostArray) -> HostArray:
        """Wrap the memory that a feedback keeps its residual in."""
        return array

    @staticmethod
    def put(values: HostArray, target: HostArray) -> None:
        """Copy residuals, or what was saved of them."""
        target[...] = values

    @staticmethod
    def fetched(residual: HostArray) -> HostArray:
        """Copy residuals to host memory."""
        return residual


class GPUArrays(_Arrays):
    """Works on gradients on a GPU, in the order of one stream; the methods are those of `HostArrays`.

    Parameters
    ----------
    device : torch.device
        The GPU, which is an attribute, too.
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
        """Convert halves to float32, which they are added in: one-dimensional."""
        return (array.float() if array.dtype.itemsize == 2 else array).reshape(-1)

    @staticmethod
    def residual(array: Any) -> Tensor:
        """Wrap the memory that a feedback keeps its residual in, as a tensor."""
        return torch.from_dlpack(array)

    @staticmethod
    def put(values: Tensor | HostArray, target: Tensor) -> None:
        """Copy residuals, or what was saved of them on the host."""
        target.copy_(_tensor_of(values))

    def fetched(self, residual: Tensor | HostArray) -> HostArray:
        """Copy residuals to host memory, after all jobs."""
        with torch.cuda.stream(self._stream):
            copy: HostArray = _tensor_of(residual).cpu().numpy()
        return copy

    def ordered(self, *tensors: Tensor) -> StreamOrder:
        return StreamOrder(self.device, self._stream, tensors)


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """Find the device that a model's parameters are on.

    Raises
    ------
    InvalidArgument
        If they are on several.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise InvalidArgument(f"the model's parameters are on {sorted(map(str, devices))}: one device is needed")
    return devices.pop()


def arrays_on(device: torch.device) -> HostArrays | GPUArrays:
    """Find what works on gradients on a device.

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
    """Tell whether codecs can run on a GPU: CuPy and one are there."""
    return bool(gpus()[0])


def _tensor_of(values: Tensor | HostArray) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(values)
