"""Memory of the deferred device, and the host's kernels on it, launched on streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from compcoll.host.device import HostCoder
from compcoll.host.encode_options import PLAIN, EncodeOptions
from compcoll.host.quantizer import NumberCoder
from compcoll.host.selection import HostSelection
from compcoll.host.szp import SzpCoder as HostSzpCoder


class DeviceArray:
    """Device memory: it can be cut, and given to kernels and copies of its own device."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self.size, self.nbytes, self.itemsize = memory.size, memory.nbytes, memory.itemsize
        self.shape, self.dtype, self.ndim = memory.shape, memory.dtype, memory.ndim

    def __getitem__(self, part: slice) -> DeviceArray:
        return DeviceArray(self._memory[part])

    def __len__(self) -> int:
        return len(self._memory)

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self._memory.view(dtype))

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise AssertionError("the host touched device memory")

    __buffer__ = __setitem__ = __array__

    def __dlpack__(self, *, stream: int) -> DeviceArray:
        assert stream == -1, "the current stream of CuPy would be waited for"
        return self

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # CUDA's, as far as compcoll can tell


def memory_of(array: DeviceArray | np.ndarray | None) -> Any:
    """What only kernels, copies and an MPI that is GPU-aware may use."""
    return array._memory if isinstance(array, DeviceArray) else array


class Coder:
    """The host's kernels, launched on a stream."""

    fixed_size = True
    knows_decoded = False

    def __init__(self, runtime: Any, coder: HostCoder | HostSzpCoder | NumberCoder) -> None:
        self._runtime = runtime
        self._coder = coder
        self.wire_nbytes = coder.wire_nbytes

    def encode(self, n: int, add: Any, wires: Sequence[Any], wire: Any, how: EncodeOptions = PLAIN) -> int:
        how = how._replace(residual=memory_of(how.residual), decoded=memory_of(how.decoded))
        terms = [memory_of(term) for term in wires]
        self._runtime.launching.add(lambda: self._coder.encode(n, memory_of(add), terms, memory_of(wire), how))
        return self.wire_nbytes(n)

    def decode(self, n: int, add: Any, wires: Sequence[Any], out: Any, *, scale: float = 1.0) -> None:
        terms = [memory_of(term) for term in wires]
        self._runtime.launching.add(lambda: self._coder.decode(n, memory_of(add), terms, memory_of(out), scale=scale))


class SzpCoder(Coder):
    """The host's kernels of szp, launched on a stream. Encoding waits for the length of the wire."""

    fixed_size = False

    def encode(self, n: int, add: Any, wires: Sequence[Any], wire: Any, how: EncodeOptions = PLAIN) -> int:
        lengths: list[int] = []
        how = how._replace(residual=memory_of(how.residual), decoded=memory_of(how.decoded))
        terms, stream = [memory_of(term) for term in wires], self._runtime.launching
        stream.add(lambda: lengths.append(self._coder.encode(n, memory_of(add), terms, memory_of(wire), how)))
        assert stream.run_up_to(stream.added)
        return lengths[0]


class IntegerQuantizer:
    """The host's, launched on a stream."""

    gathered = None

    def __init__(self, runtime: Any, quantizer: Any) -> None:
        for name in (
            "shared_scale_dtype",
            "number_dtype",
            "per_value",
            "feedback",
            "is_sum",
            "shared_scale",
            "numbers",
        ):
            setattr(self, name, getattr(quantizer, name))
        for name in ("survey", "encode", "decode"):
            setattr(self, name, self._launched(runtime, getattr(quantizer, name)))

    @staticmethod
    def _launched(runtime: Any, work: Callable[..., None]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            arrays = [memory_of(argument) for argument in arguments]
            runtime.launching.add(lambda: work(*arrays))

        return launch


class Passes:
    """Kernels of sparsification, launched on a stream (the contract is `compcoll.gpu.selection.SelectionKernels`)."""

    def __init__(self, runtime: Any, selection: HostSelection) -> None:
        self._selection = selection
        for name in ("moments", "sample", "find", "take", "put", "add", "subtract"):
            setattr(self, name, IntegerQuantizer._launched(runtime, getattr(self, f"_{name}")))

    def _moments(self, values: np.ndarray, sums: np.ndarray) -> None:
        slots, block = 256 // values.itemsize, 65536 // values.itemsize
        padded = np.pad(np.where(np.isfinite(values), values, 0), (0, -values.size % block))
        of_lanes = padded.reshape(-1, block // slots, slots)
        rows = sums.reshape(-1, slots, 4)
        with np.errstate(over="ignore", under="ignore"):
            for place, terms in enumerate((of_lanes, np.abs(of_lanes), of_lanes * of_lanes)):
                rows[:, :, place] = np.add.accumulate(terms, axis=1)[:, -1]
        rows[:, :, 3] = np.abs(of_lanes).max(axis=1)

    def _sample(self, values: np.ndarray, sampled: np.ndarray) -> None:
        sampled[:] = self._selection.sample(values, sampled.size)

    def _find(
        self, values: Any, threshold: float, variances: Any, alpha: float, indices: np.ndarray, count: np.ndarray
    ) -> None:
        if variances is None:
            found = self._selection.above(values, threshold, values.size)[0]
        else:
            found = self._selection.unambiguous(values, variances, alpha, threshold)
        count[0] = found.size
        indices[: found.size] = found[: indices.size]

    def _take(self, values: np.ndarray, indices: np.ndarray, taken: np.ndarray) -> None:
        taken[:] = values[indices]

    def _put(self, indices: Any, values: Any, out: np.ndarray) -> None:
        out[slice(None) if indices is None else indices] = 0 if values is None else values

    def _add(self, indices: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
        self._selection.add(indices, values, out)

    def _subtract(self, indices: np.ndarray, sent: np.ndarray, out: np.ndarray) -> None:
        self._selection.subtract(indices, sent, out)
