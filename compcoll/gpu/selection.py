"""Sparsification of values in device memory (the contract is `compcoll.codecs.sparse.sparsifier.Selection`).

Kernels make the passes over whole buffers. The few selected indices and values are in host memory, and so are those
received from other ranks; wires are written and read there as for host arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..dtypes import DTYPES
from ..host.encode_options import EncodeOptions
from ..host.selection import HostSelection, Search
from ..kernels import _host
from ..pending import wait_for
from .coder import Launcher
from .launches import TILE_VALUES, Launch, grid_of, parameters
from .programs import program
from .streams import Timeline

Array = Any
HostArray = npt.NDArray[Any]

_INDEX = np.dtype(np.uint32)
_LANES_NBYTES, _BLOCK_NBYTES = 256, 65536  # bytes of values: `moment_lanes` and `moment_values` of kernels/sparse.h


class Passes(Protocol):
    """A device's asynchronous kernels on its arrays of float32 or float64."""

    def moments(self, values: Array, sums: Array) -> None:
        """Compute for each lane of each block, of the finite values: sum, absolute sum, sum of squares, largest."""

    def sample(self, values: Array, sampled: Array) -> None: ...

    def find(
        self, values: Array, threshold: float, variances: Array | None, alpha: float, indices: Array, count: Array
    ) -> None:
        """Store the first indices of values above a threshold (with ``variances``: unambiguous ones), and the count."""

    def take(self, values: Array, indices: Array, taken: Array) -> None: ...

    def put(self, indices: Array | None, values: Array | None, out: Array) -> None:
        """Store ``out[indices] = values``. No indices: store in all of ``out``. No values: store 0."""

    def add(self, indices: Array, values: Array, out: Array) -> None: ...

    def subtract(self, indices: Array, sent: Array, out: Array) -> None: ...


