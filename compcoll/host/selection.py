"""Selection and sparse wires in host memory; implements `compcoll.codecs.sparse.sparsifier.Selection`."""

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
    """The CPU's kernels for buffers of float32 or float64.

    Parameters
    ----------
    wide : bool
        Whether values are float64.
    instruction_set : int
        Index of one of the device's instruction sets.
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
        values *= factor

    def plus(self, target: Array, source: Array, factor: float = 1.0) -> None:
        target += source if factor == 1.0 else source * factor

    def put(self, indices: Array, values: Array | None, out: Array) -> None:
        out[indices] = 0 if values is None else values

    def above(self, values: Array, threshold: float, most: int) -> tuple[Array | None, int]:
        indices = np.empty(min(values.size, most) + _SLACK, np.uint32)
        count = self._kernels.compact(values, threshold, indices)
        return (indices[:count] if count <= most else None), count

    def unambiguous(self, values: Array, variances: Array, alpha: float, threshold: float) -> Array:
        indices = np.empty(values.size // 16 + _SLACK, np.uint32)
        count = self._kernels.unambiguous(values, variances, alpha, threshold, indices)
        if count > indices.size:
            indices = np.empty(count, np.uint32)
            self._kernels.unambiguous(values, variances, alpha, threshold, indices)
        return indices[:count]

    def largest(self, values: Array, k: int) -> Array:
        positions = np.empty(values.size, np.uint32)
        return positions[: self._kernels.largest(values, k, positions)]

    def chosen(self, values: Array, search: Search, room: int) -> tuple[Array | None, int]:
        indices = np.empty(min(values.size, room) + _SLACK, np.uint32)
        count, above = self._kernels.choose(values, search, room, indices)
        return (indices[:count] if count else None), above

    def sample(self, values: Array, m: int) -> Array:
        sampled = np.empty(m, self.dtype)
        self._kernels.sample(values, sampled)
        return sampled

    def take(self, values: Array, indices: Array) -> Array:
        taken: Array = values.take(indices)
        return taken

    def random(self, n: int, k: int, key: int) -> Array:
        indices = np.empty(k, np.uint32)
        _host.random_indices(n, key, indices)
        return indices

    def union(self, first: Array, second: Array) -> Array:
        return np.union1d(first, second) if second.size else first

    def powers(self, values: Array, largest: float = 0.0) -> tuple[Array, int]:
        kept = np.empty(values.size, np.uint32)
        count, top = self._kernels.powers(values, largest, kept)
        return kept[:count], top

    def finite(self, values: Array) -> bool:
        return bool(np.isfinite(values).all())

    def read(self, wire: Array, n: int) -> tuple[Array, Array]:
        try:
            count = self._kernels.read_count(wire, n)
            indices, values = np.empty(count, np.uint32), np.empty(count, self.dtype)
            self._kernels.read(wire, n, indices, values)
        except ValueError as error:
            raise WireCorrupted(f"a sparse wire of {wire.size} bytes for {n} elements: {error}") from None
        return indices, values

    def without(self, n: int, positions: Array) -> Array:
        others = np.ones(n, np.bool_)
        others[positions] = False
        return np.flatnonzero(others)

    def merged(self, parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
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
