"""8-bit floating point with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .options import BLOCK, OneOf, option
from .quantization import float_rounding, quantizer_bound

_EXPONENT_BITS = {"e4m3": 4, "e5m2": 5}
_ROUNDING = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}


@dataclass(frozen=True)
class FP8(Codec):
    """Round values to an 8-bit floating-point format, after dividing a block by a power of two for its largest value.

    With e4m3, magnitudes within 2**14 of the block's largest keep 4 significant bits; with e5m2, magnitudes within
    2**29 keep 3. Smaller values have errors of up to 2**-17 and 2**-31 of the largest.

    The wire of a block is the exponent of its largest magnitude, 16 bits, then a byte for each value. Blocks that
    hold NaN or Inf decode to NaN; blocks whose values are all below 2**-80 (float64: 2**-900) decode to 0.

    Parameters
    ----------
    format : {"e4m3", "e5m2"}
        Bits of exponent and fraction.
    block : int
        Values that share a scale: a multiple of 8, from 8 to 1048576.

    References
    ----------
    P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 2048, dtype=np.float32)
    >>> compcoll.encode(x, codec=compcoll.FP8()).nbytes, x.nbytes
    (2080, 8192)
    """

    format: str = option("e4m3", OneOf(("e4m3", "e5m2")), "the format on the wire")
    block: int = option(128, BLOCK, "values that share a scale")

    name: ClassVar[str] = "fp8"
    for_auto = ({"format": "e4m3"}, {"format": "e5m2"})
    speeds = (Speed("fp8", 8, 5e9, 7e9, 6e9, 3e9),)
    examples = (
        Example({}, "71e39386d97ba00e 481eaea16e75030b 19fa98beb87bd1bf 52132eb5dedd4a23"),
        Example({"format": "e5m2"}, "2ea399659fead308 0e937c6238faa7d1 86a8f8a543e20d69 24fb01b4749e2b6f"),
        Example({"format": "e5m2", "block": 32}, "b30e9941f201de1e 80ddd152d2217bd3 028a1f2e6831819d c0ca5f67e5757365"),
    )

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("fp8", _EXPONENT_BITS[self.format], self.block), dtype)

    def encoding_error(self, dtype: str) -> float:
        """Return the error of rounding to 4 or 3 significant bits."""
        return float_rounding(_ROUNDING[self.format])

    def error_bound(self, dtype: str) -> ErrorBound:
        """Return half a unit in the last place of 4 or 3 significant bits."""
        return quantizer_bound(self.block, _ROUNDING[self.format], dtype)
