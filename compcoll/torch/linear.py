"""Reduction operations that can be compressed: sums and means."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributed import ReduceOp

from ..errors import InvalidArgument
from . import private

_NAMES = {"sum": "sum", "avg": "mean", "mean": "mean"}
_KINDS = {int(ReduceOp.RedOpType.SUM): "sum", int(ReduceOp.RedOpType.AVG): "mean"}
_SCALED = int(ReduceOp.RedOpType.PREMUL_SUM)


class Linear(NamedTuple):
    """A sum or a mean.

    Attributes
    ----------
    name : str
        ``"sum"`` or ``"mean"``.
    factor : float or torch.Tensor or None
        Factor by which each rank's values are multiplied first.
    """

    name: str
    factor: float | Tensor | None = None


def linear(op: str | ReduceOp | ReduceOp.RedOpType) -> Linear:
    """Return a reduction operation as a `Linear`.

    Raises
    ------
    InvalidArgument
        If it is neither a sum nor a mean, and so cannot be compressed.
    """
    if isinstance(op, str):
        if op.lower() in _NAMES:
            return Linear(_NAMES[op.lower()])
    else:
        kind = int(getattr(op, "op", op))
        if kind in _KINDS:
            return Linear(_KINDS[kind])
        if kind == _SCALED:
            return Linear("sum", private.factor_of(op))
    raise InvalidArgument(f"op={op!r} cannot be compressed, only sum and avg can: use torch.distributed's collective")
