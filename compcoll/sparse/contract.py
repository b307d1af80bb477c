"""The former place of names of `compcoll.codecs.sparse.sparsifier`."""

from ..codecs.sparse.sparsifier import MOST_ELEMENTS, MOST_PACKED, SparseSum, Sparsifier

__all__ = ["MOST_ELEMENTS", "MOST_PACKED", "SparseSum", "Sparsifier"]
