"""Codecs whose wires can be summed without decoding: integers, which any allreduce can add."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..errors import InvalidArgument
from ..host.quantizer import IntegerQuantizer
from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .options import BLOCK, SHORT_BLOCK, OneOf, option
from .quantization import largest_of, quantizer_bound

_VOTE_BITS = 4.0  # for up to 7 ranks


@dataclass(frozen=True)
class IntSum(Codec):
    """Send integers and add them: a value is rounded once for any number of ranks.

    First a small allreduce of maxima finds the largest magnitude of each block on all ranks. It becomes the highest of
    ``(2**(bits - 1) - 1) // ranks`` levels (cut to 24 significant bits, which float32 holds), so that no sum
    overflows. Values are rounded to the nearest level, and any allreduce, also MPI's own, adds the integers. An
    element's error is at most half a level for each rank.

    Blocks that hold NaN or Inf on some rank become NaN; blocks whose values are all below 2**-80 (float64: 2**-900)
    become 0. Only allreduce can use this codec.

    Parameters
    ----------
    bits : {8, 16, 32}
        Bits of an integer.
    block : int
        Values that share a scale: a multiple of 8, from 8 to 1048576.

    References
    ----------
    K. Mishchenko et al., "IntSGD: Adaptive Floatless Compression of Stochastic Gradients", ICLR 2022, with A. Sapio
    et al., "Scaling Distributed Machine Learning with In-Network Aggregation", NSDI 2021, section 3.7, for scales
    agreed by blocks.

    Examples
    --------
    >>> compcoll.allreduce(np.array([1, -0.5], np.float32), codec=compcoll.IntSum(bits=16), op="mean")
    array([ 1. , -0.5], dtype=float32)
    """

    bits: int = option(16, OneOf((8, 16, 32)), "of an integer")
    block: int = option(2048, BLOCK, "values that share a scale")

    name: ClassVar[str] = "intsum"
    additive = True
    for_auto = tuple({"bits": bits} for bits in (8, 16, 32))
    # Here accumulate and recode are the speed of adding integers, which memory bandwidth limits.
    speeds = (
        Speed("intsum", 8, 7e9, 15e9, 15e9, 15e9),
        Speed("intsum", 16, 7e9, 12e9, 12e9, 12e9),
        Speed("intsum", 32, 7e9, 9e9, 8e9, 8e9),
    )
    examples = (
        Example({}),
        Example({"bits": 8, "block": 64}),
        Example({"bits": 16, "block": 512}),
        Example({"bits": 32}),
    )

    def coder(self, device: Device, dtype: str) -> Coder:
        raise InvalidArgument("intsum encodes what all ranks add: only allreduce can use it")

    def levels(self, ranks: int) -> int:
        """Return the highest level.

        Raises
        ------
        InvalidArgument
            If sums of that many ranks do not fit the integers.
        """
        highest = ((1 << (self.bits - 1)) - 1) // ranks
        if highest < 1:
            raise InvalidArgument(f"intsum: sums of {ranks} ranks do not fit {self.bits} bits: use more bits")
        return highest

    def quantizer(self, device: Device, dtype: str, ranks: int) -> IntegerQuantizer:
        return device.integers(self.bits, self.levels(ranks), self.block, dtype)

    def wire_bits(self, device: Device, dtype: str) -> float:
        return self.bits

    def sum_error(self, ranks: int) -> float:
        """Return the error if each rank rounds once, to steps given by the largest of all ranks' values."""
        return largest_of(2 * self.block * ranks) / self.levels(ranks) / math.sqrt(12)


@dataclass(frozen=True)
class Sign(Codec):
    """Send the sign of each value.

    Without a scale every rank votes with its signs. The result is the sign of the sum of votes: 1, -1, or 0 for a tie.
    Zeros do not vote (in the paper they count as 1). With ``"ring"`` and ``"direct"`` on 2 to 15 ranks, each rank sends
    one bit per value to all others, and two bits per value in blocks in which some rank has a zero. In other cases any
    allreduce, also MPI's own, adds the votes in bit fields: 2 bits per value for one rank, 4 for up to 7, 8 for up to
    127. Blocks that hold NaN or Inf on some rank become NaN. Only allreduce can use votes.

    With ``scale="mean"`` a sign stands for the mean magnitude of its block: one bit per value, in every collective. Use
    it with ``feedback=ErrorFeedback()`` (EF-SignSGD).

    Parameters
    ----------
    scale : {None, "mean"}
        Magnitude of the decoded signs; None for votes.
    block : int
        Values that share a scale: a multiple of 8, from 8 to 65536.

    References
    ----------
    J. Bernstein et al., "signSGD with Majority Vote is Communication Efficient And Fault Tolerant", ICLR 2019;
    S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.

    Examples
    --------
    >>> compcoll.allreduce(np.array([2, -3, 0], np.float32), codec=compcoll.Sign())  # what most ranks vote for
    array([ 1., -1.,  0.], dtype=float32)
    """

    scale: str | None = option(None, OneOf((None, "mean")), "what signs stand for, unless they are votes")
    block: int = option(2048, SHORT_BLOCK, "values that share a scale")

    name: ClassVar[str] = "sign"
    signs = True
    speeds = (Speed("sign", 1, 6e9, 10e9, 9e9, 5e9), Speed("sign", _VOTE_BITS, 4e9, 4e9, 15e9, 15e9))
    examples = (
        Example({}),
        Example({"block": 64}),
        Example({"scale": "mean"}, "d5298dee04a72ebf 87038d8257c0f02c 346808bcbb77b2fd f8a74d11a68bb75f"),
    )

    @property
    def conserves(self) -> str:  # type: ignore[override]
        return "none" if self.scale is None else "exact"

    @property
    def additive(self) -> bool:  # type: ignore[override]
        return self.scale is None

    def coder(self, device: Device, dtype: str) -> Coder:
        if self.scale is None:
            raise InvalidArgument('sign without scale="mean" is a vote of all ranks: only allreduce can use it')
        return device.coder(("onebit", 1, self.block), dtype)

    def quantizer(self, device: Device, dtype: str, ranks: int) -> IntegerQuantizer | None:
        return device.votes(ranks, self.block, dtype) if self.scale is None else None

    def wire_bits(self, device: Device, dtype: str) -> float:
        return _VOTE_BITS if self.additive else super().wire_bits(device, dtype)

    def encoding_error(self, dtype: str) -> float | None:
        """Return the error of `OneBit`, whose two means are equal for normal values; the error of votes is unknown."""
        return None if self.additive else math.sqrt(1 - 2 / math.pi)

    def error_bound(self, dtype: str) -> ErrorBound | None:
        return None if self.additive else quantizer_bound(self.block, 1.0, dtype)
