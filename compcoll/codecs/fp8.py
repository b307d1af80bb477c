"""Floating point in 8 bits, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import InvalidArgument
from .base import Coder, Device, check_block

_EXPONENT_BITS = {"e4m3": 4, "e5m2": 5}


@dataclass(frozen=True)
class FP8:
    """Round values to a format of 8 bits, after a division by a power of two that fits the largest of their block.

    Magnitudes within 2**14 of the block's largest one keep 4 significant bits with e4m3, within 2**29 they keep 3
    with e5m2; smaller ones lose up to 2**-18 and 2**-32 of the largest.

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
    """

    format: str = "e4m3"
    block: int = 128

    name: ClassVar[str] = "fp8"
    fixed_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self)
        if self.format not in _EXPONENT_BITS:
            raise InvalidArgument(f'fp8: format={self.format!r} is neither "e4m3" nor "e5m2"')

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("fp8", _EXPONENT_BITS[self.format], self.block), dtype)
