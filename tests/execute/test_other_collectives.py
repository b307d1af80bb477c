"""All collectives but allreduce, in one process."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from algorithms.references import reference
from fakes.loopback import World, exact_sum, magnitude, normals
from hypothesis import given
from hypothesis import strategies as st
from promises import CODECS, DTYPES, ROUNDING, algorithms_of, one_encoding
from properties import examples

from compcoll import Cast, Codec, ErrorFeedback
from compcoll.errors import InvalidArgument, InvalidBuffer

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


@examples(80)
@given(case=cases, data=st.data(), mean=st.booleans())
def test_reduce(case: dict[str, Any], data: st.DataObject, mean: bool) -> None:
    size = case["size"]
    root, inputs = data.draw(st.integers(0, size - 1)), normals(size, case["n"], case["dtype"], case["seed"])
    before = [x.tobytes() for x in inputs]
    options = {"codec": case["codec"], "algorithm": case["algorithm"], "op": "mean" if mean else "sum"}
    world = World(size, seed=case["seed"])
    bound = tolerance(case, float(magnitude(inputs).max(initial=0)), size)
    for _ in range(2):  # the second one repeats a program
        results = world.run(lambda comm, x: comm.ireduce(x, root, **options), inputs)
        assert [result is None for result in results] == [rank != root for rank in range(size)]
        assert results[root].dtype == inputs[0].dtype and [x.tobytes() for x in inputs] == before
        assert close(results[root], exact_sum(inputs) / (size if mean else 1), bound)


@examples(80)
@given(case=cases, data=st.data())
def test_gather(case: dict[str, Any], data: st.DataObject) -> None:
    root = data.draw(st.integers(0, case["size"] - 1))
    inputs = normals(case["size"], case["n"], case["dtype"], case["seed"])
    world = World(case["size"], seed=case["seed"])
    results = world.run(lambda comm, x: comm.igather(x, root, codec=case["codec"], algorithm="linear"), inputs)
    assert [result is None for result in results] == [rank != root for rank in range(case["size"])]
    assert results[root].shape == (case["size"], case["n"])
    assert close(results[root], np.stack(inputs), tolerance(case, float(magnitude(inputs).max(initial=0)), 1))


@examples(80)
@given(case=cases, data=st.data())
def test_scatter(case: dict[str, Any], data: st.DataObject) -> None:
    size, rows = case["size"], case["n"] // 8
    root = data.draw(st.integers(0, size - 1))
    inputs = [x.reshape(size * rows, 1) for x in normals(size, size * rows, case["dtype"], case["seed"])]
    world = World(size, seed=case["seed"])
    results = world.run(lambda comm, x: comm.iscatter(x, root, codec=case["codec"], algorithm="linear"), inputs)
    bound = tolerance(case, float(np.abs(inputs[root].astype(float)).max(initial=0)), 1)
    for rank, result in enumerate(results):
        assert result.shape == (rows, 1)
        assert close(result, inputs[root][rank * rows : (rank + 1) * rows], bound)


@examples(80)
@given(case=cases, data=st.data())
def test_alltoallv(case: dict[str, Any], data: st.DataObject) -> None:
    """The counts differ from rank to rank, and from call to call of one plan; what is empty is not sent."""
    size = case["size"]
    row = st.lists(st.sampled_from([0, 0, 1, 17, 700]), min_size=size, max_size=size)
    world = World(size, seed=case["seed"])
    for number in range(2):
        counts = data.draw(st.lists(row, min_size=size, max_size=size))
        rng = np.random.default_rng(case["seed"] + number)
        inputs = [rng.standard_normal((sum(each), 2)).astype(case["dtype"]) for each in counts]
        before = [x.tobytes() for x in inputs]
        results = world.run(
            lambda comm, x: comm.ialltoallv(x, counts[comm.rank], codec=case["codec"], algorithm="pairwise"),  # noqa: B023
            inputs,
        )
        assert [x.tobytes() for x in inputs] == before
        parts = [np.split(x, np.cumsum(each)[:-1]) for x, each in zip(inputs, counts)]
        bound = tolerance(case, max(float(np.abs(x.astype(float)).max(initial=0)) for x in inputs), 1)
        for rank, result in enumerate(results):
            right = np.concatenate([part[rank] for part in parts])
            assert result.shape == right.shape and result.dtype == right.dtype and close(result, right, bound)
            stats = world.comms[rank].stats
            others = sum(counts[rank]) - counts[rank][rank]
            assert stats is not None and (stats.wire_nbytes > 0) == (others > 0)
            assert stats.raw_sent_nbytes == 2 * others * inputs[0].itemsize


@pytest.mark.parametrize("algorithm", algorithms_of("reduce"))
@pytest.mark.parametrize(("codec", "code"), [(Cast("float16"), np.float16), (None, np.float32)], ids=repr)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_bits_of_a_reduce(algorithm: str, codec: Codec | None, code: Any, size: int) -> None:
    """The results are those of the allreduce, except for the chunk that the root owns, which is not encoded."""
    xs, root = normals(size, 64 * size, seed=size), size // 2
    replay = reference(algorithm).replay
    assert replay is not None
    from_root = [xs[(root + rank) % size] for rank in range(size)]
    expected = replay(from_root, lambda x: x.astype(code).astype(np.float32))
    result = World(size).run(lambda comm, x: comm.ireduce(x, root, codec=codec, algorithm=algorithm), xs)[root]
    np.testing.assert_array_equal(result[64:], expected[64:])
    np.testing.assert_array_equal(result[:64].astype(code), expected[:64].astype(code))


@pytest.mark.parametrize("algorithm", algorithms_of("reduce"))
def test_estimated_error_is_that_of_the_root(algorithm: str) -> None:
    inputs = normals(8, 1 << 15)
    for codec in ("minmax:bits=4,block=64", "zfp:rate=8"):
        for root in (0, 5):
            world, options = World(8, ranks_per_node=1), {"codec": codec, "algorithm": algorithm}
            result = world.run(lambda comm, x: comm.ireduce(x, root, **options), inputs)[root]  # noqa: B023
            exact = exact_sum(inputs)
            estimate = world.comms[root].explain(inputs[0], collective="reduce", root=root, **options).error
            assert estimate == pytest.approx(np.linalg.norm(result - exact) / np.linalg.norm(exact), rel=0.3)


def test_feedback_of_a_reduce() -> None:
    """The mean over many calls comes close to the exact sum."""
    inputs, world = normals(3, 3000), World(3)
    feedback, total = [ErrorFeedback() for _ in inputs], np.zeros(3000)
    options: dict[str, Any] = {"codec": "minmax", "bits": 3, "algorithm": "direct"}
    single = world.run(lambda comm, x: comm.ireduce(x, 1, **options), inputs)[1]
    for _ in range(20):
        total += world.run(lambda comm, x: comm.ireduce(x, 1, feedback=feedback[comm.rank], **options), inputs)[1]
    exact = exact_sum(inputs)
    assert np.std(total / 20 - exact) < np.std(single - exact) / 4


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


@pytest.mark.parametrize("root", [3, -1, 1.0, None])
@pytest.mark.parametrize("collective", ["bcast", "reduce", "gather", "scatter"])
def test_a_wrong_root_is_refused_on_all_ranks(collective: str, root: Any) -> None:
    world, x = World(3), np.ones(6, np.float32)
    starts = [lambda comm, at=at: getattr(comm, f"i{collective}")(x, at) for at in (0, root, 0)]
    errors = world.errors(starts)
    assert isinstance(errors[1], InvalidArgument) and "is not a rank of this communicator: 0 to 2" in str(errors[1])
    assert all("rank 1: " in str(errors[rank]) for rank in (0, 2))
    algorithm = algorithms_of(collective)[0]
    assert world.errors([lambda comm: getattr(comm, f"i{collective}")(x, 2, algorithm=algorithm)] * 3) == [None] * 3


@pytest.mark.parametrize("counts", [[2, 4], [2, 2, 2, 0], [7, 0, -1], [1, 2, 2], [2.0, 2.0, 2.0], 6, None, "222"])
def test_wrong_counts_are_refused_on_all_ranks(counts: Any) -> None:
    world, x, usual = World(3), np.ones(6, np.float32), {"algorithm": "pairwise"}
    errors = world.errors(
        [lambda comm, each=each: comm.ialltoallv(x, each, **usual) for each in ([6, 0, 0], counts, [2] * 3)]
    )
    assert isinstance(errors[1], InvalidArgument) and "3 whole numbers are needed" in str(errors[1])
    assert all("rank 1: " in str(errors[rank]) for rank in (0, 2))
    right = [np.array([2, 2, 2]), (2, 2, 2), [np.int64(6), False, 0]]
    assert world.errors([lambda comm: comm.ialltoallv(x, right[comm.rank], **usual)] * 3) == [None] * 3
    error = world.errors([lambda comm: comm.ialltoallv(np.array(1, np.float32), [1, 0, 0])] * 3)[0]
    assert isinstance(error, InvalidBuffer) and "x has no axes, but alltoallv" in str(error)


@pytest.mark.parametrize("collective", ["ireduce_scatter", "ialltoall", "iscatter"])
def test_first_axis_must_split(collective: str) -> None:
    world = World(2)
    errors = world.errors([lambda c: getattr(c, collective)(np.ones((3, 2), np.float32), algorithm="auto")] * 2)
    assert all(isinstance(error, InvalidBuffer) and "multiple of the 2 ranks" in str(error) for error in errors)
