"""Compressed collectives for PyTorch. They run under torchrun, mpirun or any other launcher, and need no MPI.

`compress` compresses the gradients of one model, on any backend. `DGC` adds momentum correction; `ACPSGD` and
`PowerSGD` send low-rank factors. `OneBitAdam` and `ZeroOneAdam` send AdamW's momentum instead of gradients. `DiLoCo`
and `SparseLoCo` send how much the parameters changed in many local steps. `all_reduce` and the other functions are
called like those of `torch.distributed`. Once compcoll is installed, `import torch` registers the backend
``"compcoll"`` for `init_process_group`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..deprecated import warn
from .backend.autoload import register
from .loading import load

if TYPE_CHECKING:
    from .gradients.compression import DGC as DGC
    from .gradients.compression import compress as compress
    from .gradients.ddp import GradientCompression as GradientCompression
    from .gradients.fsdp import ShardCompression as ShardCompression
    from .groups.collectives import all_gather_into_tensor as all_gather_into_tensor
    from .groups.collectives import all_reduce as all_reduce
    from .groups.collectives import all_reduce_coalesced as all_reduce_coalesced
    from .groups.collectives import broadcast as broadcast
    from .groups.collectives import reduce_scatter_tensor as reduce_scatter_tensor
    from .groups.exchanges import all_to_all_single as all_to_all_single
    from .groups.exchanges import all_to_all_single_autograd as all_to_all_single_autograd
    from .groups.exchanges import recv as recv
    from .groups.exchanges import send as send
    from .groups.membership import stats as stats
    from .groups.membership import tune as tune
    from .low_rank.methods import ACPSGD as ACPSGD
    from .low_rank.methods import PowerSGD as PowerSGD
    from .optimizers.adam import OneBitAdam as OneBitAdam
    from .optimizers.adam import ZeroOneAdam as ZeroOneAdam
    from .optimizers.diloco import DiLoCo as DiLoCo
    from .optimizers.sparse_loco import SparseLoCo as SparseLoCo
    from .options import Options as Options
    from .states import GatheredState as GatheredState

_MODULES = {
    "gradients.compression": "DGC compress",
    "gradients.ddp": "GradientCompression",
    "gradients.fsdp": "ShardCompression",
    "groups.collectives": "all_gather_into_tensor all_reduce all_reduce_coalesced broadcast reduce_scatter_tensor",
    "groups.exchanges": "all_to_all_single all_to_all_single_autograd recv send",
    "groups.membership": "stats tune",
    "low_rank.methods": "ACPSGD PowerSGD",
    "optimizers.adam": "OneBitAdam ZeroOneAdam",
    "optimizers.diloco": "DiLoCo",
    "optimizers.sparse_loco": "SparseLoCo",
    "options": "Options",
    "states": "GatheredState",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `import torch` imports this package, and must stay fast."""
    if name == "WholeState":
        warn("compcoll.torch.WholeState", "compcoll.torch.GatheredState", stacklevel=2)
        name = "GatheredState"
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'compcoll.torch' has no attribute {name!r}")
    value = globals()[name] = getattr(load(f".{_MODULE_OF[name]}"), name)
    return value


if find_spec("torch") is None:
    raise ModuleNotFoundError("compcoll.torch needs PyTorch: pip install torch", name="torch")
register()
