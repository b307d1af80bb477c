"""MPI's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..request import Pending, Steps


def move(start: Callable[[], Pending]) -> Steps:
    """Run one of MPI's nonblocking collectives."""
    yield start()


def reduce(
    start: Callable[[Any, Any, str], Pending | None],
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
    start : callable
        Starts the reduction of its first argument into its second; None if it has ended by then.
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
    values, sums = device.for_mpi(x, dtype), device.for_mpi(out, dtype)
    yield start(values, sums, op)
    if scale != 1.0:
        device.multiply(sums, scale)
    device.from_mpi(sums, out, dtype)
