"""Signs of all ranks, gathered and counted: a bit a value of each rank, in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import load

Array = npt.NDArray[Any]

MOST_RANKS = 15
"""The most ranks that gather votes: with more, a value's field of 8 bits that any allreduce adds is no longer,
2 (p - 1) / p · 8 bits against p - 1.
"""

_ZEROS, _NOT_FINITE = 1, 2  # marks of a block, or 0: ranks agree on the largest


class GatheredVotes:
    """One bit a value says that it is negative, and in blocks in which some rank has a zero another that it is none.

    Parameters
    ----------
    block : int
        Values that share a mark: a multiple of 8.
    dtype : str
        Element type.
    from_bits : callable
        Stores the signs of the sums of all ranks' votes: of a row of bits for each, and the marks.
    """

    marks_dtype = np.dtype("uint8")

    def __init__(self, block: int, dtype: str, from_bits: Callable[[Array, Array, Array], None]) -> None:
        self._block, self._dtype = block, dtype
        self.decode = from_bits

    def marks(self, n: int) -> int:
        return -(-n // self._block)

    def survey(self, x: Array, marks: Array) -> None:
        """Store what each block of this rank's values holds; the ranks' maximum is what all will use."""
        values, begins = load(x, self._dtype), np.arange(0, x.size, self._block)
        if values.size:
            marks[:] = np.maximum.reduceat((values == 0).view(np.uint8), begins)
            marks[np.logical_or.reduceat(~np.isfinite(values), begins)] = _NOT_FINITE

    def nbytes(self, n: int, marks: Array) -> int:
        """Length of one rank's wire."""
        return -(-n // 8) + -(-int(np.count_nonzero(self._masked(n, marks))) // 8)

    def encode(self, x: Array, marks: Array, wire: Array) -> None:
        """Store the bits of this rank's values."""
        values, signs = load(x, self._dtype), -(-x.size // 8)
        wire[:signs] = np.packbits(values < 0, bitorder="little")
        wire[signs:] = np.packbits(values[self._masked(x.size, marks)] != 0, bitorder="little")

    def _masked(self, n: int, marks: Array) -> Array:
        return np.repeat(marks == _ZEROS, self._block)[:n]
