"""PyTorch on compcoll."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gradients import GradientCompression, compress

_MODULES = {"GradientCompression": ".gradients", "compress": ".gradients"}

__all__ = ["GradientCompression", "compress"]


def __getattr__(name: str) -> Any:
    """Load what needs MPI when it is first asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module 'compcoll.torch' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value
