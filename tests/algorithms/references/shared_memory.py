"""Li, Hoefler & Snir, "NUMA-Aware Shared-Memory Collective Communication for MPI", HPDC 2013."""

from __future__ import annotations

from math import ceil, log2

from compcoll.algorithms.costs import Costs

from . import Reference


def seconds(c: Costs, p: int, k: int, n: float) -> float:
    """Each rank copies in what the p - 1 others add, adds that much for its own part, and copies their sums out."""
    part = n * (p - 1) / p
    return part * c.encode + part * c.add + part * c.decode + ceil(log2(p)) * c.inside_latency


REFERENCE = Reference(seconds={"allreduce": seconds}, encodings={"allreduce": lambda p, nodes: (0, 0)}, ordered=True)
