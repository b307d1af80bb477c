"""Sparse allreduces: sums, promises and states against NumPy, on 1 to 17 ranks in one process."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World, exact_sum, largest, normals
from hypothesis import given
from hypothesis import strategies as st
from promises import CHOOSING, DTYPES
from properties import examples

import compcoll
from compcoll import ErrorFeedback
from compcoll.errors import CompcollError, InvalidArgument, UnknownAlgorithm, UnsupportedDType, WireCorrupted
from compcoll.host.device import HostDevice
from compcoll.layout import World as Ranks
from compcoll.plan import choose
from compcoll.plan.call import Call, Setting
from compcoll.plan.cost import DEFAULTS
from compcoll.sparse import (
    SparseSum,
    TopK,
)

ALGORITHMS = ["sparse_ring", "sparse_direct", "auto"]
ROUNDING = {np.float32: 2.0**-21, np.float64: 2.0**-48, np.float16: 2.0**-9, ml_dtypes.bfloat16: 2.0**-6}
calls = st.fixed_dictionaries(
    {
        "size": st.integers(1, 17),
        "n": st.one_of(st.sampled_from([0, 1, 2, 15, 16, 17, 1000]), st.integers(0, 30000)),
        "algorithm": st.sampled_from(ALGORITHMS),
        "codec": st.sampled_from(CHOOSING),
        "dtype": st.sampled_from(DTYPES),
        "op": st.sampled_from(["sum", "mean"]),
        "seed": st.integers(0, 2**31),
    }
)


@examples(150)
@given(call=calls)
def test_nothing_is_lost_and_all_ranks_have_the_same_bits(call: dict[str, Any]) -> None:
    size, n, dtype = call["size"], call["n"], call["dtype"]
    world, inputs = World(size, seed=call["seed"]), normals(size, n, dtype, call["seed"])
    options = {name: call[name] for name in ("algorithm", "codec", "op")}
    states = [ErrorFeedback() for _ in range(size)]
    before = [x.tobytes() for x in inputs]
    total, scale = np.zeros(n), size if call["op"] == "mean" else 1
    for _ in range(2):
        requests = [
            comm.iallreduce(x, feedback=state, **options)
            for comm, x, state in zip(world.comms, inputs, states, strict=True)
        ]
        results = world.loopback.run(requests)
        assert len({result.tobytes() for result in results}) == 1 and results[0].dtype == inputs[0].dtype
        total += results[0].astype(np.float64)
    assert [x.tobytes() for x in inputs] == before
    kept = exact_sum([state.residual for state in states])
    exact = 2 * exact_sum(inputs) / scale
    bound = ROUNDING[dtype] * 2 * np.sum([np.abs(x.astype(np.float64)) for x in inputs], axis=0).max(initial=0) / scale
    assert np.abs(total + kept - exact).max(initial=0) <= bound
    stats = world.comms[0].stats
    assert stats is not None and stats.codec == repr(call["codec"]) and stats.algorithm.startswith("sparse_")
    assert " of " in stats.wire_format and stats.wire_nbytes >= 0


@examples(60)
@given(call=calls, density=st.sampled_from([0.001, 0.02, 0.3, 1.0]))
def test_exact_choice_sums_what_numpy_chooses(call: dict[str, Any], density: float) -> None:
    size, n, dtype = call["size"], call["n"], call["dtype"]
    inputs = normals(size, n, dtype, call["seed"])
    world = World(size, seed=call["seed"])
    results = world.allreduce(inputs, codec="topk", density=density, select="exact", algorithm="sparse_ring")
    expected = np.sum([largest(x, math.ceil(density * n)) for x in inputs], axis=0)
    # Of equal magnitudes of halves with unlike signs any order of sums is the same: they are exact in float64.
    tolerance = ROUNDING[dtype] * np.abs(expected).max(initial=1)
    np.testing.assert_allclose(results[0].astype(np.float64), expected, atol=tolerance, rtol=0)


@examples(60)
@given(call=calls, kind=st.sampled_from([np.nan, np.inf, -np.inf]), data=st.data())
def test_non_finite_values_survive(call: dict[str, Any], kind: float, data: st.DataObject) -> None:
    size, n = call["size"], max(call["n"], 1)
    inputs = normals(size, n, call["dtype"], call["seed"])
    rank, at = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, n - 1))
    inputs[rank][at] = kind
    states = [ErrorFeedback() for _ in range(size)]
    world = World(size, seed=call["seed"])
    results = world.loopback.run(
        [
            comm.iallreduce(x, codec=call["codec"], algorithm=call["algorithm"], feedback=state)
            for comm, x, state in zip(world.comms, inputs, states, strict=True)
        ]
    )
    for result in results:
        assert not np.isfinite(result[at].astype(np.float64))
        assert np.count_nonzero(~np.isfinite(result.astype(np.float64))) == 1
    assert all(np.isfinite(state.residual).all() for state in states)


@examples(60)
@given(call=calls)
def test_sparse_results_are_the_dense_ones(call: dict[str, Any]) -> None:
    inputs = [x.reshape(-1, 1) for x in normals(call["size"], call["n"], call["dtype"], call["seed"])]
    options = {name: call[name] for name in ("algorithm", "op")}
    world = World(call["size"], seed=call["seed"])
    dense = world.allreduce(inputs, codec=call["codec"], **options)
    settings = {name: value for name, value in vars(call["codec"]).items() if name != "out_format"}
    found = world.allreduce(inputs, codec=call["codec"].name, out_format="sparse", **settings, **options)
    for result in found:
        assert isinstance(result, SparseSum) and result.shape == inputs[0].shape
        assert np.all(np.diff(result.indices.astype(np.int64)) > 0)
        filled = np.zeros(call["n"], call["dtype"])
        filled[result.indices] = result.values
        np.testing.assert_array_equal(filled.reshape(-1, 1), dense[0])


def test_in_place_and_empty_contributions() -> None:
    inputs = [np.zeros(1000, np.float32) for _ in range(5)]
    inputs[2][7:9] = [3.0, -4.0]
    for algorithm in ALGORITHMS:
        world, mine = World(5), [x.copy() for x in inputs]
        requests = [c.iallreduce(x, codec="topk", algorithm=algorithm, out=x) for c, x in zip(world.comms, mine)]
        results = world.loopback.run(requests)
        assert all(result is x for result, x in zip(results, mine))
        np.testing.assert_array_equal(results[0], inputs[2])


def test_direct_sends_two_wires_whatever_the_number_of_ranks() -> None:
    n, density = 100_000, 0.01
    pair = 8 * 1.5 * density * n
    for size in (4, 8, 16):
        inputs = normals(size, n)
        for algorithm, wires in [("sparse_ring", size - 1), ("sparse_direct", 2)]:
            world = World(size)
            world.allreduce(inputs, codec=TopK(density, wire="pairs"), algorithm=algorithm)
            for comm in world.comms:
                assert comm.stats is not None
                assert comm.stats.wire_nbytes <= wires * pair + 100 * size
                assert comm.stats.ratio > 30


@pytest.mark.parametrize(("algorithm", "times"), [("sparse_ring", 1), ("sparse_direct", 2)])
def test_what_was_sent_is_told_as_if_it_was_not_compressed(algorithm: str, times: int) -> None:
    """All but the own elements to each other rank: once, or first their parts to owners and then these's sums."""
    ranks, n = 3, 30_000
    world = World(ranks)
    world.allreduce(normals(ranks, n), codec=TopK(0.01), algorithm=algorithm)
    sent = sum(comm.stats.raw_sent_nbytes for comm in world.comms)  # type: ignore[union-attr]
    assert abs(sent - times * ranks * (ranks - 1) * n * 4 / (ranks if times == 2 else 1)) < 100


