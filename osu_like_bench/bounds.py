"""How far a result may be from the exact one, for a codec and the encodings on the way, and whether it is.

An encoding loses at most ``relative`` times the largest magnitude in its block, plus ``spread`` times the difference of
its largest and smallest value, plus ``absolute``. Losses of the values that enter a sum add up: with M the sum of all
ranks' largest magnitudes in a block, no partial sum exceeds M, so that every level of encodings adds at most the
loss of M and of the losses before it.

`verify` compares a result with a reference that MPI makes in float64. The bound of an element holds for certain, but at
low rates it is so wide that a result of zeros would pass. So the whole result has another bound, from what the codec
loses on this very data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compcoll.algorithms import ALGORITHMS
from compcoll.algorithms.record import NEVER, Encodings
from compcoll.codecs import Codec, IntSum, Sign
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
    steps = max(2 * (size - 1), 1)  # others' algorithms may round values of a single rank, too
    return Encodings(steps, steps)


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


@dataclass(frozen=True)
class Verdict:
    """The quality of a result, over all ranks.

    Attributes
    ----------
    error : float
        Root mean square of the difference to the reference, by that of the reference.
    error_max : float
        Largest difference, by the reference's largest magnitude.
    outside : int
        Elements farther from the reference than they may be, not-a-number too; all, if the error is larger than what
        the codec loses on such data would explain.
    different : int
        Elements whose bits are not the same on all ranks though the collective gives all the same.
    """

    error: float
    error_max: float
    outside: int
    different: int


def typical_error(codec: Codec | None, x: Array, levels: int, terms: int) -> float:
    """Root mean square of the error to be expected of a result, from what the codec loses on a sample of some values.

    One encoding, by the portable kernels, loses a part q of the values; the next one as much of values and losses. With
    independent losses that are ``(1 + q²)**levels - 1`` of the values' squares in the end.

    Parameters
    ----------
    codec : Codec or None
        What encodes.
    x : numpy.ndarray
        The values.
    levels : int
        Encodings one after the other.
    terms : int
        How many such arrays are added.

    Returns
    -------
    float
        Infinity if that cannot be told: of few values, of values that lose nothing though their sums may, or of
        additive codecs, which encode nothing but what all ranks agree on; their bound is that of one rounding.
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
    """Hold a result against the reference, piece by piece.

    Parameters
    ----------
    case : Case
        The collective.
    comm : mpi4py.MPI.Intracomm
        The ranks.
    x, out : numpy.ndarray
        This rank's input and result, of shape (parts, m).
    allowed : ErrorBound
        How far the result may be from the reference.
    typical : float
        Root mean square of all losses that enter one value of this rank's result, before ``scale``.
    scale : float
        Factor of the result.
    votes : bool
        Tell whether each rank adds the signs of its values, and the result is the sign of that sum.
    """
    from mpi4py import MPI

    # Squares of differences, of the reference, of differences inside the bound, and of those to be expected; elements
    # outside, and different.
    sums = np.array([0.0, 0.0, 0.0, (scale * typical) ** 2 * out.size, 0.0, 0.0])
    largest = np.zeros(2)  # differences, and magnitudes of the reference
    width = max(_SLICE // max(len(x), len(out)) // allowed.block, 1) * allowed.block
    for begin in range(0, x.shape[1], width):
        values = x[:, begin : begin + width].astype(np.float64)
        got = np.ascontiguousarray(out[:, begin : begin + width])
        reference = case.reference(comm, np.sign(values) if votes else values)
        reference = np.sign(reference) if votes else scale * reference
        bound = scale * spread_out(allowed, case.reference(comm, of_blocks(allowed, values)), values.shape[1])
        difference = np.abs(got.astype(np.float64) - reference)
        inside = difference <= bound  # not-a-number is not
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
        sums[4] = out.size * comm.size
    return Verdict(
        error=math.sqrt(_ratio(sums[0], sums[1])),
        error_max=_ratio(largest[0], largest[1]),
        outside=int(sums[4]),
        different=int(sums[5]) // comm.size,
    )


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else (0.0 if part == 0 else math.inf)


def verify_moved(case: Case, comm: MPI.Intracomm, x: Array, out: Array) -> Verdict:
    """Compare values that were only moved with MPI's own result, bit by bit."""
    expected = np.empty(out.shape, _bits(out).dtype)
    case.native(comm, _bits(x), expected)()
    return Verdict(0.0, 0.0, outside=comm.allreduce(int(np.count_nonzero(_bits(out) != expected))), different=0)


def _bits(values: Array) -> Array:
    """View numbers as unsigned integers of their size."""
    bits: Array = values.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[values.itemsize])
    return bits


def _different(comm: MPI.Intracomm, got: Array) -> int:
    """Count elements that are not the same on all ranks."""
    from mpi4py import MPI

    bits = _bits(got)
    low, high = np.empty_like(bits), np.empty_like(bits)
    comm.Allreduce(bits, low, MPI.MIN)
    comm.Allreduce(bits, high, MPI.MAX)
    return int(np.count_nonzero(low != high))
