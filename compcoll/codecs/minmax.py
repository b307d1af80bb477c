"""Min-max quantization, as in ByteGrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Coder, Device, check_bits, check_block


@dataclass(frozen=True)
class MinMax:
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
    """

    bits: int = 8
    block: int = 2048

    name: ClassVar[str] = "minmax"
    fixed_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bits(self)
        check_block(self)

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("minmax", self.bits, self.block), dtype)
