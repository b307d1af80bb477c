"""reduce_scatter, allgather, allgatherv, bcast and alltoall, in one process."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World, exact_sum, magnitude, normals
from hypothesis import given
from hypothesis import strategies as st
from promises import CODECS, DTYPES, ROUNDING, one_encoding
from properties import examples

from compcoll import Codec
from compcoll.errors import InvalidBuffer

cases = st.fixed_dictionaries(
    {
        "size": st.integers(1, 9),
        "n": st.integers(0, 5000),
        "algorithm": st.sampled_from(["ring", "direct"]),
        "codec": st.sampled_from(CODECS),
        "dtype": st.sampled_from(DTYPES),
        "seed": st.integers(0, 2**31),
    }
)


def tolerance(case: dict[str, Any], largest: float, encodings: int) -> float:
    if case["size"] == 1:
        return 0.0
    lossy = (largest + 1) * ((1 + one_encoding(case["codec"], 1.0)) ** encodings - 1)
    return lossy + ROUNDING[case["dtype"]] * largest * (case["size"] + 1) + 1e-30


def close(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    return bool(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0) <= bound)


@examples(80)
@given(case=cases, columns=st.integers(1, 3))
def test_reduce_scatter(case: dict[str, Any], columns: int) -> None:
    size, rows = case["size"], case["n"] // 10
    inputs = [
        x.reshape(size * rows, columns) for x in normals(size, size * rows * columns, case["dtype"], case["seed"])
    ]
    world = World(size, seed=case["seed"])
    results = world.run(
        lambda comm, x: comm.ireduce_scatter(x, codec=case["codec"], algorithm=case["algorithm"]), inputs
    )
    expected = exact_sum(inputs).reshape(size, rows, columns)
    bound = tolerance(case, float(magnitude(inputs).max(initial=0)), size)
    for rank, result in enumerate(results):
        assert result.shape == (rows, columns) and result.dtype == inputs[0].dtype
        assert close(result, expected[rank], bound)


@examples(80)
@given(case=cases)
def test_allgather(case: dict[str, Any]) -> None:
    inputs = normals(case["size"], case["n"], case["dtype"], case["seed"])
    world = World(case["size"], seed=case["seed"])
    results = world.run(lambda comm, x: comm.iallgather(x, codec=case["codec"], algorithm=case["algorithm"]), inputs)
    assert len({result.tobytes() for result in results}) == 1
    bound = tolerance(case, float(magnitude(inputs).max(initial=0)), 1)
    assert results[0].shape == (case["size"], case["n"])
    assert close(results[0], np.stack(inputs), bound)


@examples(80)
@given(case=cases, data=st.data())
def test_allgatherv(case: dict[str, Any], data: st.DataObject) -> None:
    size = case["size"]
    counts = data.draw(st.lists(st.integers(0, 700), min_size=size, max_size=size))
    rng = np.random.default_rng(case["seed"])
    inputs = [rng.standard_normal((count, 3)).astype(case["dtype"]) for count in counts]
    world = World(size, seed=case["seed"])
    results = world.run(lambda comm, x: comm.iallgatherv(x, codec=case["codec"], algorithm=case["algorithm"]), inputs)
    assert len({result.tobytes() for result in results}) == 1
    expected = np.concatenate(inputs)
    assert results[0].shape == expected.shape
    assert close(results[0], expected, tolerance(case, float(np.abs(expected.astype(float)).max(initial=0)), 1))


@examples(80)
@given(case=cases, data=st.data())
def test_bcast(case: dict[str, Any], data: st.DataObject) -> None:
    root = data.draw(st.integers(0, case["size"] - 1))
    inputs = normals(case["size"], case["n"], case["dtype"], case["seed"])
    world = World(case["size"], seed=case["seed"])
    results = world.run(lambda comm, x: comm.ibcast(x, root, codec=case["codec"], algorithm="binomial"), inputs)
    assert len({result.tobytes() for result in results}) == 1
    bound = tolerance(case, float(np.abs(inputs[root].astype(float)).max(initial=0)), 1)
    assert close(results[0], inputs[root], bound)


@examples(80)
@given(case=cases)
def test_alltoall(case: dict[str, Any]) -> None:
    size, rows = case["size"], case["n"] // 8
    inputs = [x.reshape(size, rows) for x in normals(size, size * rows, case["dtype"], case["seed"])]
    world = World(size, seed=case["seed"])
    results = world.run(lambda comm, x: comm.ialltoall(x, codec=case["codec"], algorithm="pairwise"), inputs)
    bound = tolerance(case, float(magnitude(inputs).max(initial=0)), 1)
    for rank, result in enumerate(results):
        assert close(result, np.stack([x[rank] for x in inputs]), bound)


@pytest.mark.parametrize("codec", [None, "minmax"])
def test_shapes_and_out(codec: Codec | None) -> None:
    world = World(3)
    inputs = [np.full((6, 2), rank + 1, np.float32) for rank in range(3)]
    algorithm = {"algorithm": "direct"}
    blocks = world.run(lambda c, x: c.ireduce_scatter(x, codec=codec, op="mean", **algorithm), inputs)
    assert [b.tolist() for b in blocks] == [[[2.0, 2.0]] * 2] * 3
    outs = [np.empty((3, 6, 2), np.float32) for _ in range(3)]
    gathered = world.loopback.run(
        [c.iallgather(x, codec=codec, out=o, **algorithm) for c, x, o in zip(world.comms, inputs, outs)]
    )
    assert all(a is b for a, b in zip(gathered, outs))
    assert [block.mean() for block in gathered[0]] == [1.0, 2.0, 3.0]
    received = [np.zeros((6, 2), np.float32) for _ in range(3)]
    world.loopback.run(
        [
            c.ibcast(x if c.rank == 1 else o, 1, codec=codec, algorithm="binomial", out=o)
            for c, x, o in zip(world.comms, inputs, received)
        ]
    )
    assert all((o == 2).all() for o in received)


def test_a_half_that_is_moved_keeps_its_bits() -> None:
    world = World(2)
    inputs = [np.array([1.5, np.nan, np.inf, -0.0, 6e-8], np.float16), np.array([2.0, 0, 1, 3, 4], np.float16)]
    for result in world.run(lambda c, x: c.iallgather(x, algorithm="ring"), inputs):
        assert result.tobytes() == np.stack(inputs).tobytes()
    halves = [x.astype(ml_dtypes.bfloat16) for x in inputs]
    for result in world.run(lambda c, x: c.iallgather(x, algorithm="direct"), halves):
        assert result.tobytes() == np.stack(halves).tobytes()


@pytest.mark.parametrize("collective", ["ireduce_scatter", "ialltoall"])
def test_first_axis_must_split(collective: str) -> None:
    world = World(2)
    errors = world.errors([lambda c: getattr(c, collective)(np.ones((3, 2), np.float32), algorithm="auto")] * 2)
    assert all(isinstance(error, InvalidBuffer) and "multiple of the 2 ranks" in str(error) for error in errors)
