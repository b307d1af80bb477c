"""One bit a value: 1-bit SGD, and signs with a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Coder, Device, check_block


@dataclass(frozen=True)
class OneBit:
    """Send the sign of each value; it stands for the mean of its block's values of that sign.

    What is lost is about as large as the values: error feedback is part of the method, ``feedback=ErrorFeedback()``.

    The wire of a block is the two means, then the sign bits. Blocks that hold NaN or Inf decode to NaN; blocks whose
    values are all below 2**-80 (float64: 2**-900) decode to 0.

    Parameters
    ----------
    block : int
        Values that share the means (a column, in the source): a multiple of 8, from 8 to 65536.

    References
    ----------
    F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", Interspeech 2014, section 3.
    """

    block: int = 2048

    name: ClassVar[str] = "onebit"
    fixed_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self, largest=65536)

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("onebit", 2, self.block), dtype)
