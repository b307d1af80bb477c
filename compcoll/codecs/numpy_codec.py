"""Codecs in plain NumPy: the author writes two methods, and this module adds all that collectives need."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import computed_on
from ..errors import CodecError, WireCorrupted
from ..host.arrays import load, store, store_residual
from ..host.encode_options import PLAIN, EncodeOptions
from .base import Array, Codec, Coder, Device

Values = npt.NDArray[Any]

_ENCODED, _RAW = 0, 1
_HEADER = 1


class NumpyCoder:
    """A `compcoll.codecs.base.Coder` for host memory, made of two functions on NumPy arrays.

    The wire is one byte, then the bytes that ``encode`` returned (0) or the raw values (1). Raw values are sent if some
    are not finite or if the encoded bytes would be longer. The functions never get an empty array.

    Parameters
    ----------
    dtype : str
        Element type of the buffers. The functions get float64 for float64, else float32.
    encode : callable
        Takes an array, read-only, and `EncodeOptions`, and returns bytes.
    decode : callable
        Takes these bytes, a number of values and their type, and returns the array.
    """

    fixed_size = False
    knows_decoded = False

    def __init__(
        self,
        dtype: str,
        encode: Callable[[Values, EncodeOptions], bytes],
        decode: Callable[[bytes, int, np.dtype[Any]], Values],
    ) -> None:
        self._dtype = dtype
        self._computed = computed_on(dtype).numpy
        self._encoded, self._decoded = encode, decode

    def wire_nbytes(self, n: int) -> int:
        return _HEADER + n * self._computed.itemsize

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        values = self._sum(n, add, wires, how.scale)
        if how.residual is not None and how.feed:
            values = values + how.residual
        values = values.view()
        values.flags.writeable = False
        length = self._write(values, wire, how)
        if how.residual is None and how.decoded is None:
            return length
        got = self._read(n, wire[:length])
        if how.residual is not None:
            store_residual(values, got, how)
        if how.decoded is not None:
            store(got, how.decoded, self._dtype)
        return length

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        store(self._sum(n, add, wires, scale), out, self._dtype)

    def _sum(self, n: int, add: Array | None, wires: Sequence[Array], scale: float) -> Values:
        terms = [load(add, self._dtype) * self._computed.type(scale)] if add is not None else []
        terms += [self._read(n, wire) for wire in wires]
        total: Values = terms[0]
        with np.errstate(over="ignore", invalid="ignore"):
            for term in terms[1:]:
                total = total + term
        return total

    def _write(self, values: Values, wire: Array, how: EncodeOptions) -> int:
        encoded = self._encoded(values, how) if values.size and np.isfinite(values).all() else None
        if encoded is None or len(encoded) > values.nbytes:
            wire[0], encoded = _RAW, values.tobytes()
        else:
            wire[0] = _ENCODED
        length = _HEADER + len(encoded)
        wire[_HEADER:length] = np.frombuffer(encoded, np.uint8)
        return length

    def _read(self, n: int, wire: Array) -> Values:
        kind, body = wire[:_HEADER].tobytes(), wire[_HEADER:].tobytes()
        if kind == bytes([_RAW]) and len(body) >= n * self._computed.itemsize:
            return np.frombuffer(body, self._computed, n)
        if kind != bytes([_ENCODED]) or n == 0:
            raise WireCorrupted(f"a wire of {len(wire)} bytes for {n} values holds neither encoded nor raw values")
        return self._decoded(body, n, self._computed)


@dataclass(frozen=True)
class NumpyCodec(Codec):
    """Base class of codecs in plain NumPy: derive a frozen dataclass from it, and write `encode` and `decode`.

    Both methods get one segment of a buffer at a time, as a one-dimensional array of float64 for float64 buffers and of
    float32 for all others. The base class does the rest: sums of wires, residuals for error feedback, segments, and
    wires of any length. Segments that hold NaN or Inf, or whose encoded bytes would be longer than the values, are sent
    uncompressed. Arrays on a GPU are copied through host memory.

    Use `check_codec` to test a codec. ``algorithm="auto"`` compresses only if that is faster, so name an algorithm to
    try a codec.

    Attributes
    ----------
    name : str
        The name of the codec, in lower case.

    Examples
    --------
    >>> class Half(compcoll.NumpyCodec):
    ...     name = "half"
    ...
    ...     def encode(self, x, rng):
    ...         return x.astype(np.float16).tobytes()
    ...
    ...     def decode(self, wire, n, dtype):
    ...         return np.frombuffer(wire, np.float16)
    >>> compcoll.check_codec(Half())
    >>> compcoll.allreduce(np.ones(4, np.float32), codec=Half(), algorithm="ring")
    array([1., 1., 1., 1.], dtype=float32)
    """

    fixed_size = False

    @abstractmethod
    def encode(self, x: npt.NDArray[Any], rng: np.random.Generator) -> bytes:
        """Return the encoded bytes of an array.

        Parameters
        ----------
        x : array of float32 or float64
            At least one value, all finite. It is read-only.
        rng : numpy.random.Generator
            The only source of random numbers that a codec may use. Its seed combines the codec's ``seed`` option, if
            there is one, with the number of the collective, the rank and the segment. If random rounding is unbiased,
            set ``stochastic = True`` in the class.
        """

    @abstractmethod
    def decode(self, wire: bytes, n: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the ``n`` decoded values of a wire.

        Parameters
        ----------
        wire : bytes
            The bytes that `encode` returned.
        n : int
            Length of the encoded array.
        dtype : numpy.dtype
            Type of the encoded array, float32 or float64. A returned array of another real type is converted to it.
        """

    def coder(self, device: Device, dtype: str) -> Coder:
        return NumpyCoder(dtype, self._encoded, self._decoded)

    def _encoded(self, x: Values, how: EncodeOptions) -> bytes:
        key, counter = [getattr(self, "seed", 0), how.rng_counter], [0, 0, how.position, 0]
        wire = self.encode(x, np.random.Generator(np.random.Philox(key=key, counter=counter)))
        if not isinstance(wire, bytes):
            raise CodecError(f"{self!r}: encode returned {type(wire).__name__}: return bytes, such as array.tobytes()")
        return wire

    def _decoded(self, wire: bytes, n: int, dtype: np.dtype[Any]) -> Values:
        values = np.asarray(self.decode(wire, n, dtype))
        if values.shape != (n,) or not np.can_cast(values.dtype, dtype, "same_kind"):
            raise CodecError(
                f"{self!r}: decode returned an array of {values.dtype} of shape {values.shape}: for n={n}, return real "
                f"numbers of shape ({n},)"
            )
        with np.errstate(over="ignore"):
            return values.astype(dtype, copy=False)
