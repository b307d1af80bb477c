"""Compressed MPI collectives.

>>> import numpy as np, compcoll
>>> total = compcoll.allreduce(np.random.randn(1 << 20).astype(np.float32), codec="int8")

Unlike mpi4py's lower-case methods, these functions send buffers and never pickle. ``import compcoll`` does not start
MPI; the first access to a collective's name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from .api import allgather as allgather
    from .api import allgather_init as allgather_init
    from .api import allgatherv as allgatherv
    from .api import allreduce as allreduce
    from .api import allreduce_init as allreduce_init
    from .api import alltoall as alltoall
    from .api import alltoall_init as alltoall_init
    from .api import alltoallv as alltoallv
    from .api import bcast as bcast
    from .api import bcast_init as bcast_init
    from .api import gather as gather
    from .api import gather_init as gather_init
    from .api import get_communicator as get_communicator
    from .api import iallgather as iallgather
    from .api import iallgatherv as iallgatherv
    from .api import iallreduce as iallreduce
    from .api import ialltoall as ialltoall
    from .api import ialltoallv as ialltoallv
    from .api import ibcast as ibcast
    from .api import igather as igather
    from .api import ireduce as ireduce
    from .api import ireduce_scatter as ireduce_scatter
    from .api import iscatter as iscatter
    from .api import reduce as reduce
    from .api import reduce_init as reduce_init
    from .api import reduce_scatter as reduce_scatter
    from .api import reduce_scatter_init as reduce_scatter_init
    from .api import scatter as scatter
    from .api import scatter_init as scatter_init
    from .codecs import *
    from .codecs.registry import get_codec as get_codec
    from .codecs.registry import list_codecs as list_codecs
    from .communicator import Communicator as Communicator
    from .encoding import decode as decode
    from .encoding import encode as encode
    from .errors import AccuracyWarning as AccuracyWarning
    from .errors import CompcollError as CompcollError
    from .execute.engine import Request as Request
    from .execute.persistent import PersistentRequest as PersistentRequest
    from .feedback import ErrorFeedback as ErrorFeedback
    from .mpi import Intracomm as Intracomm
    from .stats import Stats as Stats
    from .tools.check import check_codec as check_codec

__version__ = "0.3.0"

_HOMES = {
    "api": "allgather allgather_init allgatherv allreduce allreduce_init alltoall alltoall_init alltoallv bcast "
    "bcast_init gather gather_init get_communicator iallgather iallgatherv iallreduce ialltoall ialltoallv ibcast "
    "igather ireduce ireduce_scatter iscatter reduce reduce_init reduce_scatter reduce_scatter_init scatter "
    "scatter_init",
    "communicator": "Communicator",
    "encoding": "decode encode",
    "errors": "AccuracyWarning CompcollError",
    "feedback": "ErrorFeedback",
    "execute.engine": "Request",
    "execute.persistent": "PersistentRequest",
    "mpi": "Intracomm",
    "codecs.registry": "get_codec list_codecs",
    "stats": "Stats",
    "tools.check": "check_codec",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, since `import torch` imports this package, too (see `compcoll.torch`)."""
    if name in ("errors", "sparse"):
        return import_module(f".{name}", __name__)
    homes = {each: home for home, names in _HOMES.items() for each in names.split()}
    if name not in homes:
        codecs = import_module(".codecs", __name__)
        homes |= dict.fromkeys(("Codec", "NumpyCodec", *(cls.__name__ for cls in codecs.ALL)), "codecs")
    if name == "__all__":
        value: Any = sorted([*homes, "errors"])
    elif name in homes:
        value = getattr(import_module(f".{homes[name]}", __name__), name)
    else:
        raise AttributeError(f"module 'compcoll' has no attribute {name!r}")
    globals()[name] = value
    return value
