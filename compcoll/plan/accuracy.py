"""Estimates of the error of a compressed collective, for values that look Gaussian.

An error is the root mean square error over the root mean square of the exact result, ``‖result - exact‖ / ‖exact‖``:
a typical error, not the largest. Estimates assume independent, normally distributed values. Smooth data does better
with ZFP; data with outliers does worse with min-max. docs/algorithms.md has bounds for single values.
"""

from __future__ import annotations

import math

from ..algorithms import ALGORITHMS
from ..codecs import ZFP, Cast, Codec, MinMax
from ..dtypes import DTYPES
from ..layout import World


def encodings(collective: str, algorithm: str, world: World) -> int:
    """Return the largest number of times that a value is encoded."""
    return 0 if world.size == 1 else ALGORITHMS[algorithm].encodings(collective, world.size, world.nodes).levels


def relative_error(codec: Codec | None, dtype: str, collective: str, algorithm: str, world: World) -> float | None:
    """Estimate the result's relative error; return None if the codec's error is unknown.

    `compcoll.algorithms.record.Growth` describes how the error ε of one encoding grows. If a codec does not round to
    nearest, its error has a nonzero mean, which adds up (`Codec.bias`). The error of stochastic rounding is encoded
    again with the values: the variance v of a partial sum of j terms grows to ``v + ε² (j + v)``.

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
    again = once if codec.stochastic else 0.0
    growth = ALGORITHMS[algorithm].growth(collective, world.size, world.nodes, again)
    return once * math.hypot(growth.independent, codec.bias(recoded=growth.recoded) * growth.alike)


def affordable(dtype: str) -> list[Codec]:
    """Return the codecs that ``codec="auto"`` chooses from, for an element type.

    The cast to float16 is not among them: values above 65504 would become infinite.
    """
    wide = not DTYPES[dtype].is_half
    casts: list[Codec] = [Cast("bfloat16")] if wide else []
    casts += [Cast("float32")] if dtype == "float64" else []
    rates = (4, 6, 8, 10, 12, 16, 20, 24, *((32, 40, 48) if dtype == "float64" else ())) if wide else (4, 6, 8, 10, 12)
    return [*casts, *(MinMax(bits) for bits in (8, 6, 4)), *(ZFP(rate=rate) for rate in rates)]