def test_direct_keeps_the_largest_sums() -> None:
    """What many ranks agree on survives; feedback keeps the rest, see the first test."""
    n, size = 5000, 8
    inputs = normals(size, n, scale=0.01)
    for x in inputs:
        x[100:3000:100] += 1.0
    results = World(size).allreduce(inputs, codec=TopK(0.02, "exact"), algorithm="sparse_direct")
    assert np.all(results[0][100:3000:100] > 6)
    assert np.count_nonzero(results[0]) <= 0.02 * n + size


def test_randomk_chooses_alike_on_all_ranks_and_anew_in_every_call() -> None:
    size, n = 3, 10_000
    world, inputs = World(size), normals(size, n)
    states = [ErrorFeedback() for _ in range(size)]
    chosen = []
    for _ in range(3):
        results = world.loopback.run(
            [
                comm.iallreduce(x, codec="randomk", density=0.05, feedback=state)
                for comm, x, state in zip(world.comms, inputs, states, strict=True)
            ]
        )
        chosen.append(set(np.flatnonzero(results[0])))
        assert len(chosen[-1]) == 500
    assert len(chosen[0] & chosen[1]) < 100 and states[0].calls == 3


REFUSED: list[tuple[dict[str, Any], type[CompcollError], str]] = [
    ({"codec": "topk", "density": 0}, InvalidArgument, "density=0 must be above 0"),
    ({"codec": "topk", "density": 1.5}, InvalidArgument, "at most 1"),
    ({"codec": "topk", "density": "x"}, InvalidArgument, "number"),
    ({"codec": "topk", "select": "best"}, InvalidArgument, '"exact", "hierarchical"'),
    ({"codec": "topk", "wire": "zip"}, InvalidArgument, '"pairs", "packed"'),
    ({"codec": "topk", "out_format": "csr"}, InvalidArgument, '"dense" nor "sparse"'),
    ({"codec": "strom", "wire": "packed"}, InvalidArgument, "signs"),
    ({"codec": "strom", "threshold": -1}, InvalidArgument, "above 0"),
    ({"codec": "randomk", "seed": -1}, InvalidArgument, "seed"),
    ({"codec": "variance"}, InvalidArgument, "VarianceFeedback"),
    ({"codec": "hybrid", "feedback": ErrorFeedback()}, InvalidArgument, "VarianceFeedback"),
    ({"codec": "topk", "out_format": "sparse", "out": np.zeros(10, np.float32)}, InvalidArgument, "no out"),
    ({"codec": "topk", "algorithm": "ring"}, UnknownAlgorithm, "do not go together"),
    ({"codec": "zfp", "algorithm": "sparse_ring"}, UnknownAlgorithm, "do not go together"),
    ({"codec": "topk", "algorithm": "sparse_native"}, UnknownAlgorithm, "MPI"),
    ({"codec": "topk", "op": "max"}, InvalidArgument, "max"),
    ({"codec": "topk", "x": np.zeros(10, np.int32)}, UnsupportedDType, "int32"),
]


