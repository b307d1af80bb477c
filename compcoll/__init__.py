"""Compressed MPI collectives.

>>> import numpy as np, compcoll
>>> total = compcoll.allreduce(np.random.randn(1 << 20).astype(np.float32), codec="zfp", rate=8)

Lower-case functions here take buffers and never pickle. MPI is initialised by the first collective, not by the import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .codecs import FP8, QSGD, ZFP, Cast, Codec, IntSum, MinMax, OneBit, Sign, TernGrad, get_codec, list_codecs
from .encoding import decode, encode
from .errors import CompcollError
from .feedback import ErrorFeedback
from .request import Request
from .stats import Stats

if TYPE_CHECKING:
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
    from .communicator import Communicator

__version__ = "0.1.0"

__all__ = [
    "FP8",
    "QSGD",
    "ZFP",
    "Cast",
    "Codec",
    "Communicator",
    "CompcollError",
    "ErrorFeedback",
    "IntSum",
    "MinMax",
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
    "decode",
    "encode",
    "errors",
    "get_codec",
    "get_communicator",
    "iallreduce",
    "list_codecs",
    "reduce_scatter",
]


def __getattr__(name: str) -> Any:
    """Load what needs MPI when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'compcoll' has no attribute {name!r}")
    module = import_module(".communicator" if name == "Communicator" else ".api", __name__)
    value = globals()[name] = getattr(module, name)
    return value
