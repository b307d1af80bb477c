"""Codecs whose wires can be summed as they are: integers, added by any allreduce."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..errors import InvalidArgument
from .base import Codec, Coder, Device, ErrorBound, Example, IntegerQuantizer, Speed
from .options import BLOCK, SHORT_BLOCK, OneOf, option
from .quantization import largest_of, quantizer_bound

_VOTE_BITS = 4.0  # of up to 7 ranks


@dataclass(frozen=True)
class IntSum(Codec):
    """Send integers, and add those: a value is rounded once, however many ranks there are.

    First all ranks agree on the largest magnitude in each block, by a small allreduce of maxima. It becomes the
    highest of ``(2**(bits - 1) - 1) // ranks`` levels (cut to 24 significant bits, which float32 holds), so that no
    sum overflows; values are rounded to the nearest level. The integers then go through any allreduce, MPI's own
    included. An element's error is at most half a level for each rank.

    Blocks that hold NaN or Inf on some rank become NaN; blocks whose values are all below 2**-80 (float64: 2**-900)
    become 0. Only allreduce can use it.

    Parameters
    ----------
    bits : {8, 16, 32}
        Of an integer.
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
    # Adding integers, which is what stands under accumulate and recode, is as fast as memory.
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
        """The highest level.

        Raises
        ------
        InvalidArgument
            If there is none for so many ranks.
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
        """Each rank rounds once, to steps that the largest of all ranks' values decides."""
        return largest_of(2 * self.block * ranks) / self.levels(ranks) / math.sqrt(12)


@dataclass(frozen=True)
class Sign(Codec):
    """Send the sign of each value.

    Without a scale every rank votes, and the result is the sign of the votes' sum: 1, -1, or 0 for a tie; zeros do
    not vote (the paper's count as 1). By ``"ring"`` and ``"direct"`` on 2 to 15 ranks, each sends one bit a value to
    all others, in blocks in which some rank has a zero two. Elsewhere votes are counted in fields that
    hold all ranks' (2 bits a value for one rank, 4 for up to 7, 8 for up to 127) and go through any allreduce, MPI's
    own included. Blocks that hold NaN or Inf on some rank become NaN. Only allreduce can use it.

    With ``scale="mean"`` signs stand for the mean magnitude of their block: one bit a value, to be used with
    ``feedback=ErrorFeedback()`` (EF-SignSGD), in every collective.

    Parameters
    ----------
    scale : {None, "mean"}
        What signs stand for.
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
        """Give the error of `OneBit`, whose two means are alike for normal values; that of votes is unknown."""
        return None if self.additive else math.sqrt(1 - 2 / math.pi)

    def error_bound(self, dtype: str) -> ErrorBound | None:
        return None if self.additive else quantizer_bound(self.block, 1.0, dtype)
