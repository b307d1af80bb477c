"""MPI's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..request import Pending, Steps, Turn


def move(started: Pending, turn: Turn) -> Steps:
    """Wait for one of MPI's nonblocking collectives, which used this turn."""
    turn.use()
    yield started


class Reduction:
    """MPI's reduction by one operation of one element type: in float32 for the halves that MPI does not know.

    Parameters
    ----------
    reduce, start : callable
        The blocking and the nonblocking reduction of the first argument into the second.
    op : str
        The operation.
    device : Device
        Where the arrays are.
    dtype : str
        Their element type.
    scale : float
        Factor of the result.
    """

    def __init__(
        self,
        reduce: Callable[[Any, Any, str], None],
        start: Callable[[Any, Any, str], Pending],
        op: str,
        device: Any,
        dtype: str,
        scale: float,
    ) -> None:
        self._reduce, self._start = reduce, start
        self._op, self._device, self._dtype, self._scale = op, device, dtype, scale
        self._as_it_is = scale == 1.0 and device.known_to_mpi(dtype)

    def block(self, x: Any, out: Any) -> None:
        """Do it; return when all is done."""
        if self._as_it_is:
            self._reduce(x, out, self._op)
            return
        values, sums = self._device.for_mpi(x, out, self._dtype)
        self._reduce(values, sums, self._op)
        self._end(sums, out)

    def steps(self, x: Any, out: Any, turn: Turn) -> Steps:
        """Start it, whose turn it is, and wait for it."""
        values, sums = self._device.for_mpi(x, out, self._dtype)
        yield from move(self._start(values, sums, self._op), turn)
        self._end(sums, out)

    def _end(self, sums: Any, out: Any) -> None:
        if self._scale != 1.0:
            self._device.multiply(sums, self._scale)
        self._device.from_mpi(sums, out, self._dtype)
