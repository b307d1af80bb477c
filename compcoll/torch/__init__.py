"""Compressed collectives for PyTorch. They run under torchrun, mpirun or any other launcher, and need no MPI.

`compress` compresses the gradients of one model, on any backend. `DGC` adds momentum correction; `ACPSGD` and
`PowerSGD` send low-rank factors. `OneBitAdam` and `ZeroOneAdam` send AdamW's momentum instead of gradients. `DiLoCo`
and `SparseLoCo` send the change that many local steps make. `all_reduce` and the other functions are called like those
of `torch.distributed`. Once compcoll is installed, `import torch` registers the backend ``"compcoll"`` of
`init_process_group`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..deprecated import warn
from .backend.autoload import register

if TYPE_CHECKING:
    from .gradients.compression import DGC, compress
    from .gradients.ddp import GradientCompression
    from .gradients.fsdp import ShardCompression
    from .groups.collectives import (
        all_gather_into_tensor,
        all_reduce,
        all_reduce_coalesced,
        reduce_scatter_tensor,
    )
    from .groups.exchanges import all_to_all_single, all_to_all_single_autograd, recv, send
    from .groups.membership import stats, tune
    from .low_rank.methods import ACPSGD, PowerSGD
    from .optimizers.adam import OneBitAdam, ZeroOneAdam
    from .optimizers.diloco import DiLoCo
    from .optimizers.sparse_loco import SparseLoCo
    from .options import Options
    from .states import GatheredState

__all__ = [
    "ACPSGD",
    "DGC",
    "DiLoCo",
    "GatheredState",
    "GradientCompression",
    "OneBitAdam",
    "Options",
    "PowerSGD",
    "ShardCompression",
    "SparseLoCo",
    "ZeroOneAdam",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "compress",
    "recv",
    "reduce_scatter_tensor",
    "send",
    "stats",
    "tune",
]

_HOMES = {
    "ACPSGD": "low_rank.methods",
    "DGC": "gradients.compression",
    "DiLoCo": "optimizers.diloco",
    "GatheredState": "states",
    "GradientCompression": "gradients.ddp",
    "OneBitAdam": "optimizers.adam",
    "Options": "options",
    "PowerSGD": "low_rank.methods",
    "ShardCompression": "gradients.fsdp",
    "SparseLoCo": "optimizers.sparse_loco",
    "ZeroOneAdam": "optimizers.adam",
    "all_gather_into_tensor": "groups.collectives",
    "all_reduce": "groups.collectives",
    "all_reduce_coalesced": "groups.collectives",
    "all_to_all_single": "groups.exchanges",
    "all_to_all_single_autograd": "groups.exchanges",
    "recv": "groups.exchanges",
    "send": "groups.exchanges",
    "reduce_scatter_tensor": "groups.collectives",
    "stats": "groups.membership",
    "tune": "groups.membership",
    "compress": "gradients.compression",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: PyTorch imports this package at its own import, which must stay fast."""
    if name == "WholeState":
        warn("compcoll.torch.WholeState", "compcoll.torch.GatheredState", stacklevel=2)
        name = "GatheredState"
    if name not in _HOMES:
        raise AttributeError(f"module 'compcoll.torch' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


if find_spec("torch") is None:
    raise ModuleNotFoundError("compcoll.torch needs PyTorch: pip install 'compcoll[torch]'", name="torch")
register()
