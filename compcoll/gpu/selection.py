"""Sparsification of values in device memory (see `compcoll.host.selection.HostSelection`).

Kernels make the passes over whole buffers. Selected indices and values are few: they are in host memory, also those
received from other ranks. The host writes and reads wires, as for host arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..dtypes import DTYPES
from ..host.encode_options import EncodeOptions
from ..host.selection import HostSelection, Search
from ..kernels import _host
from ..pending import wait_for
from .launches import TILE_VALUES, Launch, Parameters, grid_of
from .programs import program
from .streams import Timeline

if TYPE_CHECKING:
    from .runtime import CudaRuntime

Array = Any
HostArray = npt.NDArray[Any]

_INDEX = np.dtype(np.uint32)
_LANES_NBYTES, _BLOCK_NBYTES = 256, 65536  # bytes of values: `moment_lanes` and `moment_values` of kernels/sparse.h


class SelectionKernels:
    """CUDA kernels on arrays of float32 or float64. This class needs neither a GPU nor CuPy."""

    def __init__(self, runtime: CudaRuntime, dtype: str) -> None:
        self._runtime = runtime
        self._program = program("sparse", dtype)
        self._dtype = dtype
        self._threshold_bits = (_host.Selection64 if dtype == "float64" else _host.Selection32).threshold_bits

    def moments(self, values: Array, sums: Array) -> None:
        """Store for each lane of each block the finite values' sum, absolute sum, sum of squares and largest."""
        blocks, grid = -(-values.nbytes // _BLOCK_NBYTES), grid_of(sums.size // 4)
        self._run(self._launch("moments", grid, values.size, sums, blocks=blocks, add=values))

    def sample(self, values: Array, sampled: Array) -> None:
        self._of_each("sample", sampled.size, sampled, add=values, position=values.size)

    def find(
        self, values: Array, threshold: float, variances: Array | None, alpha: float, indices: Array, count: Array
    ) -> None:
        """Store the indices of values above a threshold, and their count. With ``variances``, find unambiguous values.

        If there are more indices than ``indices`` holds, only the first are stored.
        """
        tiles = -(-values.size // TILE_VALUES)
        grid = tiles, TILE_VALUES // 8
        counts = self._runtime.scratch(4 * tiles + tiles * TILE_VALUES // 8)
        met = counts + 4 * tiles  # a byte per thread with the comparisons' results, so that values are read only once
        told: dict[str, Any] = {"residual": variances, "residual_scale": alpha, "seed": self._threshold_bits(threshold)}
        self._run(
            self._launch("count", grid, values.size, counts, decoded=met, add=values, **told),
            self._launch("place", (1, TILE_VALUES // 8), tiles, counts, decoded=count),
            self._launch("compact", grid, values.size, indices, (counts, met), position=indices.size),
        )

    def take(self, values: Array, indices: Array, taken: Array) -> None:
        self._of_each("take", taken.size, taken, (indices,), add=values)

    def put(self, indices: Array | None, values: Array | None, out: Array) -> None:
        """Store ``out[indices] = values``. Indices of None mean all of ``out``, and values of None mean 0."""
        self._of_each("put", out.size if indices is None else indices.size, out, (indices,), add=values)

    def add(self, indices: Array, values: Array, out: Array) -> None:
        self._of_each("add", indices.size, out, (indices,), add=values)

    def subtract(self, indices: Array, sent: Array, out: Array) -> None:
        self._of_each("subtract", indices.size, out, (indices,), add=sent)

    def _of_each(self, verb: str, n: int, out: Array, wires: Sequence[Array | None] = (), **told: Any) -> None:
        self._run(self._launch(verb, grid_of(n), n, out, wires, **told))

    def _launch(
        self, verb: str, grid: tuple[int, int], n: int, out: Any, wires: Sequence[Any] = (), **told: Any
    ) -> Launch:
        """Describe a launch. Arguments may be numbers, or arrays, which become pointers."""
        pointers = {name: self._number(given) for name, given in told.items()}
        parameters = Parameters(n, out=self._number(out), wires=[self._number(wire) for wire in wires], **pointers)
        return Launch(f"{verb}_sparse_{self._dtype}", *grid, parameters.packed())

    def _number(self, given: Any) -> Any:
        return given if isinstance(given, (int, float)) else self._runtime.address(given)

    def _run(self, *launches: Launch) -> None:
        self._runtime.launch(self._program, launches)


class StagedCopies:
    """Copies between the host and a collective's device memory, through pinned memory, in the collective's order.

    Parameters
    ----------
    timeline : Timeline
        The collective's timeline.
    take, pinned : callable
        Take a number of bytes, and return device memory and pinned host memory.
    seconds : float
        Time limit for kernels that the host waits for.
    """

    def __init__(
        self, timeline: Timeline, take: Callable[[int], Array], pinned: Callable[[int], HostArray], seconds: float
    ) -> None:
        self._timeline = timeline
        self._take = take
        self._pinned = pinned
        self._seconds = seconds

    def launching(self) -> None:
        """Order the next kernels after the caller's work and after each other."""
        self._timeline.encoding((), of_result=False)

    def room(self, n: int, dtype: npt.DTypeLike) -> Array:
        return self._take(n * np.dtype(dtype).itemsize).view(dtype)

    def download(self, array: Array) -> HostArray:
        """Copy an array to the host, after waiting for the collective's earlier kernels, which are short.

        Raises
        ------
        PeerTimeout
            If the kernels do not end in time.
        """
        copy: HostArray = self._pinned(array.nbytes).view(array.dtype)
        if copy.size:
            wait_for(self._timeline.fetch(array, copy), self._seconds, "the device has not finished its kernels")
        return copy

    def upload(self, array: HostArray) -> Array:
        staged, there = self._pinned(array.nbytes), self.room(array.size, array.dtype)
        if array.size:
            staged[:] = array.view(np.uint8)
            self._timeline.store(staged, there)
        return there


class DeviceSelection:
    """Selection in device buffers, for one collective. Samples and other small arrays stay on the host.

    Parameters
    ----------
    host : HostSelection
        Selection on the host, for values of the same type.
    passes : SelectionKernels
        The device's kernels.
    cast : Coder
        Casts values to their own type. It is used to multiply and add.
    copies : StagedCopies
        The collective's memory and copies.
    """

    def __init__(self, host: HostSelection, passes: SelectionKernels, cast: Any, copies: StagedCopies) -> None:
        self.dtype = host.dtype
        self._host, self._passes, self._cast, self._copies = host, passes, cast, copies
        self.wire_nbytes, self.write, self.read = host.wire_nbytes, host.write, host.read
        self.random, self.union, self.without, self.cuts = host.random, host.union, host.without, host.cuts
        self.finite, self.powers, self.merged = host.finite, host.powers, host.merged
        self.bisected = host.bisected

    def zeros(self, n: int) -> Array:
        values = self._copies.room(n, self.dtype)
        self.clear(values)
        return values

    def clear(self, out: Array) -> None:
        if out.size:
            self._launching().put(None, None, out)

    def moments(self, values: Array) -> tuple[float, float, float, float]:
        if type(values) is np.ndarray or not values.size:
            return self._host.moments(values if type(values) is np.ndarray else np.empty(0, self.dtype))
        lanes = _LANES_NBYTES // self.dtype.itemsize
        sums = self._copies.room(4 * lanes * -(-values.nbytes // _BLOCK_NBYTES), self.dtype)
        self._launching().moments(values, sums)
        rows = self._copies.download(sums).reshape(-1, 4).astype(np.float64)
        total, absolute, square = np.cumsum(rows[:, :3], axis=0)[-1].tolist()  # rows are added in the host's order
        return total, absolute, square, float(rows[:, 3].max())

    def laplacian(
        self, values: Array, m: int, density: float, quantile: float
    ) -> tuple[float, float, float, float, float]:
        moments = self.moments(values) if m == values.size else self._host.moments(self.sample(values, m))
        return self._host.fitted(moments, m, density, quantile)

    def count(self, values: Array, threshold: float) -> int:
        return (
            self._host.count(values, threshold) if type(values) is np.ndarray else self.above(values, threshold, 0)[1]
        )

    def above(self, values: Array, threshold: float, most: int) -> tuple[HostArray | None, int]:
        if type(values) is np.ndarray:
            return self._host.above(values, threshold, most)
        indices, count = self._found(values, threshold, None, 1.0, min(values.size, most))
        return (self._copies.download(indices[:count]) if count <= most else None), count

    def chosen(self, values: Array, search: Search, room: int) -> tuple[HostArray | None, int]:
        k, most, threshold, *_ = search
        found, above = self.above(values, threshold, room)
        if found is None or above < k:
            return None, above
        if above > most:
            found = found[: self._host.narrowed(self.take(values, found), search, found)]
        return found, above

    def unambiguous(self, values: Array, variances: Array, alpha: float, threshold: float) -> HostArray:
        indices, count = self._found(values, threshold, variances, alpha, values.size // 16)
        if count > indices.size:
            indices, count = self._found(values, threshold, variances, alpha, count)
        return self._copies.download(indices[:count])

    def _found(
        self, values: Array, threshold: float, variances: Array | None, alpha: float, capacity: int
    ) -> tuple[Array, int]:
        indices, count = self._copies.room(capacity, _INDEX), self._copies.room(1, _INDEX)
        if not values.size:
            return indices, 0
        self._launching().find(values, threshold, variances, alpha, indices, count)
        return indices, int(self._copies.download(count)[0])

    # The host selects values if the buffer is shorter than a sample, or if no threshold is found.

    def kth_largest(self, values: Array, k: int) -> float:
        return self._host.kth_largest(self._fetched(values), k)

    def largest(self, values: Array, k: int) -> HostArray:
        return self._host.largest(self._fetched(values), k)

    def _fetched(self, values: Array) -> HostArray:
        return values if type(values) is np.ndarray else self._copies.download(values)

    def sample(self, values: Array, m: int) -> HostArray:
        sampled = self._copies.room(m, self.dtype)
        self._launching().sample(values, sampled)
        return self._copies.download(sampled)

    def take(self, values: Array, indices: HostArray) -> HostArray:
        if type(values) is np.ndarray:
            return self._host.take(values, indices)
        taken = self._copies.room(indices.size, self.dtype)
        if indices.size:
            there = self._copies.upload(indices)
            self._launching().take(values, there, taken)
        return self._copies.download(taken)

    def put(self, indices: HostArray, values: HostArray | None, out: Array) -> None:
        self._combine(self._passes.put, indices, values, out)

    def add(self, indices: HostArray, values: HostArray, out: Array) -> None:
        self._combine(self._passes.add, indices, values, out)

    def subtract(self, indices: HostArray, sent: HostArray, out: Array) -> None:
        self._combine(self._passes.subtract, indices, sent, out)

    def _combine(self, launch: Callable[..., None], indices: HostArray, values: HostArray | None, out: Array) -> None:
        if indices.size:
            there, given = self._copies.upload(indices), None if values is None else self._copies.upload(values)
            self._copies.launching()
            launch(there, given, out)

    def multiply(self, values: Array, factor: float) -> None:
        self._cast.decode(values.size, values, (), values, scale=factor)

    def plus(self, target: Array, source: Array, factor: float = 1.0) -> None:
        source = self._copies.upload(source) if type(source) is np.ndarray else source
        at = target.view(np.uint8)
        self._cast.encode(target.size, source, (at,), at, EncodeOptions(scale=factor))

    def _launching(self) -> SelectionKernels:
        self._copies.launching()
        return self._passes


class SparseDevice:
    """Device for sparsifiers, for one collective.

    Parameters
    ----------
    device : CudaDevice
        Holds the buffers.
    host : HostDevice
        Holds the wires.
    copies : StagedCopies
        The collective's memory and copies.
    """

    def __init__(self, device: Any, host: Any, copies: StagedCopies) -> None:
        self._device, self._host, self._copies = device, host, copies
        self.empty_bytes, self.seal, self.sealed = host.empty_bytes, host.seal, host.sealed

    def selection(self, dtype: str) -> DeviceSelection:
        cast = self.coder(("cast", DTYPES[dtype].precision, 0), dtype)
        return DeviceSelection(self._host.selection(dtype), self._device.passes(dtype), cast, self._copies)

    def coder(self, kernel: tuple[str, int, int], dtype: str) -> _InOrder:
        return _InOrder(self._device.coder(kernel, dtype), self._copies)


class _InOrder:
    """A device's coder whose kernels run in a collective's order.

    A cast may encode to a wire that it also adds, since each thread reads only the bytes that it writes.
    """

    def __init__(self, coder: Any, copies: StagedCopies) -> None:
        self._coder, self._copies = coder, copies

    def encode(self, *arguments: Any, **options: Any) -> None:
        self._copies.launching()
        self._coder.encode(*arguments, **options)

    def decode(self, *arguments: Any, **options: Any) -> None:
        self._copies.launching()
        self._coder.decode(*arguments, **options)
