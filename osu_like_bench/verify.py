"""Results held against a reference that MPI makes in float64.

Every element has a bound that holds for certain, but at low rates that is a wide one: a result of zeros would pass. So
the whole result has another, from what the codec loses on this very data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from compcoll.codecs import Codec
from compcoll.codecs.base import ErrorBound
from compcoll.devices.host import HostDevice
from compcoll.dtypes import DTYPES

from .bounds import growth, of_blocks, spread_out
from .cases import Case

Array = npt.NDArray[Any]

_SLICE = 1 << 18

_SAMPLE, _FEWEST, _SLACK = 1 << 20, 1 << 12, 3.0


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
    # Squares of differences, of the reference, and of differences inside the bound; elements outside, and different.
    sums = np.zeros(5)
    largest = np.zeros(2)  # differences, and magnitudes of the reference
    expected = np.array((scale * typical) ** 2 * out.size)
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
            np.count_nonzero(~inside),
            _different(comm, got) if case.same_everywhere else 0,
        ]
        largest = np.maximum(largest, [np.max(difference), np.max(np.abs(reference))])
    comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
    comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, expected, MPI.SUM)
    rounded = (4 * DTYPES[x.dtype.name].rounding) ** 2 * sums[1]
    if sums[2] > _SLACK**2 * (expected + rounded):
        sums[3] = out.size * comm.size
    return Verdict(
        error=math.sqrt(_ratio(sums[0], sums[1])),
        error_max=_ratio(largest[0], largest[1]),
        outside=int(sums[3]),
        different=int(sums[4]) // comm.size,
    )


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else (0.0 if part == 0 else math.inf)


def _different(comm: MPI.Intracomm, got: Array) -> int:
    """Elements that are not the same on all ranks."""
    bits = got.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[got.itemsize])
    low, high = np.empty_like(bits), np.empty_like(bits)
    comm.Allreduce(bits, low, MPI.MIN)
    comm.Allreduce(bits, high, MPI.MAX)
    return int(np.count_nonzero(low != high))
