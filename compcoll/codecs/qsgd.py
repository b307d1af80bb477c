"""Quantization to evenly spaced levels, up or down at random: QSGD and TernGrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import InvalidArgument
from .base import Coder, Device, check_bits, check_block, check_seed

_NEAREST, _EUCLIDEAN = 2, 1


@dataclass(frozen=True)
class QSGD:
    """Round each value to one of evenly spaced levels between -norm and norm of its block.

    There are ``2**bits - 1`` levels, 0 among them; with 1 bit two, -norm and norm. Stochastic rounding goes to one of
    the two levels around a value, so that the mean is the value (within 2**-17 of a level's distance, where random
    bits end). Its random numbers depend on ``seed``, on how many collectives the communicator has begun, on the rank
    and on the element's place in the buffer, and on nothing else.

    The wire of a block is half the distance of its levels, then the packed codes. Blocks that hold NaN or Inf decode
    to NaN; blocks whose values are all below 2**-80 (float64: 2**-900) decode to 0.

    Parameters
    ----------
    bits : int
        Bits of a code, 1 to 8.
    block : int
        Values that share a norm (QSGD's bucket): a multiple of 8, from 8 to 1048576.
    norm : {"max", "l2"}
        The largest magnitude, or the root of the sum of squares: of B values it is up to √B times as large, and so
        are steps.
    rounding : {"stochastic", "nearest"}
        Without bias, or with half the largest error. Stochastic rounding to steps much larger than the values loses
        more than there is, and error feedback would add that up without end: it is refused then.
    seed : int
        Of the random numbers, from 0 to 2**64 - 1.

    References
    ----------
    D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NIPS 2017, section
    3.1.
    """

    bits: int = 4
    block: int = 512
    norm: str = "max"
    rounding: str = "stochastic"
    seed: int = 0

    name: ClassVar[str] = "qsgd"
    fixed_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bits(self)
        check_block(self)
        check_seed(self)
        if self.norm not in ("l2", "max"):
            raise InvalidArgument(f'qsgd: norm={self.norm!r} is neither "l2" nor "max"')
        if self.rounding not in ("stochastic", "nearest"):
            raise InvalidArgument(f'qsgd: rounding={self.rounding!r} is neither "stochastic" nor "nearest"')

    def coder(self, device: Device, dtype: str) -> Coder:
        variant = _EUCLIDEAN * (self.norm == "l2") + _NEAREST * (self.rounding == "nearest")
        return device.coder(("qsgd", self.bits, self.block), dtype, variant=variant, seed=self.seed)


@dataclass(frozen=True)
class TernGrad:
    """Send each value as -s, 0 or s, where s is its block's largest magnitude.

    x becomes ``sign(x) · s`` with probability ``|x| / s``, else 0, so that the mean is x.

    What `QSGD` does with 2 bits, the largest magnitude for a norm, and stochastic rounding.

    Parameters
    ----------
    block : int
        Values that share a scale: a multiple of 8, from 8 to 1048576.
    seed : int
        Of the random numbers, from 0 to 2**64 - 1.

    References
    ----------
    W. Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NIPS 2017,
    section 3; without its gradient clipping.
    """

    block: int = 2048
    seed: int = 0

    name: ClassVar[str] = "terngrad"
    fixed_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self)
        check_seed(self)

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("qsgd", 2, self.block), dtype, seed=self.seed)
