"""The szp codec on host memory: values as integers on the wire, which are added without decoding them to floats."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import DTYPES, computed_on
from ..errors import WireCorrupted
from ..kernels import _host
from .arrays import load, store, store_residual
from .encode_options import PLAIN, EncodeOptions
from .selection import HostSelection

Array = npt.NDArray[Any]

_STEP = np.dtype("<f8")
# A little less than 1: room for the rounding of products, so that errors stay within the tolerance.
_SLACK = 1 - 2.0**-19
# Bits of a step. Few, so that multiples of it are exact.
_STEP_BITS = 12
_SMALLEST_STEP = 2.0**-1000
_LEAST_NBYTES_TO_WARN = 8192
# Sums of integers, less what rounding the limit of values to float32 may add.
_LARGEST_SUM = 2**31 - 2**9

_log = logging.getLogger("compcoll")


class SzpCoder:
    """Encodes values as multiples of a step; implements `compcoll.codecs.base.Coder`.

    Parameters
    ----------
    dtype : str
        Element type.
    instruction_set : int
        Index of one of the device's instruction sets.
    tolerance : float or None
        Largest error of a sum.
    relative : float or None
        Without ``tolerance``: the same, as a part of the largest magnitude of the encoded array.
    ranks : int
        Number of ranks whose arrays are added. Each may use the same part of the tolerance.
    """

    fixed_size = False
    knows_decoded = False

    def __init__(
        self, dtype: str, instruction_set: int, tolerance: float | None, relative: float | None, ranks: int
    ) -> None:
        self._dtype, self._ranks, self._relative = dtype, ranks, relative
        self._largest = DTYPES[dtype].largest
        self._step = None if tolerance is None else self._step_of(tolerance)
        self._computed = computed_on(dtype).numpy
        wide = dtype == "float64"
        self._kernels = (_host.Szp64 if wide else _host.Szp32)(instruction_set)
        self._selection = HostSelection(wide, instruction_set)
        self.wire_nbytes = self._kernels.wire_nbytes

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        values, scale = None if add is None else load(add, self._dtype), how.scale
        if how.residual is not None and values is not None:
            values, scale = values * self._computed.type(scale), 1.0
            if how.feed:
                values += how.residual
        step, limit = self._scales(values, scale, wires)
        try:
            length: int = self._kernels.encode(n, values, scale, wires, step, limit, wire)
        except ValueError as error:
            raise _corrupted(n, wires, error) from None
        if values is not None and self._saves_nothing(length, n, wire) and np.isfinite(values).all():
            self._warn()
        if how.residual is not None and values is not None:
            store_residual(values, self._rounded(values, step, limit), how)
        if how.decoded is not None:
            self.decode(n, None, (wire[:length],), how.decoded)
        return length

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        values = None if add is None else load(add, self._dtype)
        got = out if out.dtype == self._computed else np.empty(n, self._computed)
        step, limit = self._scales(values, scale, wires)
        try:
            self._kernels.decode(n, values, scale, wires, step, limit, got)
        except ValueError as error:
            raise _corrupted(n, wires, error) from None
        if got is not out:
            store(got, out, self._dtype)

    def _saves_nothing(self, length: int, n: int, wire: Array) -> bool:
        return length >= n * DTYPES[self._dtype].itemsize and wire.nbytes >= _LEAST_NBYTES_TO_WARN

    def _warn(self) -> None:
        _warn_that_nothing_is_saved(self._dtype, self._ranks)

    def _rounded(self, values: Array, step: float, limit: float) -> Array:
        """Return values as this rank rounds them. Only that loses something, since sums of integers are exact."""
        wire, rounded = np.empty(self.wire_nbytes(values.size), np.uint8), np.empty_like(values)
        length = self._kernels.encode(values.size, values, 1.0, (), step, limit, wire)
        self._kernels.decode(values.size, None, 1.0, (wire[:length],), step, limit, rounded)
        return rounded

    def _step_of(self, tolerance: float) -> float:
        """Return the step: two parts of the tolerance or a little less, far below the largest value of the type."""
        wanted = min(tolerance / self._ranks, self._largest / 32) * 2 * _SLACK
        mantissa, exponent = math.frexp(wanted)
        return max(math.ldexp(math.floor(mantissa * 2**_STEP_BITS), exponent - _STEP_BITS), _SMALLEST_STEP)

    def _scales(self, values: Array | None, scale: float, wires: Sequence[Array]) -> tuple[float, float]:
        """Return the step, and the largest magnitude of this rank's values that integers can represent."""
        step = self._step
        if step is None and wires:
            step = _step_on(wires[0])
        if step is None:
            assert values is not None and self._relative is not None
            step = self._step_of(self._relative * float(self._selection.moments(values)[3]))
        return step, self._limit(step, scale)

    def _limit(self, step: float, scale: float) -> float:
        """Return the largest magnitude of this rank's values that integers can represent."""
        if step == _SMALLEST_STEP:  # the tolerance may be even smaller
            return 0.0
        # Rounding must not lead beyond the largest value.
        limit = min(step * (_LARGEST_SUM // self._ranks - 1), self._largest - step) / abs(scale)
        return min(limit, computed_on(self._dtype).largest)


@cache  # so that it is said once
def _warn_that_nothing_is_saved(dtype: str, ranks: int) -> None:
    _log.warning(
        "szp saves nothing on some arrays of %s: the tolerance is too small for their values on %d ranks. Use a larger "
        "one, or codec=None",
        dtype,
        ranks,
    )


def _step_on(wire: Array) -> float:
    return float(wire[: _STEP.itemsize].view(_STEP)[0]) if wire.size >= _STEP.itemsize else 0.0


def _corrupted(n: int, wires: Sequence[Array], error: ValueError) -> WireCorrupted:
    lengths = " and ".join(str(wire.size) for wire in wires)
    return WireCorrupted(f"an szp wire of {n} values, of {lengths} bytes: {error}")
