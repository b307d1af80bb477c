"""ZFP's modes of variable size through zfpy, on host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zfpy

from ..devices.arrays import load, store
from ..devices.encode_options import PLAIN, EncodeOptions
from ..dtypes import computed_on
from ..errors import WireCorrupted
from .base import Array

_ZFP, _RAW = 0, 1
_HEADER = 1


class ZfpyCoder:
    """A coder whose wire is one byte, then a zfp stream (0) or the values themselves (1).

    Values that are not finite, which zfp cannot hold, and streams that would be longer than the values travel raw.
    """

    fixed_size = False
    knows_decoded = False

    def __init__(self, dtype: str, *, tolerance: float | None, precision: int | None) -> None:
        self._dtype = dtype
        self._computed = computed_on(dtype).numpy
        self._type = zfpy.dtype_to_ztype(self._computed)
        self._mode: dict[str, float] = {}
        if tolerance is not None:
            self._mode = {"tolerance": tolerance}
        if precision is not None:
            self._mode = {"precision": precision}

    def wire_nbytes(self, n: int) -> int:
        return _HEADER + n * self._computed.itemsize

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        values = self._sum(n, add, wires, how.scale)
        if how.residual is not None and how.feed:
            values = values + how.residual
        length = self._write(values, wire)
        if how.residual is None and how.decoded is None:
            return length
        got = self._read(n, wire[:length])
        if how.residual is not None:
            with np.errstate(invalid="ignore"):
                loss = (values - got) * self._computed.type(how.residual_scale)
            loss[~np.isfinite(loss)] = 0
            how.residual[:] = loss if how.feed else how.residual + loss
        if how.decoded is not None:
            store(got, how.decoded, self._dtype)
        return length

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        store(self._sum(n, add, wires, scale), out, self._dtype)

    def _sum(self, n: int, add: Array | None, wires: Sequence[Array], scale: float) -> npt.NDArray[np.floating]:
        terms: list[npt.NDArray[np.floating]] = (
            [load(add, self._dtype) * self._computed.type(scale)] if add is not None else []
        )
        terms += [self._read(n, wire) for wire in wires]
        total = terms[0]
        with np.errstate(over="ignore", invalid="ignore"):
            for term in terms[1:]:
                total = total + term
        return total

    def _write(self, values: npt.NDArray[np.floating], wire: Array) -> int:
        n = len(values)
        stream = (
            zfpy.compress_numpy(values, write_header=False, **self._mode) if np.isfinite(values).all() and n else b""
        )
        if not 0 < len(stream) <= values.nbytes:
            wire[0], stream = _RAW, values.tobytes()
        else:
            wire[0] = _ZFP
        length = _HEADER + len(stream)
        wire[_HEADER:length] = np.frombuffer(stream, np.uint8)
        return length

    def _read(self, n: int, wire: Array) -> npt.NDArray[np.floating]:
        body = wire[_HEADER:]
        if len(wire) and wire[0] == _RAW and body.nbytes >= n * self._computed.itemsize:
            return np.frombuffer(body.tobytes(), self._computed, n)
        if n == 0 or len(wire) <= _HEADER or wire[0] != _ZFP:
            raise WireCorrupted(f"zfp wire of {len(wire)} bytes for {n} values is neither a stream nor raw values")
        # libzfp reads on past the end of a short stream: give it zeros to read.
        padded = body.tobytes() + bytes(n * self._computed.itemsize + 64)
        return np.asarray(zfpy._decompress(padded, self._type, (n,), **self._mode))
