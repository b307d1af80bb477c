"""MPI's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..request import Pending, Steps, Turn


def move(start: Callable[[], Pending], turn: Turn) -> Steps:
    """Run one of MPI's nonblocking collectives when it is its turn."""
    yield turn
    pending = start()
    turn.use()
    yield pending


def reduce(
    block: Callable[[Any, Any, str], None] | None,
    start: Callable[[Any, Any, str], Pending],
    turn: Turn | None,
    op: str,
    device: Any,
    x: Any,
    out: Any,
    dtype: str,
    scale: float,
) -> Steps:
    """Run one of MPI's reductions: in float32 for the halves that MPI does not know.

    Parameters
    ----------
    block, start : callable
        The blocking and the nonblocking reduction of the first argument into the second.
    turn : Turn or None
        Of the nonblocking one; None to block.
    op : str
        The operation.
    device : Device
        Where the arrays are.
    x, out : array
        The caller's arrays, flat.
    dtype : str
        Their element type.
    scale : float
        Factor of the result.
    """
    values, sums = device.for_mpi(x, out, dtype)
    if turn is not None:
        yield from move(lambda: start(values, sums, op), turn)
    elif block is not None:
        block(values, sums, op)
    if scale != 1.0:
        device.multiply(sums, scale)
    device.from_mpi(sums, out, dtype)
