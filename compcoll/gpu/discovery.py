"""The GPUs of this process, and the GPU of an array. CuPy is imported when it is first needed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedDevice
from ..host.foreign import gpu_memory

if TYPE_CHECKING:
    from .device import CudaDevice


def gpus() -> tuple[list[str], str]:
    """Return the names of this machine's GPUs, and the reason if there are none."""
    try:
        from . import device as cuda
    except ImportError as error:
        return [], f"CuPy cannot be imported: {error}"
    try:
        return cuda.names(), ""
    except UnsupportedDevice as error:
        return [], str(error)


def nvtx_range(name: str) -> AbstractContextManager[None]:
    """Show a block as an NVTX range in profiles; without CuPy, do nothing."""
    try:
        from . import device as cuda
    except ImportError:
        return nullcontext()
    return cuda.nvtx_range(name)


def as_cupy(x: Any) -> Any:
    """View an array in GPU memory as a CuPy array."""
    from . import device as cuda

    return cuda.as_cupy(x, "x")[0]


def synchronize(x: Any) -> None:
    """Wait until the work on CuPy's current stream of a CuPy array's GPU is done."""
    from . import device as cuda

    cuda.synchronize(x)


def cuda_device(x: Any, *, shared: bool = False) -> CudaDevice:
    """Return the device of an array in GPU memory. The parameters are those of `compcoll.gpu.device.device_of`.

    Raises
    ------
    UnsupportedDevice
        If CuPy is absent or finds no device.
    """
    what = f"x is a {type(x).__module__}.{type(x).__qualname__} in {gpu_memory(x)} memory"
    try:
        from . import device as cuda
    except ImportError as error:
        raise UnsupportedDevice(
            f"{what}, which compcoll reaches through CuPy ({error}): "
            "pip install 'cupy-cuda13x[ctk]', or 'cupy-cuda12x[ctk]' for CUDA 12"
        ) from error
    return cuda.device_of(x, shared=shared)
