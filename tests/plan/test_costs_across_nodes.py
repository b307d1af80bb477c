"""Costs with all constants at once, several ranks a node, and how often values are encoded: written down anew here."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

import numpy as np
import pytest

from compcoll.algorithms import ALGORITHMS
from compcoll.algorithms.costs import Costs
from compcoll.layout import World

NAMES = ("encode", "decode", "accumulate", "recode", "add", "message", "latency", "inside_latency", "inside", "between")


def constants(world: World, n: float, segment: int, seed: int) -> Costs:
    """Constants of all sizes: what takes longer, host or wire, differs from seed to seed."""
    numbers: dict[str, Any] = dict(
        zip(NAMES, 10 ** np.random.default_rng(seed).uniform(-1, 1, len(NAMES)), strict=True)
    )

    def among(others: World, coded: bool) -> Costs:
        shrink, alone = 0.25 if coded else 1.0, others.nodes == 1
        used = numbers if coded else {**numbers, "encode": 0.3, "accumulate": 0.7, "decode": 0.2}
        mine = {**used, "between": 0.0 if alone else used["between"]}
        return Costs(n=n, world=others, segment=segment, shrink=shrink, **mine, among=among)

    return among(world, True)


def both(host: float, wire: float, parts: float) -> float:
    """Two things at once, in parts: the longer, and a part of the shorter."""
    return max(host, wire) + min(host, wire) / parts


def ring(c: Costs, p: int, k: int, n: float, phases: str) -> float:
    m = ceil(n / c.segment)
    bytes_ = n / m * c.shrink
    copy = c.inside * bytes_ if k > 1 or k == p else 0.0
    wire, seconds = c.between * bytes_ * c.world.crossing, 0.0
    for phase in phases:
        work, passing = (c.recode, c.recode) if phase == "s" else (c.decode, 0.0)
        host = work * n / m + c.message + copy
        hop = passing * n / m + c.message + copy + wire + c.latency
        seconds += (p - 1) * max(m * host, m * wire, hop)
        seconds += c.encode * n / m if phase == "s" or phases == "g" else 0.0
        seconds += c.decode * n / m if phase == "g" else 0.0
    return seconds


def direct(c: Costs, p: int, k: int, n: float, collective: str) -> float:
    m, others = ceil(n / c.segment), p - 1
    copy, wire = c.inside * (k - 1) * n * c.shrink, c.between * (p - k) * k * n * c.shrink
    sent = others * m
    taken = c.decode * others * n + sent * c.message / 2 + copy
    if collective == "allgather":
        return c.latency + c.encode * n / m + both(taken + sent * c.message / 2, wire, sent)
    scatter = c.latency + both(c.encode * others * n + sent * c.message + copy, wire, sent)
    added = c.accumulate * (p - 2) * n
    if collective == "reduce_scatter":
        return scatter + added + c.accumulate * n
    added += c.recode * n
    return scatter + added / m + c.latency + both(added - added / m + taken + sent * c.message / 2, wire, sent)


def doubling(c: Costs, p: int, k: int, n: float) -> float:
    m, seconds, work, distance = ceil(n / c.segment), c.accumulate * n, c.encode, 1
    while 2 * distance <= p:
        if p > k and distance >= k:
            seconds += c.latency + both(work * n + m * c.message, c.between * n * c.shrink * k, m)
        else:
            seconds += c.inside_latency + work * n + c.inside * n * c.shrink + m * c.message
        work, distance = c.recode, 2 * distance
    if distance == p:
        return seconds
    # The ranks beyond hand in their buffers, and get the two wires of the last exchange.
    copy, wire = c.inside * n * c.shrink if k > 1 else 0.0, c.between * n * c.shrink * c.world.crossing
    seconds += c.latency + both(c.encode * n + copy + m * c.message, wire, m)
    return seconds + c.latency + both(2 * copy + 2 * m * c.message, 2 * wire, m)


def binomial(c: Costs, p: int, k: int, n: float) -> float:
    m, hops = ceil(n / c.segment), ceil(log2(p))
    copy = c.inside * n * c.shrink if k > 1 else 0.0
    wire = c.between * n * c.shrink * c.world.crossing
    root = both(c.encode * n + hops * copy + hops * m * c.message, hops * wire, m)
    return root + hops * c.latency + hops * copy / m + hops * wire / m + hops * c.decode * n / m


def pairwise(c: Costs, p: int, k: int, n: float) -> float:
    chunk = n / p
    messages = (p - 1) * ceil(chunk / c.segment)
    copy, wire = c.inside * (k - 1) * chunk * c.shrink, c.between * (p - k) * k * chunk * c.shrink
    return c.latency + both(n * c.encode + n * c.decode + 2 * copy + messages * c.message, wire, messages)


def shared_memory(c: Costs, p: int, k: int, n: float) -> float:
    """Each rank copies in what the p - 1 others add, adds that much for its own part, and copies their sums out."""
    part = n * (p - 1) / p
    return part * c.encode + part * c.add + part * c.decode + ceil(log2(p)) * c.inside_latency


def native(c: Costs, p: int, k: int, n: float, collective: str) -> float:
    """Thakur, Rabenseifner, Gropp 2005."""
    levels, near = ceil(log2(p)), ceil(log2(k)) if p > k else ceil(log2(p))
    beta = max(c.inside if k > 1 or p == k else 0.0, c.between * c.world.crossing)
    tree = levels * c.latency + levels * n * beta
    scattered = (levels + p - 1) * c.latency + 2 * n * beta * (p - 1) / p
    exchanges = near * c.inside_latency + near * n * c.inside + (levels - near) * (c.latency + n * c.between * k)
    halves = 2 * levels * c.latency + (p - 1) / p * n * (2 * beta + c.add)
    chunks = max(c.inside * (k - 1) * n / p, c.between * (p - k) * k * n / p)
    return {
        "alltoall": (p - 1) * c.latency + chunks,
        "allgather": levels * c.latency + (p - 1) * n * beta,
        "bcast": min(tree, scattered),
        "reduce_scatter": levels * c.latency + (p - 1) / p * n * beta + (p - 1) / p * n * c.add,
        "allreduce": min(exchanges + levels * n * c.add, halves),
    }[collective]


def hierarchical(c: Costs, p: int, k: int, n: float) -> float:
    seconds = 0.0
    if k > 1:
        plain, m = c.among(c.world, False), ceil(n / c.segment)
        seconds += 2 * c.inside_latency + (k - 1) * n * (c.inside + plain.accumulate) + 2 * (k - 1) * m * c.message
        seconds += plain.encode * n / m + n * (plain.encode + c.inside + plain.decode)
    if (nodes := p // k) > 1:
        leaders = c.among(World(nodes), True)
        chunk = n / nodes
        seconds += (
            direct(leaders, nodes, 1, chunk, "allreduce") if nodes <= 16 else ring(leaders, nodes, 1, chunk, "sg")
        )
    return seconds


def sparse(c: Costs, p: int, k: int, n: float, algorithm: str) -> float:
    lengths, wires = ceil(log2(p)) * (c.latency + c.message), 2 if algorithm == "sparse_direct" else p
    seconds = (c.encode + c.decode) * n + lengths + 4 * wires * n * c.shrink * c.add
    part = n / p if algorithm == "sparse_direct" else n
    copy = c.inside * part * c.shrink if k > 1 or p == k else 0.0
    wire = c.between * part * c.shrink * c.world.crossing
    if algorithm == "sparse_ring":
        return seconds + (p - 1) * c.latency + max((p - 1) * c.message + p * copy, p * wire)
    if algorithm == "sparse_native":
        return seconds + min(p - 1, 2 * ceil(log2(p))) * c.latency + (p - 1) * max(copy, wire)
    near, far = c.inside * (k - 1) * part * c.shrink, c.between * (p - k) * k * part * c.shrink
    seconds += lengths + c.latency + both(2 * (p - 1) * c.message + near, far, p - 1)
    seconds += 20 * n * c.shrink * c.add + c.encode * part
    return seconds + (p - 1) * (c.latency + max(copy + c.message, wire))


Formula = Callable[[Costs, int, int, float], float]
FORMULAS: dict[tuple[str, str], Formula] = {
    ("ring", "allreduce"): lambda c, p, k, n: ring(c, p, k, n / p, "sg"),
    ("ring", "reduce_scatter"): lambda c, p, k, n: ring(c, p, k, n / p, "s"),
    ("ring", "allgather"): lambda c, p, k, n: ring(c, p, k, n, "g"),
    ("ring", "allgatherv"): lambda c, p, k, n: ring(c, p, k, n, "g"),
    ("direct", "allreduce"): lambda c, p, k, n: direct(c, p, k, n / p, "allreduce"),
    ("direct", "reduce_scatter"): lambda c, p, k, n: direct(c, p, k, n / p, "reduce_scatter"),
    ("direct", "allgather"): lambda c, p, k, n: direct(c, p, k, n, "allgather"),
    ("direct", "allgatherv"): lambda c, p, k, n: direct(c, p, k, n, "allgather"),
    ("recursive_doubling", "allreduce"): doubling,
    ("binomial", "bcast"): binomial,
    ("pairwise", "alltoall"): pairwise,
    ("shared_memory", "allreduce"): shared_memory,
    ("hierarchical", "allreduce"): hierarchical,
    **{
        ("native", name): lambda c, p, k, n, name=name: native(c, p, k, n, name)
        for name in ("alltoall", "allgather", "bcast", "reduce_scatter", "allreduce")
    },
    ("native", "allgatherv"): lambda c, p, k, n: native(c, p, k, n, "allgather"),
    **{
        (name, "allreduce"): lambda c, p, k, n, name=name: sparse(c, p, k, n, name)
        for name in ("sparse_ring", "sparse_native", "sparse_direct")
    },
}
CHUNKED = ("ring", "direct", "pairwise")
BELOW = {("dissemination", "allreduce")}  # with a test of its own
POWERS = [World(2), World(4), World(8, 2), World(8, 4), World(8, 4, 4), World(4, 4), World(32), World(32, 8)]
WORLDS = [*POWERS, World(3), World(5), World(6, 3), World(9, 3, 2), World(3, 3), World(5, 5), World(12, 4), World(17)]
N = 6403.3  # no multiple of anything


def test_every_algorithm_has_its_formulas() -> None:
    known = {(name, collective) for name, record in ALGORITHMS.items() for collective in record.collectives}
    assert known == set(FORMULAS) | BELOW, "FORMULAS needs the seconds of each algorithm and collective"


@pytest.mark.parametrize(("algorithm", "collective"), FORMULAS)
def test_costs_of_all_constants(algorithm: str, collective: str) -> None:
    cost, formula = ALGORITHMS[algorithm].cost, FORMULAS[algorithm, collective]
    for world in WORLDS:
        assert ALGORITHMS[algorithm].parts(world.size) == (world.size if algorithm in CHUNKED else 1)
        situations = [constants(world, N, segment, seed) for seed in range(6) for segment in (60, 700, 1 << 20)]
        told = [cost(c, collective) for c in situations]
        wanted = [formula(c, world.size, world.per_node, N) for c in situations]
        np.testing.assert_allclose(told, wanted, rtol=1e-9, err_msg=str(world))


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_small_arrays_travel_with_the_opening(p: int) -> None:
    """On each of log2 p levels, over the slowest link that there is, and are added there."""
    levels, n = p.bit_length() - 1, 512.0
    cost = ALGORITHMS["dissemination"].cost
    for world in (World(p), World(p, 2), World(p, p)):
        zero: dict[str, Any] = dict.fromkeys(NAMES, 0.0)

        def paid(world: World = world, zero: dict[str, Any] = zero, **some: float) -> Any:
            among = lambda others, coded: constants(others, n, 64, 0)  # noqa: E731
            c = Costs(n=n, world=world, segment=64, shrink=1.0, **{**zero, **some}, among=among)
            return pytest.approx(cost(c, "allreduce"), abs=1e-3)  # without the host's half a microsecond a level

        alone = world.nodes == 1
        assert paid(inside=1.0) == (levels * n if alone else 0)
        assert paid(between=1.0) == (0 if alone else levels * n)
        assert paid(add=1.0) == levels * n


def merged(p: int) -> int:
    """Encodings of teams that halve in number from level to level, and of the ranks beyond a power of two."""
    teams, total = 1 << (p.bit_length() - 1), p - (1 << (p.bit_length() - 1))
    while teams > 1:
        total, teams = total + teams, teams // 2
    return total


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 9, 16, 17])
def test_how_often_values_are_encoded(p: int) -> None:
    """On the way, and in all that a sum holds."""
    told = {
        name: tuple(record.encodings("allreduce", p, p))
        for name, record in ALGORITHMS.items()
        if "allreduce" in record.collectives
    }
    expected = {
        "ring": (p, p),
        "direct": (2, p),
        "recursive_doubling": (ceil(log2(p)), merged(p)),
        "hierarchical": (2, p) if p <= 16 else (p, p),
        "sparse_ring": (1, p),
        "sparse_native": (1, p),
        "sparse_direct": (2, p + 1),
        # Uncompressed.
        **dict.fromkeys(("native", "dissemination", "shared_memory"), (0, 0)),
    }
    assert set(told) == set(expected), "write down how often each algorithm encodes"
    assert told == expected
    assert ALGORITHMS["hierarchical"].encodings("allreduce", p, 1) == (0, 0)
    for name in ("ring", "direct"):
        scattered = ALGORITHMS[name].encodings("reduce_scatter", p, p)
        assert scattered == (p - 1 if name == "ring" else 1, p - 1)
        assert ALGORITHMS[name].encodings("allgather", p, p) == (1, 1)
