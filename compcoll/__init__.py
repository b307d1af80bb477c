"""Compressed MPI collectives.

>>> import numpy as np, compcoll
>>> total = compcoll.allreduce(np.random.randn(1 << 20).astype(np.float32), codec="zfp", rate=8)

Lower-case functions here take buffers and never pickle. ``import compcoll`` does not start MPI: the first use of a
collective's name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors
    from .api import (
        allgather,
        allgatherv,
        allreduce,
        alltoall,
        bcast,
        get_communicator,
        iallreduce,
        reduce_scatter,
    )
    from .codecs import FP8, QSGD, ZFP, Cast, Codec, Int8, IntSum, MinMax, NumpyCodec, OneBit, Sign, TernGrad
    from .communicator import Communicator
    from .encoding import decode, encode
    from .errors import CompcollError
    from .feedback import ErrorFeedback
    from .progress import Request
    from .registry import get_codec, list_codecs
    from .stats import Stats
    from .tools.check import check_codec

__version__ = "0.2.0"

__all__ = [
    "FP8",
    "QSGD",
    "ZFP",
    "Cast",
    "Codec",
    "Communicator",
    "CompcollError",
    "ErrorFeedback",
    "Int8",
    "IntSum",
    "MinMax",
    "NumpyCodec",
    "OneBit",
    "Request",
    "Sign",
    "Stats",
    "TernGrad",
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "bcast",
    "check_codec",
    "decode",
    "encode",
    "errors",
    "get_codec",
    "get_communicator",
    "iallreduce",
    "list_codecs",
    "reduce_scatter",
]


_HOMES = {
    "api": "allgather allgatherv allreduce alltoall bcast get_communicator iallreduce reduce_scatter",
    "codecs": "FP8 QSGD ZFP Cast Codec Int8 IntSum MinMax NumpyCodec OneBit Sign TernGrad",
    "communicator": "Communicator",
    "encoding": "decode encode",
    "errors": "CompcollError",
    "feedback": "ErrorFeedback",
    "progress": "Request",
    "registry": "get_codec list_codecs",
    "stats": "Stats",
    "tools.check": "check_codec",
}


def __getattr__(name: str) -> Any:
    """Load what is first asked for: `import torch` imports this package, see `compcoll.torch`, and must stay fast."""
    if name == "errors":
        return import_module(".errors", __name__)
    for home, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
            return value
    raise AttributeError(f"module 'compcoll' has no attribute {name!r}")
