"""Every collective's result, by NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from compcoll import Codec
from compcoll.algorithms.record import ROOTED


def counts_of(rows: int, ranks: int, rank: int) -> list[int]:
    """The rows that a rank of these tests sends to each rank in an alltoallv: the later ranks' are the more uneven."""
    cuts = [rows * step ** (rank + 1) // ranks ** (rank + 1) for step in range(ranks + 1)]
    return [end - begin for begin, end in pairwise(cuts)]


def arguments(collective: str, rows: int, ranks: int, rank: int, root: int = 0) -> dict[str, Any]:
    """The arguments of a rank's call, besides its array of so many rows, that a result of `expected` depends on."""
    if collective == "alltoallv":
        return {"counts": counts_of(rows, ranks, rank)}
    return {"root": root} if collective in ROOTED else {}


def has_result(collective: str, rank: int, root: int = 0) -> bool:
    """Whether a rank gets a result."""
    return rank == root or collective not in ("reduce", "gather")


def previous(codec: Codec | None, collective: str, inputs: Sequence[np.ndarray], root: int = 0) -> dict[str, Any]:
    """Make ``out`` for a codec that sends differences: an earlier result, from which some elements differ."""
    if codec is None or not codec.needs_reference:
        return {}
    out = inputs[root].copy() if collective == "bcast" else np.stack(inputs)
    out[..., ::9] = 0
    return {"out": out}


def expected(collective: str, inputs: Sequence[np.ndarray], rank: int, root: int = 0) -> Any:
    """A rank's result of a collective on all ranks' inputs; sums of whole numbers are exact. None if it gets none."""
    ranks = len(inputs)
    if not has_result(collective, rank, root):
        return None
    if collective in ("allreduce", "reduce_scatter", "reduce"):
        total = np.sum(inputs, axis=0, dtype=inputs[0].dtype)
        return np.split(total, ranks)[rank] if collective == "reduce_scatter" else total
    if collective == "bcast":
        return inputs[root]
    if collective == "scatter":
        return np.split(inputs[root], ranks)[rank]
    if collective == "alltoall":
        return np.concatenate([np.split(x, ranks)[rank] for x in inputs])
    if collective == "alltoallv":
        ends = [np.cumsum(counts_of(len(x), ranks, source))[:-1] for source, x in enumerate(inputs)]
        return np.concatenate([np.split(x, end)[rank] for x, end in zip(inputs, ends, strict=True)])
    return np.concatenate(inputs) if collective == "allgatherv" else np.stack(inputs)
