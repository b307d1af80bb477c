"""Min-max quantization, as in ByteGrad."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..dtypes import computed_on
from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .options import BITS, BLOCK, option
from .quantization import largest_of


@dataclass(frozen=True)
class MinMax(Codec):
    """Round each value to the nearest of ``2**bits`` levels between its block's smallest and largest value.

    The wire of a block is its minimum and maximum, then the packed codes. The error of one encoding is at most half a
    level: ``(max - min) / (2**bits - 1) / 2``. Blocks that hold NaN or Inf decode to NaN; blocks whose values differ by
    less than 2**-90 (float64: 2**-900) decode to their minimum.

    Parameters
    ----------
    bits : int
        Bits of a code, 1 to 8.
    block : int
        Values that share a minimum and maximum: a multiple of 8, from 8 to 1048576.

    References
    ----------
    Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021 (ByteGrad).

    Examples
    --------
    >>> x = np.linspace(-1, 1, 2048, dtype=np.float32)
    >>> compcoll.encode(x, codec=compcoll.MinMax(bits=4)).nbytes, x.nbytes
    (1032, 8192)
    """

    bits: int = option(8, BITS, "bits of a code")
    block: int = option(2048, BLOCK, "values that share a minimum and maximum")

    name: ClassVar[str] = "minmax"
    for_auto = tuple({"bits": bits} for bits in (8, 6, 4))
    speeds = (Speed("minmax", 8, 10e9, 10e9, 8e9, 5e9),)
    examples = (
        Example({}, "1d033d106a24c72f bf7607adb8e32947 524565b4daf01f08 b8c6d7973629f4ef"),
        Example({"bits": 3, "block": 64}, "e03b9612240d72bf f1dfe1a76bfea143 52a3434cff827d1f 14ea0c8c2b9a212d"),
    )

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("minmax", self.bits, self.block), dtype)

    def encoding_error(self, dtype: str) -> float:
        """Return the RMS error of rounding to levels ``s = (max - min) / (2**b - 1)`` apart, ``s / √12``."""
        return min(2 * largest_of(self.block) / ((1 << self.bits) - 1) / math.sqrt(12), 1.0)

    def error_bound(self, dtype: str) -> ErrorBound:
        """Return half a level, plus the rounding of ``lo + code · step`` in floating point."""
        levels = (1 << self.bits) - 1
        return ErrorBound(self.block, 4 * computed_on(dtype).rounding, 0.5 * (1 + 2**-10) / levels, 2.0**-126)
