"""compcoll as a backend of PyTorch: ``torch.distributed.init_process_group("compcoll")`` under mpirun.

Importing this is not needed to use the backend, which `import torch` already knows once compcoll is installed.
`compress` has one model's gradients compressed, on any backend.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .autoload import register

if TYPE_CHECKING:
    from .compression import compress
    from .gradients import GradientCompression
    from .options import Options
    from .shards import ShardCompression

__all__ = ["GradientCompression", "Options", "ShardCompression", "compress"]

_HOMES = {
    "GradientCompression": "gradients",
    "Options": "options",
    "ShardCompression": "shards",
    "compress": "compression",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for: PyTorch imports this package at its own import, which must stay fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'compcoll.torch' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


register()
