"""Quantization to evenly spaced levels with stochastic rounding: QSGD and TernGrad."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .options import BITS, BLOCK, SEED, OneOf, option
from .quantization import largest_of, quantizer_bound, rounding_error

_NEAREST, _EUCLIDEAN = 2, 1


@dataclass(frozen=True)
class QSGD(Codec):
    """Round each value to one of evenly spaced levels between -norm and norm of its block.

    There are ``2**bits - 1`` levels, one of them 0; with 1 bit there are two, -norm and norm. Stochastic rounding
    selects one of the two levels around a value so that the expected result is the value (within 2**-17 of the distance
    between levels, the resolution of the random bits). The random numbers depend only on ``seed``, the number of
    collectives that the communicator has begun, the rank, and the element's position in the buffer.

    The wire of a block is half the distance between its levels, then the packed codes. Blocks that hold NaN or Inf
    decode to NaN; blocks whose values are all below 2**-80 (float64: 2**-900) decode to 0.

    Parameters
    ----------
    bits : int
        Bits of a code, 1 to 8.
    block : int
        Values that share a norm (QSGD's bucket): a multiple of 8, from 8 to 1048576.
    norm : {"max", "l2"}
        The largest magnitude, or the root of the sum of squares. For B values the latter is up to √B times as large,
        and so are the steps between levels.
    rounding : {"stochastic", "nearest"}
        Without bias, or with half the largest error. If steps are much larger than the values, the error of stochastic
        rounding exceeds the values. Error feedback is refused then, since residuals would grow without bound.
    seed : int
        Seed of the random numbers, from 0 to 2**64 - 1.

    References
    ----------
    D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NIPS 2017, section
    3.1.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 2048, dtype=np.float32)
    >>> compcoll.encode(x, codec=compcoll.QSGD(bits=4)).nbytes, x.nbytes
    (1040, 8192)
    """

    bits: int = option(4, BITS, "bits of a code")
    block: int = option(512, BLOCK, "values that share a norm")
    norm: str = option("max", OneOf(("l2", "max")), "of a block")
    rounding: str = option("stochastic", OneOf(("stochastic", "nearest")), "to levels")
    seed: int = option(0, SEED, "of random numbers")

    name: ClassVar[str] = "qsgd"
    for_auto = tuple({"bits": bits} for bits in (8, 6, 4))
    speeds = (Speed("qsgd", 4, 2.5e9, 8e9, 7e9, 2e9),)
    examples = (
        Example({}, "55bef97307aef9ef 995d4c475838a79e 151b9ef20ddf91a0 c58a70007db0a06a"),
        Example(
            {"bits": 5, "rounding": "nearest"},
            "ba99e341cad87ec1 ce479951169669c1 411ed54dfdf6d661 2c2638de6c61927a",
        ),
        Example(
            {"bits": 7, "block": 64, "norm": "l2", "seed": 1},
            "f1379673cd3f158e 34efb6e28f1dc33e a7baa0aee4e44185 d052d17f851170a9",
        ),
    )

    def coder(self, device: Device, dtype: str) -> Coder:
        variant = _EUCLIDEAN * (self.norm == "l2") + _NEAREST * (self.rounding == "nearest")
        return device.coder(("qsgd", self.bits, self.block), dtype, variant=variant, seed=self.seed)

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        return self.rounding == "stochastic"

    def _step(self, largest: float) -> float:
        """Return the step between levels if the largest magnitude is ``largest`` (norm "l2": if the RMS value is 1)."""
        norm = math.sqrt(self.block) if self.norm == "l2" else largest
        return 2 * norm / (1 if self.bits == 1 else (1 << self.bits) - 2)

    def encoding_error(self, dtype: str) -> float:
        """Return an estimate by `rounding_error`.

        It is above 1 if steps are much larger than the values; estimates for results are then too large.
        """
        step = self._step(largest_of(2 * self.block))
        return rounding_error(step, zero=self.bits > 1, stochastic=self.stochastic)

    def error_bound(self, dtype: str) -> ErrorBound:
        """Return one step (half a step for "nearest"), plus 2**-16 of a step for the resolution of random bits."""
        part = (1.0 if self.stochastic else 0.5) + 2.0**-16
        return quantizer_bound(self.block, part * self._step(1.0), dtype)


@dataclass(frozen=True)
class TernGrad(Codec):
    """Send each value as -s, 0 or s, where s is its block's largest magnitude.

    x becomes ``sign(x) · s`` with probability ``|x| / s``, else 0, so that the expected result is x. This equals `QSGD`
    with 2 bits, the largest magnitude as norm, and stochastic rounding.

    Parameters
    ----------
    block : int
        Values that share a scale: a multiple of 8, from 8 to 1048576.
    seed : int
        Seed of the random numbers, from 0 to 2**64 - 1.

    References
    ----------
    W. Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NIPS 2017,
    section 3; without its gradient clipping.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 2048, dtype=np.float32)
    >>> compcoll.encode(x, codec=compcoll.TernGrad()).nbytes, x.nbytes
    (516, 8192)
    """

    block: int = option(2048, BLOCK, "values that share a scale")
    seed: int = option(0, SEED, "of random numbers")

    name: ClassVar[str] = "terngrad"
    stochastic = True
    speeds = (Speed("terngrad", 2, 2.5e9, 8e9, 7e9, 2e9),)
    examples = (Example({}, "a8c8ec722be97bf1 fd0bae21e6dfefe1 f93c1dab8c53e8c2 293296ae33b183db"),)

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("qsgd", 2, self.block), dtype, seed=self.seed)

    def encoding_error(self, dtype: str) -> float:
        """Return an estimate, as of `QSGD`."""
        return rounding_error(largest_of(2 * self.block), zero=True, stochastic=True)

    def error_bound(self, dtype: str) -> ErrorBound:
        return quantizer_bound(self.block, 1.0, dtype)