@pytest.mark.parametrize(
    ("options", "error", "text"), REFUSED, ids=lambda v: str(v)[:50] if isinstance(v, dict) else ""
)
def test_refused_by_name(options: dict[str, Any], error: type[CompcollError], text: str) -> None:
    arguments = {"x": np.ones(10, np.float32)} | options
    x = arguments.pop("x")
    for raised in (world := World(2)).errors([lambda comm: comm.iallreduce(x, **arguments)] * 2):
        assert type(raised) is error and raised is not None
        assert text in str(raised), str(raised)
    assert world.allreduce([np.ones(3, np.float32)] * 2)[0].tolist() == [2, 2, 2]


def test_auto_goes_by_regions_where_ranks_are_many() -> None:
    def chosen(size: int, nbytes: int) -> str:
        call = Call("allreduce", nbytes // 4, "float32", 4, "sum", TopK(0.01), choose.AUTO)
        setting = Setting(Ranks(size), HostDevice(), DEFAULTS, library="", shared=False)
        return choose.chosen(call, setting).algorithm

    assert chosen(2, 1 << 26) == "sparse_ring"
    assert chosen(64, 1 << 26) == "sparse_direct"
    assert chosen(256, 1 << 26) == "sparse_direct"


def test_other_collectives_take_sparse_codecs() -> None:
    x = normals(3, 600)
    gathered = World(3).run(lambda comm, mine: comm.iallgather(mine, codec="topk", density=0.1, select="exact"), x)
    for result in gathered:
        np.testing.assert_allclose(result, [largest(mine, 60) for mine in x], rtol=1e-6)
    assert compcoll.get_codec("topk", density=0.5) == TopK(0.5)


@pytest.mark.parametrize("algorithm", ["sparse_ring", "sparse_direct"])
@pytest.mark.parametrize("part", ["head", "indices"])
def test_a_corrupted_wire_is_named(monkeypatch: pytest.MonkeyPatch, algorithm: str, part: str) -> None:
    """One rank's bytes are spoilt on their way out: whoever gets them says so, and nobody reads out of bounds."""
    size, n = 3, 4000
    world, inputs = World(size, timeout=5), normals(size, n)
    outs = [np.zeros(n, np.float32) for _ in range(size)]
    spoilt = world.loopback.transports[1]
    send = spoilt.isend

    def isend(wire: Any, dest: int, tag: int) -> Any:
        if wire.nbytes > 64:
            at = 16 if part == "head" else 32
            wire.buffer[at : at + 8] = 0xFF
        return send(wire, dest, tag)

    monkeypatch.setattr(spoilt, "isend", isend)
    requests = [
        comm.iallreduce(x, codec=TopK(0.05, wire="pairs"), algorithm=algorithm, out=out)
        for comm, x, out in zip(world.comms, inputs, outs, strict=True)
    ]
    with pytest.raises(CompcollError):
        world.loopback.run(requests)
    errors = [request._error for request in requests]
    assert any(isinstance(error, WireCorrupted) for error in errors), errors
    assert all(not out.any() for out, error in zip(outs, errors) if error is not None)
