"""The growth of errors along an algorithm, against its encodings one by one: of partial sums of how many terms."""

from __future__ import annotations

import itertools
import math

import pytest
from algorithms.references import reference
from promises import algorithms_of

from compcoll import QSGD, ZFP, Codec, MinMax, OneBit, Sign, TernGrad
from compcoll.algorithms import ALGORITHMS, DENSE
from compcoll.algorithms.record import REDUCTIONS, Encodings, Growth
from compcoll.layout import World
from compcoll.plan import accuracy

SUMMING = [(name, collective) for collective in REDUCTIONS for name in algorithms_of(collective)]
"""The algorithms and collectives that encode partial sums."""


@pytest.mark.parametrize("again", [0.0, 0.25, -0.25])
@pytest.mark.parametrize("p", [2, 4, 16])
@pytest.mark.parametrize(("algorithm", "collective"), SUMMING)
def test_independent_errors(algorithm: str, collective: str, p: int, again: float) -> None:
    growth = ALGORITHMS[algorithm].growth(collective, p, p, again)
    assert growth.independent == pytest.approx(math.sqrt(reference(algorithm).variance[collective](p, again) / p))


@pytest.mark.parametrize("p", [2, 4, 16])
@pytest.mark.parametrize(("algorithm", "collective"), SUMMING)
def test_errors_that_add_up(algorithm: str, collective: str, p: int) -> None:
    growth = ALGORITHMS[algorithm].growth(collective, p, p, 0.0)
    assert growth.alike == pytest.approx(reference(algorithm).alike[collective](p))


@pytest.mark.parametrize("p", [2, 4, 16])
def test_a_rings_integral_is_close_to_its_sum(p: int) -> None:
    in_ring = sum(map(math.sqrt, range(1, p + 1))) / math.sqrt(p)
    assert ALGORITHMS["ring"].growth("allreduce", p, p, 0.0).alike == pytest.approx(in_ring, rel=0.25)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 8, 9, 16, 17, 18])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_how_often_values_are_encoded(algorithm: str, p: int) -> None:
    """On the way, and in all that a sum holds."""
    record = ALGORITHMS[algorithm]
    for collective, nodes in itertools.product(set(REDUCTIONS) & set(record.collectives), {1, 2, p}):
        known = reference(algorithm).encodings[collective](p, nodes)
        assert record.encodings(collective, p, nodes) == known, (collective, nodes)


@pytest.mark.parametrize(
    "algorithm",
    [record.name for record in DENSE if set(record.steps) - set(REDUCTIONS) and not record.by_mpi],
)
def test_what_is_only_moved_is_encoded_once(algorithm: str) -> None:
    record = ALGORITHMS[algorithm]
    for collective in set(record.collectives) - set(REDUCTIONS):
        assert record.growth(collective, 8, 4, 0.5) == Growth(1.0, 0.0), collective
        assert record.encodings(collective, 8, 4) == Encodings(1, 1), collective


def test_single_ranks() -> None:
    codec = ZFP(rate=8)
    assert accuracy.relative_error(codec, "float32", "allreduce", "ring", World(1)) == 0.0
    assert accuracy.encodings("allreduce", "ring", World(1)) == 0
    once, bias = codec.encoding_error("float32"), codec.bias(recoded=False)
    expected = once * math.hypot(math.sqrt((7 + 3 * once**2) / 4), bias * 2.5)
    assert accuracy.relative_error(codec, "float32", "allreduce", "direct", World(4)) == pytest.approx(expected)


@pytest.mark.parametrize("codec", [ZFP(rate=8), MinMax(8), QSGD(4)], ids=repr)
def test_nodes_err_as_direct_among_their_leaders(codec: Codec) -> None:
    for nodes in (2, 32):
        direct = accuracy.relative_error(codec, "float32", "allreduce", "direct", World(nodes))
        world = World(2 * nodes, per_node=2)
        assert accuracy.relative_error(codec, "float32", "allreduce", "hierarchical", world) == direct


@pytest.mark.parametrize(
    ("codec", "algorithm", "measured"),
    [
        (TernGrad(), "ring", 11.0),
        (OneBit(), "ring", 0.95),
        (OneBit(), "recursive_doubling", 0.95),
        (Sign("mean"), "direct", 0.77),
        (MinMax(3, block=64), "ring", 1.7),
    ],
    ids=repr,
)
def test_large_errors_do_not_grow_without_bound(codec: Codec, algorithm: str, measured: float) -> None:
    """On 64 ranks, as measured: docs/measurements/errors.md."""
    estimate = accuracy.relative_error(codec, "float32", "allreduce", algorithm, World(64))
    assert estimate == pytest.approx(measured, rel=0.3)
