"""Codecs: compression methods that know nothing of MPI."""

from .additive import IntSum, Sign
from .base import Codec, Coder
from .cast import Cast
from .fp8 import FP8
from .int8 import Int8
from .minmax import MinMax
from .numpy_codec import NumpyCodec
from .onebit import OneBit
from .qsgd import QSGD, TernGrad
from .zfp import ZFP

ALL = (Cast, FP8, Int8, IntSum, MinMax, OneBit, QSGD, Sign, TernGrad, ZFP)
"""The codecs of compcoll's own that are not sparsifiers."""

__all__ = [
    "ALL",
    "FP8",
    "QSGD",
    "ZFP",
    "Cast",
    "Codec",
    "Coder",
    "Int8",
    "IntSum",
    "MinMax",
    "NumpyCodec",
    "OneBit",
    "Sign",
    "TernGrad",
]
