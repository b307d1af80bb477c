"""Sums of numbers that stand for values: any allreduce adds them, and nothing is encoded again.

The ranks first agree, by a small allreduce of maxima, on what the numbers of each block stand for. A value is encoded
once, however far its number travels, and integers are added exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..codecs.base import Array, IntegerQuantizer
from ..gpu.streams import Timeline
from ..pending import Steps

Reduce = Callable[[Any, str], Steps]
"""Reduces an array of numbers in place by ``"sum"`` or ``"max"``, over all ranks."""

Gather = Callable[[Any], Steps]
"""Fills in the other ranks' rows of an array that has one for each."""


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
    """Count all ranks' signs from all ranks' bits: where ranks are few, fewer bytes than sums of fields.

    Parameters
    ----------
    x, out : array
        This rank's values, and where the signs of the sums of votes go.
    votes : GatheredVotes
        Values to bits, and back.
    rank, ranks : int
        This one, and how many.
    agree : callable
        Reduces what ranks agree on.
    gather : callable
        Gathers the bits.
    allocate : callable
        Gives memory, in bytes.
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
        This rank's values, and where the result goes.
    scale : float
        Factor of the values.
    residual : array or None
        What encodings lose, for error feedback.
    quantizer : IntegerQuantizer
        Values to numbers, and back.
    agree, add : callable
        Reduce what ranks agree on, and the numbers.
    allocate : callable
        Gives memory, in bytes.
    timeline : Timeline or None
        Of a device whose kernels are done later.
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
