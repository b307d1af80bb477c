"""The promises of the library, over codec × algorithm × element type × rank count, in one process."""

from __future__ import annotations

import itertools

import numpy as np
import promises
import pytest
from algorithms.references import reference
from fakes.loopback import World, exact_sum, magnitude, normals
from hypothesis import given
from hypothesis import strategies as st
from promises import ADDITIVE, ALGORITHMS, CODECS, DTYPES, ENCODED, Case, check_codec, one_encoding
from properties import examples

from compcoll import ZFP, Codec, ErrorFeedback, MinMax

cases = st.builds(
    Case,
    codec=st.sampled_from(CODECS),
    algorithm=st.sampled_from(ALGORITHMS),
    n=st.one_of(st.sampled_from([0, 1, 3, 4, 5, 63, 64, 65, 255, 2047, 2048, 2049]), st.integers(0, 20000)),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "mean"]),
    seed=st.integers(0, 2**31),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(draw(st.integers(1, 17)), ranks_per_node=draw(st.integers(1, 5)), seed=draw(st.integers(0, 2**31)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("codec", [*CODECS, *ADDITIVE], ids=repr)
def test_codec(codec: Codec | None, algorithm: str) -> None:
    """Every promise by every algorithm; the property tests below have other sizes, types and numbers of ranks."""
    for size, per_node, dtype in ((1, 1, np.float32), (2, 1, np.float32), (3, 2, np.float64), (4, 2, np.float16)):
        check_codec(Case(codec, algorithm, 5001, dtype), World(size, ranks_per_node=per_node))


@examples(300)
@given(case=cases, world=worlds())
def test_same_bits_everywhere_and_error_within_bound(case: Case, world: World) -> None:
    promises.check_same_bits_within_bound(case, world)


@examples(100)
@given(case=cases, world=worlds(), kind=st.sampled_from([np.nan, np.inf, -np.inf]), data=st.data())
def test_non_finite_values_survive(case: Case, world: World, kind: float, data: st.DataObject) -> None:
    rank, at = data.draw(st.integers(0, world.size - 1)), data.draw(st.integers(0, max(case.n - 1, 0)))
    promises.check_not_finite_survives(case, world, kind, rank, at)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_stats_tell_how_much_was_sent(algorithm: str, size: int) -> None:
    world = World(size, ranks_per_node=1)
    n = 256 * 64 * size
    requests = [c.iallreduce(x, codec=ZFP(rate=8), algorithm=algorithm) for c, x in zip(world.comms, normals(size, n))]
    world.loopback.run(requests)
    for request, comm in zip(requests, world.comms):
        stats = request.stats
        assert comm.stats is stats
        assert (stats.codec, stats.algorithm) == (repr(ZFP(rate=8)), algorithm)
        assert stats.raw_nbytes == 4 * n
        assert stats.ratio == pytest.approx(4.0)
        assert 0 < stats.total_seconds and 0 <= stats.wait_seconds <= stats.total_seconds
    if (sent := reference(algorithm).sent) is not None:
        assert {request.stats.wire_nbytes for request in requests} == {sent(size) * n}


def test_auto_tells_when_it_does_not_compress() -> None:
    world = World(1)
    (request,) = [world.comms[0].iallreduce(np.ones(3, np.float32), codec="zfp")]
    assert request.wait().tolist() == [1, 1, 1]
    assert (request.stats.codec, request.stats.algorithm) == (None, "copy")


FED = [c for c in ENCODED if (error := c.encoding_error("float32")) is None or 0 < error < 0.5]


FEEDING = [
    # Each codec by each algorithm is quick once, on 3 or 4 ranks.
    pytest.param(*(codec, algorithm, size), marks=[pytest.mark.slow] * (size != 3 + (at + number) % 2))
    for at, codec in enumerate(FED)
    for number, algorithm in enumerate(ALGORITHMS)
    for size in (2, 3, 4, 6)
]


@pytest.mark.parametrize(("codec", "algorithm", "size"), FEEDING)
def test_feedback_makes_up_for_the_loss(algorithm: str, size: int, codec: Codec) -> None:
    """The mean over many calls on the same values comes closer to the exact sum than a call without feedback."""
    inputs = normals(size, 3000)
    world = World(size, ranks_per_node=1)
    exact = exact_sum(inputs)
    single = world.allreduce(inputs, codec=codec, algorithm=algorithm)[0]
    feedbacks = [ErrorFeedback() for _ in inputs]
    total, rounds = np.zeros(3000), 64
    for _ in range(rounds):
        requests = [
            c.iallreduce(x, codec=codec, algorithm=algorithm, feedback=f)
            for c, x, f in zip(world.comms, inputs, feedbacks)
        ]
        total += world.loopback.run(requests)[0]
    without = np.sqrt(np.mean((single - exact) ** 2))
    with_feedback = np.sqrt(np.mean((total / rounds - exact) ** 2))
    assert with_feedback < without / 8


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_several_in_flight(size: int) -> None:
    world = World(size)
    algorithms = ["ring", *ALGORITHMS]
    batches = [normals(size, n, seed=n) for n, _ in zip(itertools.cycle((7, 3000, 0, 20000)), algorithms)]
    started = [
        [comm.iallreduce(x, codec="minmax", algorithm=algorithm) for comm, x in zip(world.comms, inputs)]
        for inputs, algorithm in zip(batches, algorithms, strict=True)
    ]
    for inputs, requests in reversed(list(zip(batches, started, strict=True))):
        results = world.loopback.run(requests)
        assert len({r.tobytes() for r in results}) == 1
        bound = size * one_encoding(MinMax(), float(magnitude(inputs).max(initial=0)) * 2) + 1e-5
        assert np.abs(results[0] - exact_sum(inputs)).max(initial=0) <= bound
