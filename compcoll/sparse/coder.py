"""The former place of names of `compcoll.codecs.sparse.sparsifier`."""

from ..codecs.sparse.sparsifier import Chosen, SparseCoder

__all__ = ["Chosen", "SparseCoder"]
