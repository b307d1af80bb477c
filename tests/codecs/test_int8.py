"""int8 against its formula in NumPy, on every instruction set, and what gradients' sums become with it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World, exact_sum, magnitude, normals
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.quantizers import blocks_of_all_kinds
from promises import ALGORITHMS, ENCODINGS

import compcoll
from compcoll import ErrorFeedback, Int8
from compcoll.dtypes import DTYPES
from compcoll.host.device import HostDevice

SETS = HostDevice.instruction_sets()


def reference(x: np.ndarray, block: int) -> tuple[bytes, np.ndarray]:
    """The wire, and what it decodes to: the formula, where the scale and the product have x's type."""
    real, limits = x.dtype.type, np.finfo(x.dtype)
    wire, values = b"", []
    for begin in range(0, x.size, block):
        part = x[begin : begin + block]
        largest = np.abs(part).max()
        scale, codes = real(0), np.zeros(part.size, np.int8)
        if not np.isfinite(largest):
            scale = real(np.nan)
        elif largest >= 2.0 ** (-80 if real is np.float32 else -900):
            scale = real(largest / real(127))
            with np.errstate(over="ignore"):
                if not np.isfinite(scale * real(127)):
                    scale = np.nextafter(scale, real(0))
            with np.errstate(under="ignore"):
                codes = np.rint((part / scale).astype(np.float64)).astype(np.int8)
        assert np.abs(codes.astype(int)).max() <= 127
        wire += scale.tobytes() + codes.tobytes()
        got = codes.astype(x.dtype) * scale + real(0)
        assert not np.isfinite(largest) or (np.abs(got) <= limits.max).all()
        values.append(got if np.isfinite(largest) else np.full(part.size, np.nan, x.dtype))
    return wire, np.concatenate(values) if values else x


def encode(instruction_set: str, codec: Int8, x: np.ndarray) -> np.ndarray:
    coder = codec.coder(HostDevice(1, instruction_set), x.dtype.name)
    wire = np.empty(coder.wire_nbytes(x.size), np.uint8)
    coder.encode(x.size, HostDevice.flat(x, x.dtype.name), (), wire)
    return wire


def decode(instruction_set: str, codec: Int8, wire: np.ndarray, n: int, dtype: Any) -> np.ndarray:
    out = np.empty(n, dtype)
    name = out.dtype.name
    codec.coder(HostDevice(1, instruction_set), name).decode(n, None, (wire,), HostDevice.flat(out, name))
    return out


@pytest.mark.parametrize("instruction_set", SETS)
@given(
    block=st.sampled_from([8, 24, 64, 256, 1000]),
    n=st.integers(0, 3000),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=80, deadline=None)
@example(block=256, n=2999, dtype=np.float32, seed=0)
def test_bytes_are_those_of_the_formula(instruction_set: str, block: int, n: int, dtype: Any, seed: int) -> None:
    x = blocks_of_all_kinds(dtype, n, seed).astype(dtype)
    wire = encode(instruction_set, Int8(block), x)
    expected, values = reference(x, block)
    # Which NaN a NaN is does not matter, and blocks that are not finite hold zeros.
    assert wire.nbytes == len(expected)
    got = decode(instruction_set, Int8(block), wire, n, dtype)
    np.testing.assert_array_equal(got, values)
    size = np.dtype(dtype).itemsize
    for begin in range(0, n, block):
        at = begin // block * (size + block)
        m = min(block, n - begin)
        own, theirs = wire[at : at + size + m].tobytes(), expected[at : at + size + m]
        nan = np.isnan(np.frombuffer(theirs, dtype, 1)[0])
        assert own[size:] == theirs[size:] and (nan or own == theirs)


@pytest.mark.parametrize("instruction_set", SETS)
def test_bytes_by_hand(instruction_set: str) -> None:
    """Scale 2: ties to even, the largest magnitude is 127 whatever its sign, a block of zeros is zeros."""
    x = np.array([254, -254, 1, 3, 5, -1, -3, 0] + [0] * 8, np.float32)
    wire = encode(instruction_set, Int8(8), x)
    assert wire.tobytes().hex() == "00000040" + "7f8100020200fe00" + "00000000" + "00" * 8


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("instruction_set", SETS)
def test_the_largest_finite_numbers_stay_finite(instruction_set: str, dtype: Any) -> None:
    for largest in (ml_dtypes.finfo(dtype).max, np.nextafter(ml_dtypes.finfo(dtype).max, dtype(0))):
        x = np.array([largest, -largest, largest / dtype(2), 0, 0, 0, 0, 0], dtype)
        got = decode(instruction_set, Int8(8), encode(instruction_set, Int8(8), x), 8, dtype).astype(np.float64)
        rounding = 0.51 / 127 + DTYPES[x.dtype.name].rounding
        assert np.isfinite(got).all() and np.abs(got - x.astype(np.float64)).max() <= float(largest) * rounding


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_sums(algorithm: str, p: int) -> None:
    inputs = normals(p, 5000)
    world = World(p, ranks_per_node=2)
    results = world.allreduce(inputs, codec="int8", algorithm=algorithm)
    assert len({result.tobytes() for result in results}) == 1
    hops = ENCODINGS[algorithm](p, world.nodes)
    bound = (1 + 0.51 / 127) ** hops - 1
    assert np.abs(results[0] - exact_sum(inputs)).max() <= bound * magnitude(inputs).max() + 1e-5


def test_a_scale_a_row() -> None:
    """With rows of very different size, as of layers' gradients, a scale for each keeps the small ones."""
    rows = np.random.default_rng(0).standard_normal((32, 120)) * 10.0 ** np.linspace(-6, 6, 32)[:, None]
    x = rows.astype(np.float32)
    by_rows = compcoll.decode(compcoll.encode(x, "int8", block=120), x.shape, x.dtype, "int8", block=120)
    assert (np.abs(by_rows - x).max(axis=1) <= np.abs(x).max(axis=1) * (0.5 / 127 + 1e-6)).all()
    as_one = compcoll.decode(compcoll.encode(x, "int8", block=3840), x.shape, x.dtype, "int8", block=3840)
    assert not as_one[0].any()


def test_feedback_makes_up_for_what_is_lost() -> None:
    """The mean over many calls on the same values comes closer to the exact sum than a call without feedback."""
    inputs = normals(3, 4096)
    world, states = World(3), [ErrorFeedback() for _ in range(3)]
    exact, total, rounds = exact_sum(inputs), np.zeros(4096), 64
    for _ in range(rounds):
        calls = [
            comm.iallreduce(x, codec="int8", algorithm="direct", feedback=state)
            for comm, x, state in zip(world.comms, inputs, states, strict=True)
        ]
        total += world.loopback.run(calls)[0]
    once = world.allreduce(inputs, codec="int8", algorithm="direct")[0]
    assert np.linalg.norm(total / rounds - exact) < np.linalg.norm(once - exact) / 8
