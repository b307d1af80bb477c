"""Every collective's result, by NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def expected(collective: str, inputs: Sequence[np.ndarray], rank: int, root: int = 0) -> np.ndarray:
    """A rank's result of a collective on all ranks' inputs; sums of whole numbers are exact."""
    ranks = len(inputs)
    if collective in ("allreduce", "reduce_scatter"):
        total = np.sum(inputs, axis=0, dtype=inputs[0].dtype)
        return total if collective == "allreduce" else np.split(total, ranks)[rank]
    if collective == "bcast":
        return inputs[root]
    if collective == "alltoall":
        return np.concatenate([np.split(x, ranks)[rank] for x in inputs])
    return np.stack(inputs) if collective == "allgather" else np.concatenate(inputs)
