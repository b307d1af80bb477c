"""Compute the allowed error of a result for a codec and an algorithm's encodings, and verify the result.

The error of one encoding is at most ``relative`` times the largest magnitude in its block, plus ``spread`` times the
difference of the block's largest and smallest value, plus ``absolute``. The errors of all terms of a sum add up. Let M
be the sum of all ranks' largest magnitudes in a block: no partial sum exceeds M, so each level of encodings adds at
most the error of encoding M plus the earlier errors.

`verify` compares a result with a reference that MPI computes in float64. The bound of each element is strict, but at
low rates it is so wide that a result of zeros would pass. So the whole result has a second bound, which comes from the
codec's error on the same data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from compcoll.algorithms import ALGORITHMS
from compcoll.algorithms.record import NEVER, Encodings
from compcoll.codecs import SZP, Codec, IntSum, Sign
from compcoll.codecs.base import ErrorBound
from compcoll.dtypes import DTYPES
from compcoll.errors import InvalidArgument
from compcoll.host.device import HostDevice
from compcoll.plan.choose import COPY

from .data import Array

if TYPE_CHECKING:  # MPI starts when it is imported
    from mpi4py import MPI

    from .cases import Case

_SLICE = 1 << 18
_SAMPLE, _FEWEST, _SLACK = 1 << 20, 1 << 12, 3.0


def of_blocks(bound: ErrorBound, values: Array) -> Array:
    """Return the error bound of each block along the last axis of an array, without ``absolute``."""
    starts = np.arange(0, values.shape[-1], bound.block)
    highest, lowest = (extreme.reduceat(values, starts, axis=-1) for extreme in (np.maximum, np.minimum))
    lost: Array = bound.relative * np.maximum(highest, -lowest) + bound.spread * (highest - lowest)
    return lost


def spread_out(bound: ErrorBound, of_blocks: Array, length: int) -> Array:
    """Return the error bound of each element from the result of `of_blocks`."""
    return np.repeat(of_blocks + bound.absolute, min(bound.block, length), axis=-1)[..., :length]


def bound_of(codec: Codec | None, dtype: str, ranks: int = 1) -> ErrorBound:
    """Return the error bound of one encoding.

    Parameters
    ----------
    codec : Codec or None
        The codec. The bound is 0 for None and for votes (`is_vote`), whose result is exact.
    dtype : str
        The element type.
    ranks : int
        Number of ranks whose encoded values are added.
    """
    if codec is None or is_vote(codec):
        return ErrorBound()
    if isinstance(codec, IntSum):
        # Each rank's rounding error is at most half a step, which depends on the largest magnitude of all ranks.
        return ErrorBound(codec.block, ranks / (2 * codec.levels(ranks)))
    bound = codec.error_bound(dtype)
    if bound is None:
        raise InvalidArgument(f"{codec!r} has no error bound, so the benchmark cannot check its results")
    if isinstance(codec, SZP):
        # A part of the largest of all ranks' values, also in a mean.
        return replace(bound, relative=ranks * bound.relative)
    return bound


def is_vote(codec: Codec | None) -> bool:
    """Return whether a codec's allreduce returns the sign of the sum of all signs, not an approximate sum of values."""
    return isinstance(codec, Sign) and codec.additive


def encodings_of(collective: str, algorithm: str, size: int, nodes: int) -> Encodings:
    """Return the encodings between a value and the result, for the algorithm that ran.

    Parameters
    ----------
    collective, algorithm : str
        Names from `compcoll.Stats`, or an algorithm of `naive.ALLREDUCE`. Any other algorithm is unknown: it is assumed
        to encode at each step of a ring.
    size, nodes : int
        Number of ranks, and of their nodes.
    """
    if algorithm == "p2p_recursive_doubling":
        levels, total = encodings_of(collective, "recursive_doubling", size, nodes)
        folded = size & size - 1 > 0
        return Encodings(levels + folded, total + folded)
    if algorithm == COPY:
        return NEVER
    if algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm].encodings(collective, size, nodes)
    steps = max(2 * (size - 1), 1)  # unknown algorithms may round even with a single rank
    return Encodings(steps, steps)


def result_bound(once: ErrorBound, path: Encodings, dtype: str, terms: int) -> ErrorBound:
    """Return the error bound of a result. It applies to magnitudes and spreads that are summed over the terms.

    Parameters
    ----------
    once : ErrorBound
        The bound of one encoding.
    path : Encodings
        The encodings between a value and the result.
    dtype : str
        Element type of the result.
    terms : int
        Number of added values; 1 if values are only moved.
    """
    # Uncompressed wires also round partial sums to the element type; the factor 2 allows for the reference's rounding.
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
    """Return the total relative error if each level adds a relative error of ``part`` to values and earlier errors."""
    return math.expm1(min(levels * math.log1p(part), 600.0))


@dataclass(frozen=True)
class Verdict:
    """The quality of a result, over all ranks.

    Attributes
    ----------
    error : float
        Root mean square of the difference from the reference, divided by that of the reference.
    error_max : float
        Largest difference, divided by the reference's largest magnitude.
    outside : int
        Number of elements outside their bounds, including NaN; all elements, if the error is too large for the codec's
        error on this data.
    different : int
        Number of elements that differ between ranks, in collectives that give all ranks the same result.
    """

    error: float
    error_max: float
    outside: int
    different: int


