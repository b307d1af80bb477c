"""The algorithms' formulas, one constant at a time: what each is paid for, by the papers and by what is sent."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

import pytest

from compcoll.algorithms import ALGORITHMS
from compcoll.algorithms.costs import Costs
from compcoll.layout import World

Terms = dict[str, float]
CONSTANTS = ("latency", "between", "encode", "decode", "accumulate", "recode", "add", "message")


def costs(world: World, n: float, segment: int, constant: str) -> Costs:
    zero: dict[str, Any] = dict.fromkeys((*CONSTANTS, "inside", "inside_latency"), 0.0)
    zero[constant] = 1.0
    among = lambda others, coded: costs(others, n, segment, constant)  # noqa: E731
    return Costs(n=n, world=world, segment=segment, shrink=1.0, **zero, among=among)


# For p ranks on nodes of their own and n bytes: a chunk's segments m, and the factor of each constant that is paid.
# All but codecs': Patarasuk & Yuan 2009 (ring), Thakur et al. 2005 (recursive doubling, MPI's own).
FORMULAS: dict[tuple[str, str], Callable[[int, float, float], Terms]] = {
    ("ring", "allreduce"): lambda p, n, m: {
        "latency": 2 * (p - 1),
        "between": 2 * (p - 1) / p * n,
        "encode": n / p / m,  # the first segment of the first chunk; then what comes is recoded
        "recode": (p - 1) / p * n,
        "decode": (p - 1) / p * n + n / p / m,
        "message": 2 * (p - 1) * m,
    },
    ("ring", "reduce_scatter"): lambda p, n, m: {
        "latency": p - 1,
        "between": (p - 1) / p * n,
        "encode": n / p / m,
        "recode": (p - 1) / p * n,
        "message": (p - 1) * m,
    },
    ("ring", "allgather"): lambda p, n, m: {
        "latency": p - 1,
        "between": (p - 1) * n,
        "encode": n / m,
        "decode": (p - 1) * n + n / m,
        "message": (p - 1) * m,
    },
    ("direct", "allreduce"): lambda p, n, m: {
        "latency": 2,
        "between": 2 * (p - 1) / p * n,
        "encode": (p - 1) / p * n,
        "decode": (p - 1) / p * n,
        "accumulate": (p - 2) / p * n,
        "recode": n / p,
        "message": 2 * (p - 1) * m,
    },
    ("direct", "reduce_scatter"): lambda p, n, m: {
        "latency": 1,
        "between": (p - 1) / p * n,
        "encode": (p - 1) / p * n,
        "accumulate": (p - 1) / p * n,
        "message": (p - 1) * m,
    },
    ("direct", "allgather"): lambda p, n, m: {
        "latency": 1,
        "between": (p - 1) * n,
        "encode": n / m,
        "decode": (p - 1) * n,
        "message": (p - 1) * m,
    },
    ("recursive_doubling", "allreduce"): lambda p, n, m: {
        "latency": log2(p),
        "between": log2(p) * n,
        "encode": n,
        "recode": (log2(p) - 1) * n,
        "accumulate": n,
        "message": log2(p) * m,
    },
    ("binomial", "bcast"): lambda p, n, m: {
        "latency": log2(p),
        "between": log2(p) * (n + n / m),  # the root sends to log2 p others; a segment passes log2 p hops
        "encode": n,
        "decode": log2(p) * n / m,
        "message": log2(p) * m,
    },
    ("pairwise", "alltoall"): lambda p, n, m: {
        "latency": 1,
        "between": (p - 1) / p * n,
        "encode": n,
        "decode": n,
        "message": (p - 1) * m,
    },
    ("native", "allreduce"): lambda p, n, m: {
        "latency": log2(p),
        "between": 2 * (p - 1) / p * n,
        "add": (p - 1) / p * n,
    },
    ("native", "reduce_scatter"): lambda p, n, m: {
        "latency": log2(p),
        "between": (p - 1) / p * n,
        "add": (p - 1) / p * n,
    },
    ("native", "allgather"): lambda p, n, m: {"latency": log2(p), "between": (p - 1) * n},
    ("native", "bcast"): lambda p, n, m: {"latency": log2(p), "between": 2 * (p - 1) / p * n},
    ("native", "alltoall"): lambda p, n, m: {"latency": p - 1, "between": (p - 1) / p * n},
    ("shared_memory", "allreduce"): lambda p, n, m: {
        **dict.fromkeys(("encode", "add", "decode"), (p - 1) / p * n),
    },
    # Selection, a message each for the lengths, then all wires to all (Tsuzuku et al. 2018), and p of them added.
    ("sparse_ring", "allreduce"): lambda p, n, m: {
        "latency": log2(p) + p - 1,
        "between": p * n,
        "encode": n,
        "decode": n,
        "message": log2(p) + p - 1,
        "add": 4 * p * n,
    },
    ("sparse_native", "allreduce"): lambda p, n, m: {
        "latency": log2(p) + min(p - 1, 2 * log2(p)),
        "between": (p - 1) * n,
        "encode": n,
        "decode": n,
        "message": log2(p),
        "add": 4 * p * n,
    },
    ("sparse_direct", "allreduce"): lambda p, n, m: {  # Ok-Topk 2022, with lengths twice
        "latency": 2 * log2(p) + p,
        "between": 2 * (p - 1) / p * n,
        "encode": n + n / p,
        "decode": n,
        "message": 2 * log2(p) + 3 * (p - 1),
        "add": (4 * 2 + 20) * n,
    },
}
FORMULAS |= {
    ("hierarchical", "allreduce"): lambda p, n, m: FORMULAS["direct", "allreduce"](p, n, 1),  # a segment holds a chunk
    **{(name, "allgatherv"): FORMULAS[name, "allgather"] for name in ("ring", "direct", "native")},
}
ELSEWHERE = {("dissemination", "allreduce")}  # in test_costs_across_nodes.py


def calls() -> set[tuple[str, str]]:
    """All algorithms with their collectives that need a formula in this file."""
    known = {(name, collective) for name, record in ALGORITHMS.items() for collective in record.collectives}
    assert known > ELSEWHERE
    return known - ELSEWHERE


def test_every_algorithm_has_its_formulas() -> None:
    assert set(FORMULAS) == calls(), "FORMULAS needs what each algorithm is paid for"
    assert set(INSIDE) == calls(), "INSIDE needs what each algorithm is paid for inside a node"


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(("algorithm", "collective"), FORMULAS)
def test_each_constant_is_paid_for_what_it_stands_for(
    algorithm: str, collective: str, ranks: int, segments: int
) -> None:
    n, world = 4800.0, World(ranks, 1)
    chunk = n if collective in ("allgather", "allgatherv") else n / ALGORITHMS[algorithm].parts(ranks)
    wanted = FORMULAS[algorithm, collective](ranks, n, segments)
    for constant in CONSTANTS:
        told = ALGORITHMS[algorithm].cost(costs(world, n, int(chunk / segments), constant), collective)
        assert told == pytest.approx(wanted.get(constant, 0.0)), constant


# The same inside a node of p ranks: bytes that are copied through its memory, and latencies.
INSIDE: dict[tuple[str, str], Callable[[int, float], Terms]] = {
    ("ring", "allreduce"): lambda p, n: {"inside": 2 * (p - 1) / p * n, "latency": 2 * (p - 1)},
    ("ring", "reduce_scatter"): lambda p, n: {"inside": (p - 1) / p * n, "latency": p - 1},
    ("ring", "allgather"): lambda p, n: {"inside": (p - 1) * n, "latency": p - 1},
    ("direct", "allreduce"): lambda p, n: {"inside": 2 * (p - 1) / p * n, "latency": 2},
    ("direct", "reduce_scatter"): lambda p, n: {"inside": (p - 1) / p * n, "latency": 1},
    ("direct", "allgather"): lambda p, n: {"inside": (p - 1) * n, "latency": 1},
    ("pairwise", "alltoall"): lambda p, n: {"inside": 2 * (p - 1) / p * n, "latency": 1},
    ("shared_memory", "allreduce"): lambda p, n: {"inside_latency": log2(p)},
    ("sparse_ring", "allreduce"): lambda p, n: {"inside": p * n, "latency": log2(p) + p - 1},
    ("sparse_direct", "allreduce"): lambda p, n: {"inside": 2 * (p - 1) / p * n, "latency": 2 * log2(p) + p},
    ("recursive_doubling", "allreduce"): lambda p, n: {"inside": log2(p) * n, "inside_latency": log2(p)},
    ("hierarchical", "allreduce"): lambda p, n: {"inside": p * n, "inside_latency": 2},
    ("binomial", "bcast"): lambda p, n: {"inside": 2 * log2(p) * n, "latency": log2(p)},
    ("native", "allreduce"): lambda p, n: {"inside": 2 * (p - 1) / p * n},
    ("native", "reduce_scatter"): lambda p, n: {"inside": (p - 1) / p * n, "latency": log2(p)},
    ("native", "allgather"): lambda p, n: {"inside": (p - 1) * n, "latency": log2(p)},
    ("native", "bcast"): lambda p, n: {"inside": 2 * (p - 1) / p * n, "latency": log2(p)},
    ("native", "alltoall"): lambda p, n: {"inside": (p - 1) / p * n, "latency": p - 1},
    ("sparse_native", "allreduce"): lambda p, n: {
        "inside": (p - 1) * n,
        "latency": log2(p) + min(p - 1, 2 * log2(p)),
    },
}
INSIDE |= {(name, "allgatherv"): INSIDE[name, "allgather"] for name in ("ring", "direct", "native")}


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(("algorithm", "collective"), INSIDE)
def test_inside_a_node(algorithm: str, collective: str, ranks: int) -> None:
    n, world = 4800.0, World(ranks, ranks)
    wanted = INSIDE[algorithm, collective](ranks, n)
    for constant in ("inside", "inside_latency", "latency"):
        told = ALGORITHMS[algorithm].cost(costs(world, n, 1 << 30, constant), collective)
        assert told == pytest.approx(wanted.get(constant, 0.0)), constant


def test_recursive_doubling_of_no_power_of_two() -> None:
    """Ranks beyond the power hand in their buffers, and get two wires: those of both halves of the last level."""
    n, cost = 4800.0, ALGORITHMS["recursive_doubling"].cost
    for ranks, levels in ((3, 1), (6, 2), (7, 2)):
        apart, together = World(ranks), World(ranks, ranks)
        assert cost(costs(apart, n, 1 << 30, "between"), "allreduce") == pytest.approx((levels + 3) * n)
        assert cost(costs(together, n, 1 << 30, "inside"), "allreduce") == pytest.approx((levels + 3) * n)
        assert cost(costs(apart, n, 1 << 30, "latency"), "allreduce") == levels + 2
        assert cost(costs(apart, n, 1 << 30, "encode"), "allreduce") == pytest.approx(2 * n)
        assert cost(costs(apart, n, 1200, "message"), "allreduce") == (levels + 3) * 4


def test_one_node_sends_nothing_between_nodes() -> None:
    cost = ALGORITHMS["hierarchical"].cost
    assert cost(costs(World(4, 4), 4800.0, 1 << 30, "latency"), "allreduce") == 0
    assert cost(costs(World(8, 4), 4800.0, 1 << 30, "latency"), "allreduce") == 2
