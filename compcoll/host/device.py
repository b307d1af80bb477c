"""The host device: NumPy arrays and the C++ kernels. All calls are synchronous."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import config
from ..dtypes import DTYPES, HALVES, computed_on
from ..errors import InvalidBuffer, UnsupportedDType
from ..kernels import _host
from .arrays import load, store
from .encode_options import PLAIN, EncodeOptions
from .foreign import remedy
from .quantizer import Integers, NumberCoder, Votes
from .selection import HostSelection
from .szp import SzpCoder

Array = npt.NDArray[Any]

_CHECKSUM = struct.Struct("<I")
ndarray, empty = np.ndarray, np.empty

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError("compcoll's kernels need the GIL, which was switched off: unset PYTHON_GIL, or remove -X gil=0")


class HostCoder:
    """A codec's kernels bound to an element type; implements `compcoll.codecs.base.Coder`."""

    __slots__ = ("bound", "knows_decoded", "threads", "wire_nbytes")

    fixed_size = True

    def __init__(self, coder: Any, threads: int) -> None:
        self.bound = coder
        self.threads = threads
        self.wire_nbytes: Callable[[int], int] = coder.wire_nbytes
        self.knows_decoded: bool = coder.knows_decoded

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        self.bound.encode(
            n,
            add,
            how.scale,
            wires,
            how.residual,
            how.feed,
            how.residual_scale,
            how.rng_counter,
            how.position,
            wire,
            how.decoded,
            self.threads,
        )
        return self.wire_nbytes(n)

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        self.bound.decode(n, add, scale, wires, out, self.threads)

    def noted(self, program: _host.Program) -> HostCoder:
        """Return a coder whose calls are not executed but recorded in a program."""
        return HostCoder(_NotedKernels(program, self.bound), self.threads)


class _NotedKernels:
    """A replacement for a coder's kernels that records calls in a program."""

    def __init__(self, program: _host.Program, coder: _host.Coder) -> None:
        self.wire_nbytes, self.knows_decoded = coder.wire_nbytes, coder.knows_decoded
        self.encode = partial(program.encode, coder)
        self.decode = partial(program.decode, coder)


def _apart(x: Array, y: Array) -> bool:
    """Return True if different arrays own the memory of two arrays, a faster test than NumPy's for shared memory."""
    owner, other = (x if x.base is None else x.base), (y if y.base is None else y.base)
    return owner is not other and type(owner) is type(other) is ndarray and owner.base is other.base is None