class SelectionKernels:
    """`Passes` by CUDA kernels. This class needs neither a GPU nor CuPy."""

    def __init__(self, launcher: Launcher, dtype: str) -> None:
        self._launcher = launcher
        self._program = program("sparse", dtype)
        self._dtype = dtype
        self._threshold_bits = (_host.Selection64 if dtype == "float64" else _host.Selection32).threshold_bits

    def moments(self, values: Array, sums: Array) -> None:
        blocks, grid = -(-values.nbytes // _BLOCK_NBYTES), grid_of(sums.size // 4)
        self._run(self._launch("moments", grid, values.size, sums, blocks=blocks, add=values))

    def sample(self, values: Array, sampled: Array) -> None:
        self._of_each("sample", sampled.size, sampled, add=values, position=values.size)

    def find(
        self, values: Array, threshold: float, variances: Array | None, alpha: float, indices: Array, count: Array
    ) -> None:
        tiles = -(-values.size // TILE_VALUES)
        grid = tiles, TILE_VALUES // 8
        counts = self._launcher.scratch(4 * tiles + tiles * TILE_VALUES // 8)
        met = counts + 4 * tiles  # a byte for each thread, so that values are read only once
        told: dict[str, Any] = {
            "add": values,
            "residual": variances,
            "residual_scale": alpha,
            "seed": self._threshold_bits(threshold),
        }
        self._run(
            self._launch("count", grid, values.size, counts, decoded=met, **told),
            self._launch("place", (1, TILE_VALUES // 8), tiles, counts, decoded=count),
            self._launch("compact", grid, values.size, indices, wires=(counts, met), position=indices.size),
        )

    def take(self, values: Array, indices: Array, taken: Array) -> None:
        self._of_each("take", taken.size, taken, add=values, wires=(indices,))

    def put(self, indices: Array | None, values: Array | None, out: Array) -> None:
        self._of_each("put", out.size if indices is None else indices.size, out, add=values, wires=(indices,))

    def add(self, indices: Array, values: Array, out: Array) -> None:
        self._of_each("add", indices.size, out, add=values, wires=(indices,))

    def subtract(self, indices: Array, sent: Array, out: Array) -> None:
        self._of_each("subtract", indices.size, out, add=sent, wires=(indices,))

    def _of_each(self, verb: str, n: int, out: Array, **told: Any) -> None:
        self._run(self._launch(verb, grid_of(n), n, out, **told))

    def _launch(
        self,
        verb: str,
        grid: tuple[int, int],
        n: int,
        out: Array,
        *,
        blocks: int = 0,
        add: Array | None = None,
        residual: Array | None = None,
        decoded: Array | int | None = None,
        wires: tuple[Array | int | None, ...] = (),
        **more: Any,
    ) -> Launch:
        arrays = {"add": add, "residual": residual, "decoded": decoded}
        addresses: dict[str, Any] = {name: self._address(array) for name, array in arrays.items()}
        told = parameters(
            n, blocks, self._address(out), wires=[self._address(wire) for wire in wires], **addresses, **more
        )
        return Launch(f"{verb}_sparse_{self._dtype}", *grid, 0, (told,))

    def _address(self, array: Array | int | None) -> int:
        return array if isinstance(array, int) else self._launcher.address(array)

    def _run(self, *launches: Launch) -> None:
        self._launcher.launch(self._program, launches)


class Exchange:
    """Device memory of one collective, and its copies to and from the host, in the collective's order.

    Parameters
    ----------
    timeline : Timeline
        The collective's timeline.
    take, pinned : callable
        Return device memory, and pinned host memory, of the given bytes.
    seconds : float
        Time limit of what is launched on the device.
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
        """Wait for the collective's preceding kernels, which are short, and copy an array to the host.

        Raises
        ------
        PeerTimeout
            If the kernels do not end in time.
        """
        copy: HostArray = self._pinned(array.nbytes).view(array.dtype)
        if copy.size:
            wait_for(self._timeline.fetch(array, copy), self._seconds, "the device has not ended what was launched")
        return copy

    def upload(self, array: HostArray) -> Array:
        staged, there = self._pinned(array.nbytes), self.room(array.size, array.dtype)
        if array.size:
            staged[:] = array.view(np.uint8)
            self._timeline.store(staged, there)
        return there


class DeviceSelection:
    """Selection in device buffers, for one collective. Samples and other small arrays are on the host and use its code.

    Parameters
    ----------
    host : HostSelection
        Selection on the host, for values of the same type.
    passes : Passes
        The device's kernels.
    cast : Coder
        Cast of the values to their own type, which multiplies and adds.
    exchange : Exchange
        The collective's memory and copies.
    """

    def __init__(self, host: HostSelection, passes: Passes, cast: Any, exchange: Exchange) -> None:
        self.dtype = host.dtype
        self._host, self._passes, self._cast, self._exchange = host, passes, cast, exchange
        self.wire_nbytes, self.write, self.read = host.wire_nbytes, host.write, host.read
        self.random, self.union, self.without, self.cuts = host.random, host.union, host.without, host.cuts
        self.finite, self.powers, self.merged = host.finite, host.powers, host.merged
        self.bisected = host.bisected

    def zeros(self, n: int) -> Array:
        values = self._exchange.room(n, self.dtype)
        self.clear(values)
        return values

    def clear(self, out: Array) -> None:
        if out.size:
            self._launching().put(None, None, out)

    def moments(self, values: Array) -> tuple[float, float, float, float]:
        if type(values) is np.ndarray or not values.size:
            return self._host.moments(values if type(values) is np.ndarray else np.empty(0, self.dtype))
        lanes = _LANES_NBYTES // self.dtype.itemsize
        sums = self._exchange.room(4 * lanes * -(-values.nbytes // _BLOCK_NBYTES), self.dtype)
        self._launching().moments(values, sums)
        rows = self._exchange.download(sums).reshape(-1, 4).astype(np.float64)
        total, absolute, square = np.cumsum(rows[:, :3], axis=0)[-1].tolist()  # in this order, as on the host
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
        return (self._exchange.download(indices[:count]) if count <= most else None), count

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
        return self._exchange.download(indices[:count])

    def _found(
        self, values: Array, threshold: float, variances: Array | None, alpha: float, capacity: int
    ) -> tuple[Array, int]:
        indices, count = self._exchange.room(capacity, _INDEX), self._exchange.room(1, _INDEX)
        if not values.size:
            return indices, 0
        self._launching().find(values, threshold, variances, alpha, indices, count)
        return indices, int(self._exchange.download(count)[0])

    # The host selects from buffers shorter than a sample, and if no threshold can be found.

    def kth_largest(self, values: Array, k: int) -> float:
        return self._host.kth_largest(self._fetched(values), k)

    def largest(self, values: Array, k: int) -> HostArray:
        return self._host.largest(self._fetched(values), k)

    def _fetched(self, values: Array) -> HostArray:
        return values if type(values) is np.ndarray else self._exchange.download(values)

    def sample(self, values: Array, m: int) -> HostArray:
        sampled = self._exchange.room(m, self.dtype)
        self._launching().sample(values, sampled)
        return self._exchange.download(sampled)

    def take(self, values: Array, indices: HostArray) -> HostArray:
        if type(values) is np.ndarray:
            return self._host.take(values, indices)
        taken = self._exchange.room(indices.size, self.dtype)
        if indices.size:
            there = self._exchange.upload(indices)
            self._launching().take(values, there, taken)
        return self._exchange.download(taken)

    def put(self, indices: HostArray, values: HostArray | None, out: Array) -> None:
        if indices.size:
            there, given = self._exchange.upload(indices), None if values is None else self._exchange.upload(values)
            self._launching().put(there, given, out)

    def add(self, indices: HostArray, values: HostArray, out: Array) -> None:
        if indices.size:
            there, given = self._exchange.upload(indices), self._exchange.upload(values)
            self._launching().add(there, given, out)

    def subtract(self, indices: HostArray, sent: HostArray, out: Array) -> None:
        if indices.size:
            there, given = self._exchange.upload(indices), self._exchange.upload(sent)
            self._launching().subtract(there, given, out)

    def multiply(self, values: Array, factor: float) -> None:
        self._cast.decode(values.size, values, (), values, scale=factor)

    def plus(self, target: Array, source: Array, factor: float = 1.0) -> None:
        source = self._exchange.upload(source) if type(source) is np.ndarray else source
        at = target.view(np.uint8)
        self._cast.encode(target.size, source, (at,), at, EncodeOptions(scale=factor))

    def _launching(self) -> Passes:
        self._exchange.launching()
        return self._passes


class SparseDevice:
    """Device for sparsifiers, for one collective.

    Parameters
    ----------
    device : CudaDevice
        Holds the buffers.
    host : HostDevice
        Holds the wires.
    exchange : Exchange
        The collective's memory and copies.
    """

    def __init__(self, device: Any, host: Any, exchange: Exchange) -> None:
        self._device, self._host, self._exchange = device, host, exchange
        self.empty_bytes, self.seal, self.sealed = host.empty_bytes, host.seal, host.sealed

    def selection(self, dtype: str) -> DeviceSelection:
        cast = self.coder(("cast", DTYPES[dtype].precision, 0), dtype)
        return DeviceSelection(self._host.selection(dtype), self._device.passes(dtype), cast, self._exchange)

    def coder(self, kernel: tuple[str, int, int], dtype: str) -> _InOrder:
        return _InOrder(self._device.coder(kernel, dtype), self._exchange)

    @staticmethod
    def as_bytes(x: Array) -> Array:
        return x.view(np.uint8)


class _InOrder:
    """A device's coder, launched in a collective's order.

    An encode may write a wire that it also adds: in casts each thread reads what it writes.
    """

    def __init__(self, coder: Any, exchange: Exchange) -> None:
        self._coder, self._exchange = coder, exchange

    def encode(self, *arguments: Any, **options: Any) -> None:
        self._exchange.launching()
        self._coder.encode(*arguments, **options)

    def decode(self, *arguments: Any, **options: Any) -> None:
        self._exchange.launching()
        self._coder.decode(*arguments, **options)
