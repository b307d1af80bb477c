"""Sparsification: methods that send a few elements of a buffer, as indices and values.

>>> gradient, feedback = np.ones(4096, np.float32), compcoll.ErrorFeedback()
>>> total = compcoll.allreduce(gradient, codec="topk", density=0.001, feedback=feedback)
"""

from .feedback import DGCFeedback, VarianceFeedback, warmup_density
from .methods import Hybrid, RandomK, Strom, TopK, Variance
from .sparsifier import SparseSum, Sparsifier

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
