"""Allreduces of additive codecs: any allreduce can add their numbers, so nothing is encoded again on the way.

First a small allreduce of maxima computes the scales that the ranks share. A value is encoded once for any number of
ranks, and integers are added exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..codecs.base import Array
from ..gpu.streams import Timeline
from ..host.quantizer import IntegerQuantizer
from ..pending import Steps

Reduce = Callable[[Any, str], Steps]
"""A function that reduces an array of numbers over all ranks, in place, by ``"sum"`` or ``"max"``."""

Gather = Callable[[Any], Steps]
"""A function that fills in the other ranks' rows of an array with one row for each rank."""


def gathered_votes(
    x: Array,
    out: Array,
    votes: Any,
    rank: int,
    ranks: int,
    agree: Reduce,
    gather: Gather,
    allocate: Callable[[int], Array],
) -> Steps:
    """Gather all ranks' sign bits and count them. For few ranks this takes fewer bytes than sums of bit fields.

    Parameters
    ----------
    x, out : array
        This rank's values, and the memory of the result: the signs of the sums of votes.
    votes : GatheredVotes
        Encodes values as bits and decodes them.
    rank, ranks : int
        This rank, and the number of ranks.
    agree : callable
        Reduces the marks of blocks by their maximum.
    gather : callable
        Gathers the bits.
    allocate : callable
        Takes a number of bytes and returns memory.
    """
    marks = allocate(votes.marks(x.size))
    votes.survey(x, marks)
    yield from agree(marks, "max")
    rows = allocate(ranks * votes.nbytes(x.size, marks)).reshape(ranks, -1)
    votes.encode(x, marks, rows[rank])
    yield from gather(rows)
    votes.decode(rows, marks, out)


def allreduce(
    x: Array,
    out: Array,
    scale: float,
    residual: Array | None,
    quantizer: IntegerQuantizer,
    agree: Reduce,
    add: Reduce,
    allocate: Callable[[int], Array],
    timeline: Timeline | None = None,
) -> Steps:
    """Sum all ranks' buffers.

    Parameters
    ----------
    x, out : array
        This rank's values, and the memory of the result.
    scale : float
        Factor of the values.
    residual : array or None
        The residual of error feedback.
    quantizer : IntegerQuantizer
        Encodes values as numbers and decodes them.
    agree, add : callable
        Reduce the shared scale by its maximum, and the numbers by their sum.
    allocate : callable
        Takes a number of bytes and returns memory.
    timeline : Timeline or None
        For a device that runs kernels asynchronously: orders kernels and messages.
    """

    def memory(count: int, dtype: Any) -> Array:
        return allocate(count * dtype.itemsize).view(dtype)

    def after_all() -> None:
        if timeline is not None:
            timeline.encoding((), of_result=True)

    shared_scale = memory(quantizer.shared_scale(x.size), quantizer.shared_scale_dtype)
    numbers = memory(quantizer.numbers(x.size), quantizer.number_dtype)
    after_all()
    quantizer.survey(x, scale, residual, shared_scale)
    yield from agree(shared_scale, "max")
    after_all()
    quantizer.encode(x, scale, residual, shared_scale, numbers)
    yield from add(numbers, "sum")
    after_all()
    quantizer.decode(numbers, shared_scale, out)
