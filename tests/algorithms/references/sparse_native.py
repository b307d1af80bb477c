"""The wires of `sparse_ring`, by MPI's allgatherv."""

from __future__ import annotations

from math import ceil, log2

from compcoll.algorithms.costs import Costs

from . import Reference
from .sparse_ring import ends, hop


def seconds(c: Costs, p: int, k: int, n: float) -> float:
    return ends(c, p, n, p) + min(p - 1, 2 * ceil(log2(p))) * c.latency + (p - 1) * max(hop(c, p, k, n))


REFERENCE = Reference(seconds={"allreduce": seconds}, encodings={"allreduce": lambda p, nodes: (1, p)}, ordered=True)
