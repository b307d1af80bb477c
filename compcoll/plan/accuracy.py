"""Estimates of the error of a compressed collective, for values that look Gaussian.

An error is the root mean square error over the root mean square of the exact result, ``‖result - exact‖ / ‖exact‖``:
a typical error, not the largest. Estimates assume independent, normally distributed values. Smooth data does better
with ZFP; data with outliers does worse with min-max. docs/algorithms.md has bounds for single values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..algorithms import ALGORITHMS
from ..codecs import ALL, Codec
from ..dtypes import DTYPES
from ..errors import InvalidArgument
from ..host.device import HostDevice
from ..layout import World


def encodings(collective: str, algorithm: str, world: World) -> int:
    """Return the largest number of times that a value is encoded."""
    return 0 if world.size == 1 else ALGORITHMS[algorithm].encodings(collective, world.size, world.nodes).levels


def relative_error(codec: Codec | None, dtype: str, collective: str, algorithm: str, world: World) -> float | None:
    """Estimate the result's relative error; return None if the codec's error is unknown.

    `compcoll.algorithms.record.Growth` describes how the error ε of one encoding grows. If the error has a nonzero
    mean, this adds up (`Codec.bias`). Rounding a partial sum of j terms whose error has variance v makes it
    ``v + ε² (j + v)``: errors are encoded again, too. If a codec sends signs, which decode to means of
    values, the error is not independent of the values, and it is ``v + ε² (j - v)``. The variance of a
    decoded sum is at most ``(1 + ε²) p²``, since magnitudes of p terms add up, so the relative error is at most
    ``√((1 + ε²) p - 1)``.

    Parameters
    ----------
    codec : Codec or None
        The codec.
    dtype : str
        The values' element type.
    collective, algorithm : str
        Such as ``"allreduce"`` and ``"ring"``.
    world : World
        The ranks.
    """
    if codec is None:
        return 0.0
    if codec.additive:
        return codec.sum_error(world.size)
    once = codec.encoding_error(dtype)
    if once is None:
        return None
    if encodings(collective, algorithm, world) == 0:
        return 0.0
    again = -(once**2) if codec.signs else once**2
    growth = ALGORITHMS[algorithm].growth(collective, world.size, world.nodes, again)
    error = once * math.hypot(growth.independent, codec.bias(recoded=growth.recoded) * growth.alike)
    return min(error, math.sqrt((1 + once**2) * world.size - 1))


def candidates(device: HostDevice, dtype: str, ranks: int) -> Iterator[Codec]:
    """Yield the codecs that ``codec="auto"`` chooses from: see `Codec.for_auto`.

    Parameters
    ----------
    device : HostDevice
        Binds the codecs.
    dtype : str
        Element type.
    ranks : int
        The number of ranks: sums of too many do not fit the integers of `IntSum`.
    """
    for cls in ALL:
        for options in cls.for_auto:
            codec = cls(**options)
            try:
                error = codec.sum_error(ranks) if codec.additive else codec.encoding_error(dtype)
                shrinks = codec.wire_bits(device, dtype) < 8 * DTYPES[dtype].itemsize
            except InvalidArgument:  # not for this element type, or not for so many ranks
                continue
            if error is not None and codec.fixed_size and shrinks:
                yield codec
