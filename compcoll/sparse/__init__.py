"""Sparsification: methods that send few elements of a buffer, as indices and values.

>>> total = compcoll.allreduce(gradient, codec="topk", density=0.001, feedback=feedback)
"""

from .. import codecs as _codecs  # noqa: F401  its registry builds on the modules here, which build on codecs.base
from .base import SparseSum, Sparsifier
from .codecs import Hybrid, RandomK, Strom, TopK, Variance
from .feedback import DGCFeedback, VarianceFeedback, warmup_density

__all__ = [
    "DGCFeedback",
    "Hybrid",
    "RandomK",
    "SparseSum",
    "Sparsifier",
    "Strom",
    "TopK",
    "Variance",
    "VarianceFeedback",
    "warmup_density",
]
