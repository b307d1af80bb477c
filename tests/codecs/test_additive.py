"""Codecs whose numbers are added as they are: shared-scale integers and majority votes, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World, exact_sum, magnitude, normals
from hypothesis import given
from hypothesis import strategies as st
from promises import ADDITIVE, ALGORITHMS
from properties import examples

import compcoll
from compcoll import ErrorFeedback, IntSum, Sign
from compcoll.errors import InvalidArgument
from compcoll.host.device import HostDevice

WAYS = [*ALGORITHMS, "auto"]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
ROUNDING = {np.float32: 2.0**-23, np.float64: 2.0**-52, np.float16: 2.0**-10, ml_dtypes.bfloat16: 2.0**-7}

cases = st.fixed_dictionaries(
    {
        "size": st.integers(1, 17),
        "n": st.one_of(st.sampled_from([0, 1, 7, 8, 9, 2048, 2049]), st.integers(0, 9000)),
        "algorithm": st.sampled_from(WAYS),
        "dtype": st.sampled_from(DTYPES),
        "op": st.sampled_from(["sum", "mean"]),
        "ranks_per_node": st.integers(1, 5),
        "seed": st.integers(0, 2**31),
    }
)


def run(case: dict[str, Any], codec: Any, inputs: list[np.ndarray]) -> np.ndarray:
    world = World(case["size"], ranks_per_node=case["ranks_per_node"], seed=case["seed"])
    before = [x.tobytes() for x in inputs]
    results = world.allreduce(inputs, op=case["op"], codec=codec, algorithm=case["algorithm"])
    assert [x.tobytes() for x in inputs] == before
    assert len({result.tobytes() for result in results}) == 1
    return results[0]


@examples(150)
@given(case=cases, bits=st.sampled_from([8, 16, 32]), block=st.sampled_from([8, 64, 2048]))
def test_integers_lose_half_a_step_for_each_rank(case: dict[str, Any], bits: int, block: int) -> None:
    size, n = case["size"], case["n"]
    inputs = normals(size, n, case["dtype"], case["seed"])
    result = run(case, IntSum(bits, block), inputs).astype(np.float64)
    share = size if case["op"] == "mean" else 1
    largest = np.max([np.abs(x.astype(np.float64)) for x in inputs], axis=0) / share
    of_blocks = [largest[i : i + block].max() for i in range(0, n, block)]
    levels = (2 ** (bits - 1) - 1) // size
    bound = np.repeat(of_blocks, block)[:n] / levels * size * 0.5001 if size > 1 else 0.0
    error = np.abs(result - exact_sum(inputs) / share)
    assert (error <= bound + (ROUNDING[case["dtype"]] + 2.0**-22) * magnitude(inputs) + 1e-30).all()


@examples(150)
@given(case=cases)
def test_votes_are_the_sign_of_the_sum_of_signs(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(case["seed"])
    # Zeros and ties, often.
    inputs = [np.round(rng.standard_normal(case["n"])).astype(case["dtype"]) for _ in range(case["size"])]
    expected = np.sign(np.sum([np.sign(x.astype(np.float64)) for x in inputs], axis=0))
    np.testing.assert_array_equal(run(case, Sign(), inputs).astype(np.float64), expected)


@examples(60)
@given(
    case=cases,
    codec=st.sampled_from([IntSum(), IntSum(8, 64), Sign()]),
    kind=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_what_is_not_finite_marks_its_block(case: dict[str, Any], codec: Any, kind: float) -> None:
    n = case["n"] + 1
    inputs = normals(case["size"], n, case["dtype"], case["seed"])
    rank, where = case["seed"] % case["size"], case["seed"] % n
    inputs[rank][where] = kind
    result = run(case, codec, inputs).astype(np.float64)
    assert not np.isfinite(result[where])
    first = where // codec.block * codec.block
    outside = np.ones(n, bool)
    outside[first : first + codec.block] = False
    assert np.isfinite(result[outside]).all()


def test_votes_count_every_rank() -> None:
    """Fields of 2, 4, 8 and 16 bits, all full."""
    for size in (1, 2, 7, 8, 127, 128):
        inputs = [
            np.array([1.0, -1.0, 0.0, 2.0 * (rank % 2) - 1, 5.0, -0.5, 1e-40], np.float32) for rank in range(size)
        ]
        result = World(size).allreduce(inputs, codec="sign", algorithm="ring")[0]
        np.testing.assert_array_equal(result, [1, -1, 0, -(size % 2), 1, -1, 1])


@pytest.mark.parametrize("algorithm", WAYS)
def test_integers_are_added_exactly(algorithm: str) -> None:
    """Values that are levels: nothing is lost, and the result is that of every other algorithm."""
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-31, 32, 5000).astype(np.float32) for _ in range(4)]
    for x in inputs:
        x[::64] = 31
    results = World(4, ranks_per_node=2).allreduce(inputs, codec=IntSum(8, 64), algorithm=algorithm)
    np.testing.assert_allclose(results[0], exact_sum(inputs), rtol=2.0**-22)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_feedback_makes_up_for_the_rounding(algorithm: str) -> None:
    inputs, world = normals(4, 3000), World(4, ranks_per_node=1)
    feedbacks, total, codec = [ErrorFeedback() for _ in inputs], np.zeros(3000), IntSum(8)
    exact = exact_sum(inputs)
    single = np.linalg.norm(world.allreduce(inputs, codec=codec, algorithm=algorithm)[0] - exact)
    for _ in range(64):
        total += world.loopback.run(
            [
                c.iallreduce(x, codec=codec, algorithm=algorithm, feedback=f)
                for c, x, f in zip(world.comms, inputs, feedbacks)
            ]
        )[0]
    assert np.linalg.norm(total / 64 - exact) < single / 16


def test_stats_tell_the_ratio() -> None:
    for codec, ratio in ((IntSum(16), 2.0), (IntSum(8), 4.0), (Sign(), 16.0)):
        world = World(4)
        requests = [c.iallreduce(x, codec=codec, algorithm="ring") for c, x in zip(world.comms, normals(4, 1 << 16))]
        world.loopback.run(requests)
        stats = requests[0].stats
        assert (stats.codec, stats.algorithm) == (repr(codec), "ring")
        assert 0.95 * ratio < stats.ratio <= ratio


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "intsum", "bits": 12}, r"intsum: bits=12 is none of 8, 16, 32"),
        ({"codec": "sign", "scale": "max"}, r"sign: scale='max' is neither"),
        ({"codec": "sign", "feedback": ErrorFeedback()}, r"feedback with Sign\(.*vote"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        World(1).comms[0].allreduce(np.ones(4, np.float32), **options)


def test_only_allreduce_adds_numbers() -> None:
    x = np.ones((2, 4), np.float32)
    for codec in ("intsum", "sign"):
        with pytest.raises(InvalidArgument, match=r"only allreduce"):
            World(1).comms[0].allgather(x, codec=codec, algorithm="ring")
        with pytest.raises(InvalidArgument, match=r"only allreduce"):
            compcoll.encode(x, codec)


def test_too_many_ranks_for_so_few_bits() -> None:
    assert IntSum(8).levels(127) == 1
    with pytest.raises(InvalidArgument, match=r"128 ranks do not fit 8 bits"):
        IntSum(8).levels(128)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sums_of_largest_levels_do_not_overflow(size: int, dtype: Any) -> None:
    """Every rank has the largest magnitude: no float32 holds the highest of 32 bits' levels."""
    for bits in (8, 16, 32):
        x = np.array([1.5, -1.5, 0.75] * 8, dtype)
        result = World(size).allreduce([x] * size, codec="intsum", bits=bits, algorithm="ring")[0]
        np.testing.assert_allclose(result, size * x, rtol=size * 2.0 ** (1 - bits) * 4)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_instruction_sets_agree(dtype: str) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(3001) * 2.0 ** rng.integers(-90, 4, 3001)).astype(dtype)
    x[::50], x[1700] = 0, np.inf
    for codec, ranks in [(codec, ranks) for codec in ADDITIVE for ranks in (1, 3, 100)] + [
        (Sign(), 200),
        (Sign(), 40000),
    ]:
        found = []
        for name in HostDevice.instruction_sets():
            device = HostDevice(1, name)
            bound = codec.quantizer(device, dtype, ranks)
            residual = device.zeros_residual(x.size, dtype) + 1e-6 if bound.feedback else None
            shared_scale = np.zeros(bound.shared_scale(x.size), bound.shared_scale_dtype)
            numbers, out = np.zeros(bound.numbers(x.size), bound.number_dtype), x.copy()
            flat, flat_out = device.flat(x, dtype), device.flat(out, dtype)
            bound.survey(flat, 0.5, residual, shared_scale)
            bound.encode(flat, 0.5, residual, shared_scale, numbers)
            bound.decode(numbers, shared_scale, flat_out)
            kept = b"" if residual is None else residual.tobytes()
            found.append((shared_scale.tobytes(), numbers.tobytes(), kept, out.tobytes()))
        assert all(one == found[0] for one in found)
