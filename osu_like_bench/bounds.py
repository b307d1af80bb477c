"""The bounds of a result's distance from the exact one, for a codec and the way that values take.

An encoding loses at most ``relative`` times the largest magnitude in its block, plus ``spread`` times the difference of
its largest and smallest value, plus ``absolute``. Losses of the values that enter a sum add up: with M the sum of all
ranks' largest magnitudes in a block, no partial sum exceeds M, so that every level of encodings adds at most the
loss of M and of the losses before it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from compcoll.algorithms import ALGORITHMS
from compcoll.algorithms.record import NEVER, Encodings
from compcoll.codecs import Codec, IntSum, Sign
from compcoll.codecs.base import ErrorBound
from compcoll.collectives.choose import COPY
from compcoll.dtypes import DTYPES
from compcoll.errors import InvalidArgument

Array = npt.NDArray[Any]


def of_blocks(bound: ErrorBound, values: Array) -> Array:
    """Compute what is lost of each block at most, but for ``absolute``, along the last axis of an array."""
    starts = np.arange(0, values.shape[-1], bound.block)
    highest, lowest = (extreme.reduceat(values, starts, axis=-1) for extreme in (np.maximum, np.minimum))
    lost: Array = bound.relative * np.maximum(highest, -lowest) + bound.spread * (highest - lowest)
    return lost


def spread_out(bound: ErrorBound, of_blocks: Array, length: int) -> Array:
    """The bound of each element from those of the blocks."""
    return np.repeat(of_blocks + bound.absolute, bound.block, axis=-1)[..., :length]


def bound_of(codec: Codec | None, dtype: str, ranks: int = 1) -> ErrorBound:
    """Find what a codec loses at most on elements of a type, in one encoding.

    Parameters
    ----------
    codec : Codec or None
        None loses nothing, and neither do votes (`is_vote`), whose result is exact.
    dtype : str
        The element type.
    ranks : int
        How many add what an additive codec makes of their values.
    """
    if codec is None or is_vote(codec):
        return ErrorBound()
    if isinstance(codec, IntSum):
        # Every rank rounds by half a step at most, and steps go by the largest of all ranks' magnitudes.
        return ErrorBound(codec.block, ranks / (2 * codec.levels(ranks)))
    bound = codec.error_bound(dtype)
    if bound is None:
        raise InvalidArgument(f"{codec!r} tells no error bound: the benchmark cannot check it")
    return bound


def is_vote(codec: Codec | None) -> bool:
    """Tell whether a codec gives the sign of the signs' sum: nothing that is near the sum of the values."""
    return isinstance(codec, Sign) and codec.additive


def encodings_of(collective: str, algorithm: str, size: int, nodes: int) -> Encodings:
    """Encodings on the way of a value to the result, by the algorithm that ran.

    Parameters
    ----------
    collective, algorithm : str
        As `compcoll.Stats` names them, or one of `naive.ALLREDUCE`; of others' algorithms nothing is known, so that
        each step of a ring counts.
    size, nodes : int
        Ranks, and nodes that they are on.
    """
    if algorithm == "p2p_recursive_doubling":
        levels, total = encodings_of(collective, "recursive_doubling", size, nodes)
        folded = size & size - 1 > 0
        return Encodings(levels + folded, total + folded)
    if algorithm == COPY:
        return NEVER
    if algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm].encodings(collective, size, nodes)
    return Encodings(2 * (size - 1), 2 * (size - 1))


def result_bound(once: ErrorBound, path: Encodings, dtype: str, terms: int) -> ErrorBound:
    """Compute how far a result may be from the exact one; magnitudes and spreads are sums over the terms.

    Parameters
    ----------
    once : ErrorBound
        Of one encoding.
    path : Encodings
        The encodings.
    dtype : str
        Element type of the result.
    terms : int
        Values that are added: 1 where a value is only moved.
    """
    # An uncompressed wire holds partial sums in the element type, too; and the reference is rounded as well.
    roundings = 2 * (terms - 1 + path.levels)
    part = once.relative + 2 * once.spread
    factor = growth(part, path.levels) / part if part else float(path.levels)
    return ErrorBound(
        once.block,
        factor * once.relative + roundings * DTYPES[dtype].rounding,
        factor * once.spread,
        path.total * once.absolute + roundings * DTYPES[dtype].smallest / 2,
    )


def growth(part: float, levels: int) -> float:
    """Compute what is lost when a part of everything, the losses before included, is lost some times."""
    return math.expm1(min(levels * math.log1p(part), 600.0))
