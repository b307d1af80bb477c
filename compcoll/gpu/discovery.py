"""The GPUs of this process, and the one that has an array. CuPy is imported when it is first needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedDevice
from ..host.foreign import gpu_memory

if TYPE_CHECKING:
    from .device import CudaDevice


def gpus() -> tuple[list[str], str]:
    """The names of the GPUs here, and why there are none."""
    try:
        from . import device as cuda
    except ImportError as error:
        return [], f"CuPy cannot be imported: {error}"
    try:
        return cuda.names(), ""
    except UnsupportedDevice as error:
        return [], str(error)


def first_gpu() -> CudaDevice:
    """The first GPU, as a device of its own."""
    from . import device as cuda

    return cuda.CudaDevice(0)


def cuda_device(x: Any, *, shared: bool = False) -> CudaDevice:
    """The device of an array in GPU memory: one of its own, or that which all who say so share.

    Raises
    ------
    UnsupportedDevice
        If CuPy is absent or finds no device, or if the memory is managed.
    """
    what = f"x is a {type(x).__module__}.{type(x).__qualname__} in {gpu_memory(x)} memory"
    try:
        from . import device as cuda
    except ImportError as error:
        raise UnsupportedDevice(
            f"{what}, which compcoll reaches through CuPy ({error}): "
            "pip install 'compcoll[cuda13]', or 'compcoll[cuda12]' for CUDA 12"
        ) from error
    return cuda.device_of(x, shared=shared)