class HostDevice:
    """Memory and kernels of the CPU.

    Parameters
    ----------
    threads : int
        Threads for each kernel.
    instruction_set : str, optional
        A name from `instruction_sets`; the best by default.
    """

    def __init__(self, threads: int = 1, instruction_set: str | None = None) -> None:
        self.threads = threads
        sets = self.instruction_sets()
        self.instruction_set = instruction_set or config.instruction_set(sets)
        self._set = sets.index(self.instruction_set)  # the kernels take the index
        self._names: dict[np.dtype[Any], str] = {dtype.numpy: name for name, dtype in DTYPES.items()}

    @property
    def name(self) -> str:
        """The name of the device in profiles."""
        return f"host {self.instruction_set}"

    @staticmethod
    def instruction_sets() -> list[str]:
        """Return the instruction sets that this CPU can run, slowest first."""
        return _host.instruction_sets()

    def coder(self, kernel: tuple[str, int, int], dtype: str, *, variant: int = 0, seed: int = 0) -> HostCoder:
        coder = _host.Coder(*kernel, variant, seed, DTYPES[dtype].precision, self._set)
        return HostCoder(coder, self.threads)

    def largest(self, x: Array, dtype: str) -> float:
        """Return the largest finite magnitude of an array."""
        values = load(x, dtype)
        return float(self.selection(values.dtype.name).moments(values)[3])

    def szp(self, dtype: str, tolerance: float | None, relative: float | None, ranks: int) -> SzpCoder:
        return SzpCoder(dtype, self._set, tolerance, relative, ranks)

    def selection(self, dtype: str) -> HostSelection:
        """Return the kernels of sparsification for values in float32 or float64."""
        return HostSelection(dtype == "float64", self._set)

    @staticmethod
    def seal(wire: Array) -> None:
        """Store the CRC-32C of a wire in its last 4 bytes."""
        _CHECKSUM.pack_into(wire.data, wire.nbytes - _CHECKSUM.size, _host.crc32c(wire[: -_CHECKSUM.size]))

    @staticmethod
    def sealed(wire: Array) -> bool:
        """Return whether the last 4 bytes of a wire are the CRC-32C of the bytes before."""
        (stored,) = _CHECKSUM.unpack_from(wire.data, wire.nbytes - _CHECKSUM.size)
        return bool(stored == _host.crc32c(wire[: -_CHECKSUM.size]))

    def integers(self, bits: int, levels: int, block: int, dtype: str) -> Integers:
        return Integers(bits, levels, block, dtype, self._set)

    def votes(self, ranks: int, block: int, dtype: str) -> Votes:
        return Votes(ranks, block, dtype, self._set)

    @staticmethod
    def number_coder(numbers: Array, op: str) -> NumberCoder:
        """Return a coder for numbers of this type that combines them by ``"sum"`` or ``"max"``."""
        return NumberCoder(numbers.dtype, op)

    def shared_sum(self, memory: Any, rank: int, ranks: int, dtype: str, scale: float) -> _host.SharedSum:
        """Return this rank's part of a sum through shared memory, of values times a scale."""
        raw = self.coder(("cast", DTYPES[dtype].precision, 0), dtype)
        return _host.SharedSum(memory, rank, ranks, raw.bound, scale)

    @staticmethod
    def check_readable(x: Any, what: str) -> None:
        """Raise `InvalidBuffer` unless ``x`` is a C-contiguous NumPy array in native byte order."""
        if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray | np.matrix):
            name = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            kinds = "a numpy.ndarray is needed, or an array with DLPack or the buffer protocol"
            raise InvalidBuffer(f"{what} is a {name}: {kinds}{remedy(x)}")
        if not x.flags.c_contiguous:
            raise InvalidBuffer(
                f"{what} of shape {x.shape} and strides {x.strides} is not C-contiguous: "
                "pass numpy.ascontiguousarray(...)"
            )
        if not x.dtype.isnative:
            raise InvalidBuffer(f"{what} has byte order {x.dtype.byteorder!r}: this machine's native one is needed")

    def buffers(self, x: Any, shape: tuple[int, ...] | None, out: Any) -> tuple[str, Array, Array, Array]:
        """Return the element type, flat input, result and flat result of a collective.

        The result has ``shape``, or the input's shape if ``shape`` is None. If input and result share memory, the flat
        result is the flat input. Flat arrays are views, or copies of arrays that are not aligned.
        """
        dtype = self._names.get(x.dtype) if type(x) is ndarray and x.flags.c_contiguous else None
        if dtype is None:
            self.check_readable(x, "x")
            dtype = self.dtype_name(x)
        if shape is None:
            shape = x.shape
        flat = self.flat(x, dtype)
        if out is None:
            out = np.empty(shape, x.dtype)
        elif not self.fits(out, x, shape):
            self.check_writable(out, x, shape)
            if np.may_share_memory(out, x):
                return dtype, flat, out, flat
        if out is x:
            return dtype, flat, out, flat
        return dtype, flat, out, self.flat(out, dtype)

    @staticmethod
    def fits(out: Any, x: Array, shape: tuple[int, ...]) -> bool:
        """Return True if a result buffer fits. If False, it may still fit: `check_writable` decides."""
        return (
            type(out) is ndarray
            and out.dtype is x.dtype
            and out.shape == shape
            and out.flags.carray
            and (out is x or _apart(x, out) or not np.may_share_memory(out, x))
        )

    @classmethod
    def check_writable(cls, out: Any, x: Array, shape: tuple[int, ...]) -> None:
        """Raise `InvalidBuffer` if a result buffer does not fit, is read-only, or partly overlaps the input."""
        cls.check_readable(out, "out")
        if out.shape != shape or out.dtype != x.dtype:
            raise InvalidBuffer(f"out is {out.dtype}{list(out.shape)}, but the result is {x.dtype}{list(shape)}")
        if not out.flags.writeable:
            raise InvalidBuffer("out is read-only")
        if np.may_share_memory(out, x) and (out.ctypes.data != x.ctypes.data or out.nbytes != x.nbytes):
            raise InvalidBuffer("out overlaps x without being x: give memory of its own")

    def dtype_name(self, x: Array) -> str:
        """Return the element type's name: "float32", "bfloat16", "int64" …"""
        name = self._names.get(x.dtype)
        if name is None:
            if x.dtype.kind not in "biufcV" or (x.dtype.kind == "V" and x.dtype != DTYPES["bfloat16"].numpy):
                raise UnsupportedDType(f"elements of type {x.dtype} cannot be sent: numbers are needed")
            name = self._names[x.dtype] = x.dtype.name
        return name

    @staticmethod
    def flat(x: Array, dtype: str) -> Array:
        """Return an array's memory as kernels take it: one-dimensional, 16-bit floats as uint16.

        An array that is not aligned is copied, since MPI does not accept it.
        """
        flat = x if x.ndim == 1 else x.ravel()  # a view, as from reshape, but three times as fast
        if not flat.flags.aligned:
            flat = flat.copy()
        return flat.view(np.uint16) if dtype in HALVES else flat

    @staticmethod
    def empty_like(x: Array, shape: tuple[int, ...]) -> Array:
        return np.empty(shape, x.dtype)

    @staticmethod
    def holds(array: Any) -> bool:
        """Return whether an array is in host memory."""
        return isinstance(array, np.ndarray)

    crc32c: Callable[[Array], int] = staticmethod(_host.crc32c)
    """Returns the CRC-32C of an array's bytes."""

    empty_bytes: Callable[[int], Array] = staticmethod(partial(np.empty, dtype=np.uint8))
    """Allocates a number of bytes."""

    @staticmethod
    def zeros_residual(n: int, dtype: str) -> Array:
        """Allocate a zero residual for ``n`` values: float64 for float64, else float32."""
        return np.zeros(n, computed_on(dtype).numpy)

    @staticmethod
    def copy(source: Array, target: Array) -> None:
        """Copy, unless they are the same array."""
        if target is not source:
            target[...] = source

    @staticmethod
    def for_mpi(x: Array, out: Array | None, dtype: str) -> tuple[Array, Array | None]:
        """Return the values, and memory for their sum, in a type that MPI can reduce: float32 for 16-bit floats.

        On ranks that get no sum, ``out`` is None, and there is no memory for it.
        """
        if dtype not in HALVES:
            return x, out
        return load(x, dtype), None if out is None else np.empty(out.size, np.float32)

    @staticmethod
    def from_mpi(sums: Array | None, out: Array | None, dtype: str, scale: float) -> None:
        """Multiply sums, in memory from `for_mpi`, by ``scale`` in their own type, and store them in ``out``."""
        if sums is None or out is None:
            return
        if scale != 1.0:
            np.multiply(sums, sums.dtype.type(scale), out=sums)
        if sums is not out:
            store(sums, out, dtype)
