"""The growth of errors along an algorithm, against its encodings one by one: of partial sums of how many terms."""

from __future__ import annotations

import math

import pytest
from promises import ALGORITHMS as ALLREDUCES
from promises import algorithms_of

from compcoll import QSGD, ZFP, Codec, MinMax
from compcoll.algorithms import ALGORITHMS, DENSE
from compcoll.algorithms.record import Encodings, Growth
from compcoll.layout import World
from compcoll.plan import accuracy


def along(terms: range, once: float) -> float:
    """The variance, in units of ε², of partial sums of so many terms that are encoded one after the other."""
    variance = 0.0
    for j in terms:
        variance += j + once**2 * variance
    return variance


def doubled(levels: int, once: float) -> float:
    """The same of recursive doubling, which encodes both halves of what a level adds."""
    if levels == 0:
        return 0.0
    half = doubled(levels - 1, once)
    return 2 * (half + 2 ** (levels - 1) + once**2 * half)


def summing() -> set[tuple[str, str]]:
    """The algorithms and collectives that encode partial sums."""
    return {(name, collective) for collective in ("allreduce", "reduce_scatter") for name in algorithms_of(collective)}


@pytest.mark.parametrize("once", [0.0, 0.5])
@pytest.mark.parametrize("p", [2, 4, 16])
def test_independent_errors(p: int, once: float) -> None:
    levels = p.bit_length() - 1
    singles = p - 1  # direct: every single term but the owner's, and then their sum
    variances = {
        ("ring", "allreduce"): along(range(1, p + 1), once),
        ("ring", "reduce_scatter"): along(range(1, p), once),
        ("direct", "allreduce"): singles + (p + once**2 * singles),
        ("direct", "reduce_scatter"): p,  # an upper bound: of the p terms one is not encoded
        ("hierarchical", "allreduce"): singles + (p + once**2 * singles),
        ("recursive_doubling", "allreduce"): doubled(levels, once),
    }
    assert set(variances) == summing(), "write down the variance of each"
    for (algorithm, collective), variance in variances.items():
        growth = ALGORITHMS[algorithm].growth(collective, p, p, once)
        assert growth.independent == pytest.approx(math.sqrt(variance / p)), (algorithm, collective)


@pytest.mark.parametrize("p", [2, 4, 16])
def test_errors_that_add_up(p: int) -> None:
    """``Σ √j / √p``; a ring's sum is that of an integral."""
    levels = p.bit_length() - 1
    singles = (p - 1) / math.sqrt(p)
    halves = sum(p / 2**level * math.sqrt(2**level) for level in range(levels)) / math.sqrt(p)
    sums = {"direct": singles + 1, "hierarchical": singles + 1, "recursive_doubling": halves}
    assert {*sums, "ring"} == set(ALLREDUCES), "write down the sum of each"
    for algorithm, expected in sums.items():
        assert ALGORITHMS[algorithm].growth("allreduce", p, p, 0.0).alike == pytest.approx(expected)
    in_ring = sum(map(math.sqrt, range(1, p + 1))) / math.sqrt(p)
    assert ALGORITHMS["ring"].growth("allreduce", p, p, 0.0).alike == pytest.approx(in_ring, rel=0.25)
    # An upper bound: of the p terms one is not encoded.
    scattered = ALGORITHMS["direct"].growth("reduce_scatter", p, p, 0.0)
    assert scattered[:2] == (1.0, pytest.approx(math.sqrt(p))) and scattered.alike > singles


@pytest.mark.parametrize(
    "algorithm",
    [record.name for record in DENSE if set(record.steps) - {"allreduce", "reduce_scatter"} and not record.by_mpi],
)
def test_what_is_only_moved_is_encoded_once(algorithm: str) -> None:
    record = ALGORITHMS[algorithm]
    for collective in set(record.collectives) - {"allreduce", "reduce_scatter"}:
        assert record.growth(collective, 8, 4, 0.5) == Growth(1.0, 0.0), collective
        assert record.encodings(collective, 8, 4) == Encodings(1, 1), collective


def test_encodings_of_a_value() -> None:
    """On its way at most, and all whose losses are in a result."""
    counts = {
        (algorithm, collective, p): tuple(ALGORITHMS[algorithm].encodings(collective, p, p))
        for algorithm, collective in summing()
        for p in (2, 3, 4, 6)
    }
    seen = {(name, "allreduce") for name in ("ring", "direct", "hierarchical", "recursive_doubling")}
    assert summing() == seen | {(name, "reduce_scatter") for name in ("ring", "direct")}, "compare each below"
    for p in (2, 3, 4, 6):
        assert counts["ring", "allreduce", p] == (p, p)
        assert counts["ring", "reduce_scatter", p] == (p - 1, p - 1)
        assert counts["direct", "allreduce", p] == counts["hierarchical", "allreduce", p] == (2, p)
        assert counts["direct", "reduce_scatter", p] == (1, p - 1)
    # Of four ranks: four single terms, and two sums; of six, two more are sent to their partners first.
    told = [counts["recursive_doubling", "allreduce", p] for p in (2, 3, 4, 6)]
    assert told == [(1, 2), (2, 3), (2, 6), (3, 8)]


def test_nodes_and_single_ranks() -> None:
    assert ALGORITHMS["hierarchical"].encodings("allreduce", 8, 1) == Encodings(0, 0)
    assert ALGORITHMS["hierarchical"].encodings("allreduce", 8, 4) == Encodings(2, 4)
    codec = ZFP(rate=8)
    assert accuracy.relative_error(codec, "float32", "allreduce", "ring", World(1)) == 0.0
    assert accuracy.encodings("allreduce", "ring", World(1)) == 0
    once, bias = codec.encoding_error("float32"), codec.bias(recoded=False)
    expected = once * math.hypot(math.sqrt(7 / 4), bias * 2.5)
    assert accuracy.relative_error(codec, "float32", "allreduce", "direct", World(4)) == pytest.approx(expected)


@pytest.mark.parametrize("codec", [ZFP(rate=8), MinMax(8), QSGD(4)], ids=repr)
def test_many_nodes_err_as_a_ring_of_their_leaders(codec: Codec) -> None:
    for nodes in (17, 32):
        ring = accuracy.relative_error(codec, "float32", "allreduce", "ring", World(nodes))
        world = World(2 * nodes, per_node=2)
        assert accuracy.relative_error(codec, "float32", "allreduce", "hierarchical", world) == ring
