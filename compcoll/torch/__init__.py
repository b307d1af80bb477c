"""compcoll as a backend of PyTorch: ``torch.distributed.init_process_group("compcoll")`` under mpirun.

Importing this is not needed to use the backend, which `import torch` already knows once compcoll is installed.
`compress` has one model's gradients compressed, on any backend; `DGC` with momentum correction, `ACPSGD` and
`PowerSGD` by low-rank factors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .autoload import register

if TYPE_CHECKING:
    from .compression import compress
    from .dgc import DGC
    from .gradients import GradientCompression
    from .low_rank import ACPSGD, PowerSGD
    from .options import Options
    from .shards import ShardCompression

__all__ = ["ACPSGD", "DGC", "GradientCompression", "Options", "PowerSGD", "ShardCompression", "compress"]

_HOMES = {
    "ACPSGD": "low_rank",
    "DGC": "dgc",
    "GradientCompression": "gradients",
    "Options": "options",
    "PowerSGD": "low_rank",
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
