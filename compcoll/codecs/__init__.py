"""Codecs: compression methods that know nothing of MPI."""

from .base import DTYPES, Codec, Coder
from .cast import Cast
from .minmax import MinMax
from .registry import as_codec, get_codec, list_codecs
from .zfp import ZFP

__all__ = ["DTYPES", "ZFP", "Cast", "Codec", "Coder", "MinMax", "as_codec", "get_codec", "list_codecs"]
