"""Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19, 2005."""

from __future__ import annotations

from math import ceil, log2

from compcoll.algorithms.costs import Costs

from . import Reference


def levels_of(p: int) -> int:
    return ceil(log2(p))


def slowest_link(c: Costs, p: int, k: int) -> float:
    return max(c.inside if k > 1 or p == k else 0.0, c.between * c.world.crossing)


def allreduce(c: Costs, p: int, k: int, n: float) -> float:
    """Return the less of recursive doubling's and Rabenseifner's seconds."""
    levels = levels_of(p)
    near = levels_of(k) if p > k else levels
    exchanges = near * c.inside_latency + near * n * c.inside + (levels - near) * (c.latency + n * c.between * k)
    halves = 2 * levels * c.latency + (p - 1) / p * n * (2 * slowest_link(c, p, k) + c.add)
    return min(exchanges + levels * n * c.add, halves)


def reduce_scatter(c: Costs, p: int, k: int, n: float) -> float:
    return levels_of(p) * c.latency + (p - 1) / p * n * slowest_link(c, p, k) + (p - 1) / p * n * c.add


def allgather(c: Costs, p: int, k: int, n: float) -> float:
    return levels_of(p) * c.latency + (p - 1) * n * slowest_link(c, p, k)


def bcast(c: Costs, p: int, k: int, n: float) -> float:
    """Return the less of a tree's seconds and those of a scatter and an allgather."""
    levels, beta = levels_of(p), slowest_link(c, p, k)
    return min(levels * c.latency + levels * n * beta, (levels + p - 1) * c.latency + 2 * n * beta * (p - 1) / p)


def alltoall(c: Costs, p: int, k: int, n: float) -> float:
    return (p - 1) * c.latency + max(c.inside * (k - 1) * n / p, c.between * (p - k) * k * n / p)


def reduce(c: Costs, p: int, k: int, n: float) -> float:
    """Return the less of a tree's seconds and those of a reduce-scatter and a gather."""
    levels = levels_of(p)
    near = levels_of(k) if p > k else levels
    tree = near * (c.inside_latency + n * c.inside) + (levels - near) * (c.latency + n * c.between)
    halves = 2 * levels * c.latency + (p - 1) / p * n * (2 * slowest_link(c, p, k) + c.add)
    return min(tree + levels * n * c.add, halves)


def scatter(c: Costs, p: int, k: int, n: float) -> float:
    return levels_of(p) * c.latency + (p - 1) / p * n * slowest_link(c, p, k)


REFERENCE = Reference(
    seconds={
        "allreduce": allreduce,
        "reduce_scatter": reduce_scatter,
        "allgather": allgather,
        "allgatherv": allgather,
        "bcast": bcast,
        "alltoall": alltoall,
        "alltoallv": alltoall,
        "reduce": reduce,
        "gather": allgather,
        "scatter": scatter,
    },
    encodings=dict.fromkeys(("allreduce", "reduce_scatter", "reduce"), lambda p, nodes: (0, 0)),
    ordered=True,
)
