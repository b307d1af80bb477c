"""Sign bits of all ranks, gathered and counted in host memory: one bit per value of each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import load

Array = npt.NDArray[Any]

MOST_RANKS = 15
"""The most ranks that gather votes. With more, adding 8-bit fields by an allreduce takes no more bits per value:
2 (p - 1) / p · 8 against p - 1.
"""

_ZEROS, _NOT_FINITE = 1, 2  # marks of a block, or 0; all ranks use the largest mark of any rank


class GatheredVotes:
    """Encodes signs as bits. The first bit of a value is 1 if it is negative, the second is 1 if it is nonzero.

    Second bits exist only in blocks in which some rank has a zero.

    Parameters
    ----------
    block : int
        Values that share a mark: a multiple of 8.
    dtype : str
        Element type.
    from_bits : callable
        Takes a row of bits for each rank, the marks and an array, and stores the signs of the sums of all votes.
    """

    def __init__(self, block: int, dtype: str, from_bits: Callable[[Array, Array, Array], None]) -> None:
        self._block, self._dtype = block, dtype
        self.decode = from_bits

    def marks(self, n: int) -> int:
        return -(-n // self._block)

    def survey(self, x: Array, marks: Array) -> None:
        """Store the mark of each block of this rank's values; all ranks then use the maximum over ranks."""
        values, begins = load(x, self._dtype), np.arange(0, x.size, self._block)
        if values.size:
            marks[:] = np.maximum.reduceat((values == 0).view(np.uint8), begins)
            marks[np.logical_or.reduceat(~np.isfinite(values), begins)] = _NOT_FINITE

    def nbytes(self, n: int, marks: Array) -> int:
        """Return the bytes of one rank's wire."""
        return -(-n // 8) + -(-int(np.count_nonzero(self._masked(n, marks))) // 8)

    def encode(self, x: Array, marks: Array, wire: Array) -> None:
        """Store the bits of this rank's values."""
        values, signs = load(x, self._dtype), -(-x.size // 8)
        wire[:signs] = np.packbits(values < 0, bitorder="little")
        wire[signs:] = np.packbits(values[self._masked(x.size, marks)] != 0, bitorder="little")

    def _masked(self, n: int, marks: Array) -> Array:
        return np.repeat(marks == _ZEROS, self._block)[:n]
