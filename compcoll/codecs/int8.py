"""8-bit integers with a scale for each block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .options import BLOCK, option
from .quantization import largest_of, quantizer_bound


@dataclass(frozen=True)
class Int8(Codec):
    """Round each value to the nearest multiple, -127 to 127, of its block's scale: symmetric quantization.

    The scale is the block's largest magnitude divided by 127; 0 stays 0. The error of one encoding is at most half a
    scale.

    The wire of a block is its scale, then a byte for each value. Blocks that hold NaN or Inf decode to NaN; blocks
    whose values are all below 2**-80 (float64: 2**-900) decode to 0.

    Parameters
    ----------
    block : int
        Values that share a scale: a multiple of 8, from 8 to 1048576. Set it to the row length of a matrix to give
        each row its own scale.

    References
    ----------
    G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, for one scale
    per block.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 2048, dtype=np.float32)
    >>> compcoll.encode(x, codec=compcoll.Int8()).nbytes, x.nbytes
    (2080, 8192)
    """

    block: int = option(256, BLOCK, "values that share a scale")

    name: ClassVar[str] = "int8"
    speeds = (Speed("int8", 8, 8e9, 10e9, 9e9, 4.5e9),)
    examples = (
        Example({}, "d5b7a41fa59a3e6b 27d0d79dd86094a0 658ec02fa154e3dd c5aedf2923e39c73"),
        Example({"block": 64}, "9706d8bb7ccccd4b 1fdd23d5d61749a7 8893a1f5c604d270 dadb08aba627b0b9"),
    )

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("int8", 8, self.block), dtype)

    def encoding_error(self, dtype: str) -> float:
        """Return the RMS error of rounding to multiples of a scale s, ``s / √12``."""
        return largest_of(2 * self.block) / 127 / math.sqrt(12)

    def error_bound(self, dtype: str) -> ErrorBound:
        """Return half a scale."""
        return quantizer_bound(self.block, 0.5 / 127, dtype)
