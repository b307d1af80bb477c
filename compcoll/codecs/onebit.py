"""One bit per value: 1-bit SGD, and signs with a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .options import SHORT_BLOCK, option
from .quantization import quantizer_bound


@dataclass(frozen=True)
class OneBit(Codec):
    """Send the sign of each value. It decodes to the mean of the block's values of that sign.

    The error is about as large as the values, so the method needs error feedback: ``feedback=ErrorFeedback()``.

    The wire of a block is the two means, then the sign bits. Blocks that hold NaN or Inf decode to NaN; blocks whose
    values are all below 2**-80 (float64: 2**-900) decode to 0.

    Parameters
    ----------
    block : int
        Values that share the means (in the paper a column): a multiple of 8, from 8 to 65536.

    References
    ----------
    F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", Interspeech 2014, section 3.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 2048, dtype=np.float32)
    >>> compcoll.encode(x, codec=compcoll.OneBit()).nbytes, x.nbytes
    (264, 8192)
    """

    block: int = option(2048, SHORT_BLOCK, "values that share the means")

    name: ClassVar[str] = "onebit"
    signs = True
    speeds = (Speed("onebit", 1, 6e9, 10e9, 9e9, 5e9),)
    examples = (
        Example({}, "62db5caccb24c738 453aa9b677854339 add94ff4a6c2cb55 f63329cb873046e6"),
        Example({"block": 64}, "bd935be5921f2a51 5a13610af1b4d788 6153b925f3580699 cab15f5d338d91db"),
    )

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("onebit", 2, self.block), dtype)

    def encoding_error(self, dtype: str) -> float:
        """Return the error for normal values, whose mean magnitude is √(2/π) for both signs."""
        return math.sqrt(1 - 2 / math.pi)

    def error_bound(self, dtype: str) -> ErrorBound:
        """Return the block's largest magnitude as the bound: a mean of magnitudes is never larger."""
        return quantizer_bound(self.block, 1.0, dtype)