def typical_error(codec: Codec | None, x: Array, levels: int, terms: int) -> float:
    """Estimate the root mean square error of a result from the codec's error on a sample of the values.

    One encoding of the sample, by the portable kernels, has the relative error q. Each further encoding adds the same
    relative error to values and earlier errors. If the errors are independent, the final squared error is
    ``(1 + q²)**levels - 1`` times the squared values.

    Parameters
    ----------
    codec : Codec or None
        The codec.
    x : numpy.ndarray
        The values.
    levels : int
        Number of consecutive encodings.
    terms : int
        Number of arrays like ``x`` that are added.

    Returns
    -------
    float
        The estimate. Infinity without one: if there are too few values; if the sample has no error, since its sums may
        have one; without a codec; and for additive codecs, whose bound of one rounding is tight.
    """
    sample = x.reshape(-1)[:_SAMPLE]
    if codec is None or codec.additive or sample.size < _FEWEST:
        return math.inf
    dtype = sample.dtype.name
    coder = codec.coder(HostDevice(instruction_set=HostDevice.instruction_sets()[0]), dtype)
    decoded = np.empty_like(sample)
    wire = np.empty(coder.wire_nbytes(sample.size), np.uint8)
    nbytes = coder.encode(sample.size, HostDevice.flat(sample, dtype), (), wire)
    coder.decode(sample.size, None, (wire[:nbytes],), HostDevice.flat(decoded, dtype))
    values = sample.astype(np.float64)
    square, lost = float(np.mean(values**2)), float(np.mean((decoded - values) ** 2))
    return math.sqrt(terms * square * growth(lost / square, levels)) if lost > 0 else math.inf


def verify(
    case: Case,
    comm: MPI.Intracomm,
    x: Array,
    out: Array,
    allowed: ErrorBound,
    *,
    typical: float = math.inf,
    scale: float = 1.0,
    votes: bool = False,
) -> Verdict:
    """Compare a result with the reference, piece by piece. Collective.

    Parameters
    ----------
    case : Case
        The collective.
    comm : mpi4py.MPI.Intracomm
        The ranks.
    x, out : numpy.ndarray
        This rank's input and result, of shape (parts, m).
    allowed : ErrorBound
        The error bound of the result.
    typical : float
        The result of `typical_error`, without ``scale``.
    scale : float
        Factor of the result.
    votes : bool
        Whether the result is the sign of the sum of all ranks' signs.
    """
    from mpi4py import MPI

    # Squares of: differences, reference, differences inside the bound, expected differences. Then the numbers of
    # elements outside the bound, and of elements that differ between ranks.
    results = out.size if case.has_result(comm.rank) else 0
    sums = np.array([0.0, 0.0, 0.0, (scale * typical) ** 2 * results if results else 0.0, 0.0, 0.0])
    largest = np.zeros(2)  # differences, and magnitudes of the reference
    width = max(_SLICE // max(len(x), len(out)) // allowed.block, 1) * allowed.block
    for begin in range(0, x.shape[1], width):
        values = x[:, begin : begin + width].astype(np.float64)
        got = np.ascontiguousarray(out[:, begin : begin + width])
        reference = case.reference(comm, np.sign(values) if votes else values)
        reference = np.sign(reference) if votes else scale * reference
        bound = scale * spread_out(allowed, case.reference(comm, of_blocks(allowed, values)), values.shape[1])
        difference = np.abs(got.astype(np.float64) - reference)
        inside = difference <= bound  # False for NaN
        sums += [
            np.sum(difference**2),
            np.sum(reference**2),
            np.sum(difference[inside] ** 2),
            0.0,
            np.count_nonzero(~inside),
            _different(comm, got) if case.same_everywhere else 0,
        ]
        largest = np.maximum(largest, [np.max(difference), np.max(np.abs(reference))])
    comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
    comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    rounded = (4 * DTYPES[x.dtype.name].rounding) ** 2 * sums[1]
    if sums[2] > _SLACK**2 * (sums[3] + rounded):
        sums[4] = comm.allreduce(results)
    return Verdict(
        error=math.sqrt(_ratio(sums[0], sums[1])),
        error_max=_ratio(largest[0], largest[1]),
        outside=int(sums[4]),
        different=int(sums[5]) // comm.size,
    )


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else (0.0 if part == 0 else math.inf)


def verify_moved(case: Case, comm: MPI.Intracomm, x: Array, out: Array) -> Verdict:
    """Compare values that were only moved with MPI's own result, bit by bit. Collective."""
    expected = np.empty(out.shape, _bits(out).dtype)
    case.native(comm, _bits(x), expected)()
    return Verdict(0.0, 0.0, outside=comm.allreduce(int(np.count_nonzero(_bits(out) != expected))), different=0)


def _bits(values: Array) -> Array:
    """View numbers as unsigned integers of the same size."""
    bits: Array = values.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[values.itemsize])
    return bits


def _different(comm: MPI.Intracomm, got: Array) -> int:
    """Count elements that differ between ranks. Collective."""
    from mpi4py import MPI

    bits = _bits(got)
    low, high = np.empty_like(bits), np.empty_like(bits)
    comm.Allreduce(bits, low, MPI.MIN)
    comm.Allreduce(bits, high, MPI.MAX)
    return int(np.count_nonzero(low != high))
