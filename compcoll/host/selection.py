"""Selection and sparse wires in host memory; `compcoll.gpu.selection` has the same methods for device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import WireCorrupted
from ..kernels import _host

Array = npt.NDArray[Any]

Search = tuple[int, int, float, float, float, float]
"""A search for k to ``most`` values: (k, most, threshold, tail, scale, aim).

If more than ``most`` are above ``threshold``, a higher threshold below ``tail`` is searched. The first trial is where
an exponential tail with ``scale`` would have ``aim`` values.
"""

_SLACK = 128  # more than a stride and a vector, so that the fast path can write in place


class HostSelection:
    """Kernels for buffers in the type of computation: float64 for float64, else float32.

    All arrays are in host memory. Thresholds apply to magnitudes; NaN and Inf are above every finite threshold.

    Parameters
    ----------
    wide : bool
        Whether values are float64.
    instruction_set : int
        Index of one of the device's instruction sets.

    Attributes
    ----------
    dtype : dtype
        Element type of the values.
    count : callable
        Counts the ``values`` above the ``threshold``.
    moments : callable
        Returns the sum, sum of magnitudes, sum of squares, and largest magnitude of the finite ``values``.
    laplacian : callable
        Fits a Laplacian distribution to the moments of a sample of ``m`` of the ``values``, or of all. Returns five
        numbers: the threshold ``b · ln(cosh(μ/b) / η)`` that a fraction ``density`` (η) of the values exceeds; ``|μ|``;
        the largest magnitude of the sample; the length b in which the tail falls to 1/e at the threshold; and the
        threshold of a zero-mean normal distribution, from its ``quantile``. If the mean magnitude indicates a normal
        distribution, the two thresholds change places, and the length is that of the normal distribution's tail.
    bisected : callable
        Returns a threshold between ``head`` and ``tail`` that ``low`` to ``high`` values of a ``sample`` exceed. Tries
        ``first``, then ``second`` if that lies in the remaining interval, then bisection; None if it finds none.
    kth_largest : callable
        Returns the ``k``-th largest magnitude of the ``values``.
    wire_nbytes, write : callable
        Both return the bytes of the wire for some elements out of ``n``; ``write`` also stores it in ``wire``.
    add, subtract, clear : callable
        Work in place: ``out[indices] += values``; ``out[indices] -= sent``, or 0 if the result is not finite;
        ``out = 0``.
    """

    def __init__(self, wide: bool, instruction_set: int) -> None:
        self.dtype: Any = np.dtype(np.float64 if wide else np.float32)
        self._kernels = (_host.Selection64 if wide else _host.Selection32)(instruction_set)
        self.count = self._kernels.count
        self.moments = self._kernels.moments
        self.laplacian = self._kernels.laplacian
        self.fitted = self._kernels.fitted
        self.bisected = self._kernels.bisected
        self.narrowed = self._kernels.narrowed
        self.kth_largest = self._kernels.kth_largest
        self.wire_nbytes = self._kernels.wire_nbytes
        self.write = self._kernels.write
        self.add = self._kernels.add
        self.clear = self._kernels.clear
        self.subtract = self._kernels.subtract

    def zeros(self, n: int) -> Array:
        return np.zeros(n, self.dtype)

    def multiply(self, values: Array, factor: float) -> None:
        """Multiply in place: ``values *= factor``."""
        values *= factor

    def plus(self, target: Array, source: Array, factor: float = 1.0) -> None:
        """Add in place: ``target += source · factor``."""
        target += source if factor == 1.0 else source * factor

    def put(self, indices: Array, values: Array | None, out: Array) -> None:
        """Store ``out[indices] = values``, or 0 if ``values`` is None."""
        out[indices] = 0 if values is None else values

    def above(self, values: Array, threshold: float, most: int) -> tuple[Array | None, int]:
        """Return the ascending indices of values above a threshold (None if more than ``most``), and their number."""
        indices = np.empty(min(values.size, most) + _SLACK, np.uint32)
        count = self._kernels.compact(values, threshold, indices)
        return (indices[:count] if count <= most else None), count

    def unambiguous(self, values: Array, variances: Array, alpha: float, threshold: float) -> Array:
        """Return the indices of values r with ``|r| > threshold`` and ``r² > alpha · v``, or that are not finite."""
        indices = np.empty(values.size // 16 + _SLACK, np.uint32)
        count = self._kernels.unambiguous(values, variances, alpha, threshold, indices)
        if count > indices.size:
            indices = np.empty(count, np.uint32)
            self._kernels.unambiguous(values, variances, alpha, threshold, indices)
        return indices[:count]

    def largest(self, values: Array, k: int) -> Array:
        """Return the indices of the k largest magnitudes: never zeros, always NaN and Inf, the first of equal ones."""
        positions = np.empty(values.size, np.uint32)
        return positions[: self._kernels.largest(values, k, positions)]

    def chosen(self, values: Array, search: Search, room: int) -> tuple[Array | None, int]:
        """Return the indices of k to ``most`` values, and the number above the first threshold, in one pass.

        If more than ``most`` values are above the first threshold, a higher threshold is searched. If none is found,
        return all indices above the first. The indices are None if fewer than k or more than ``room`` values are above
        the first.
        """
        indices = np.empty(min(values.size, room) + _SLACK, np.uint32)
        count, above = self._kernels.choose(values, search, room, indices)
        return (indices[:count] if count else None), above

    def sample(self, values: Array, m: int) -> Array:
        """Return a stratified sample of m values, a multiple of 16, in runs of 16 consecutive values."""
        sampled = np.empty(m, self.dtype)
        self._kernels.sample(values, sampled)
        return sampled

    def take(self, values: Array, indices: Array) -> Array:
        taken: Array = values.take(indices)
        return taken

    def random(self, n: int, k: int, key: int) -> Array:
        """Return the ascending indices of k random elements out of n."""
        indices = np.empty(k, np.uint32)
        _host.random_indices(n, key, indices)
        return indices

    def union(self, first: Array, second: Array) -> Array:
        """Return the indices that are in either array, ascending."""
        return np.union1d(first, second) if second.size else first

    def powers(self, values: Array, largest: float = 0.0) -> tuple[Array, int]:
        """Return the positions of values that have a power code (4 bits: sign, exponent), and the codes' top exponent.

        This is the exponent of ``largest``, or of the largest value if that is larger.
        """
        kept = np.empty(values.size, np.uint32)
        count, top = self._kernels.powers(values, largest, kept)
        return kept[:count], top

    def finite(self, values: Array) -> bool:
        """Return whether all values are finite."""
        return bool(np.isfinite(values).all())

    def read(self, wire: Array, n: int) -> tuple[Array, Array]:
        """Return the indices and values of a wire; raise `WireCorrupted` if it is no wire of n elements."""
        try:
            count = self._kernels.read_count(wire, n)
            indices, values = np.empty(count, np.uint32), np.empty(count, self.dtype)
            self._kernels.read(wire, n, indices, values)
        except ValueError as error:
            raise WireCorrupted(f"a sparse wire of {wire.size} bytes for {n} elements: {error}") from None
        return indices, values

    def without(self, n: int, positions: Array) -> Array:
        """Return all positions below n except these."""
        others = np.ones(n, np.bool_)
        others[positions] = False
        return np.flatnonzero(others)

    def merged(self, parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Return the sum of sparse vectors, added in their order, as indices and values."""
        total = sum(part[0].size for part in parts)
        sums, others = ((np.empty(total, np.uint32), np.empty(total, self.dtype)) for _ in range(2))
        count = 0
        for indices, values in parts:
            count = self._kernels.merge(sums[0][:count], sums[1][:count], indices, values, *others)
            sums, others = others, sums
        return sums[0][:count], sums[1][:count]

    def cuts(self, indices: Array, bounds: list[int]) -> list[int]:
        """Count the indices that lie below each bound."""
        return [int(place) for place in np.searchsorted(indices, np.asarray(bounds, np.uint64))]
