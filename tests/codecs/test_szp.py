"""szp: its wires in NumPy, and what it promises of sums."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World, exact_sum
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

import compcoll
from compcoll import SZP, ErrorFeedback
from compcoll.errors import InvalidArgument, WireCorrupted
from compcoll.host.device import HostDevice
from compcoll.host.szp import SzpCoder, _warn_that_nothing_is_saved

SETS = HostDevice.instruction_sets()
ALGORITHMS = ["ring", "recursive_doubling", "direct", "hierarchical"]
BLOCK, LANES, RAW = 512, 16, 255


def bind(dtype: Any, *, tolerance: float, ranks: int = 1, instruction_set: str | None = None) -> SzpCoder:
    return HostDevice(1, instruction_set).szp(np.dtype(dtype).name, tolerance, None, ranks)


def encoded(coder: SzpCoder, x: np.ndarray | None, *wires: np.ndarray, n: int = 0) -> np.ndarray:
    n = n if x is None else x.size
    wire = np.full(coder.wire_nbytes(n) + 64, 0xA5, np.uint8)
    length = coder.encode(n, x, wires, wire[:-64])
    assert (wire[length:] == 0xA5).all()
    return wire[:length]


def decoded(coder: SzpCoder, dtype: Any, n: int, *wires: np.ndarray, add: np.ndarray | None = None) -> np.ndarray:
    out = np.full(n + 16, 7, dtype)
    coder.decode(n, add, wires, out[:n])
    assert (out[n:] == 7).all()
    return out[:n]


def step_of(tolerance: float, ranks: int) -> float:
    """Two parts of the tolerance less 2**-19, of which 12 bits are kept."""
    mantissa, exponent = math.frexp(tolerance / ranks * 2 * (1 - 2.0**-19))
    return math.ldexp(math.floor(4096 * mantissa), exponent - 12)


def wire_of(x: np.ndarray, tolerance: float, ranks: int = 1) -> tuple[bytes, np.ndarray]:
    """The wire of an array, bit by bit, and what it decodes to."""
    step = step_of(tolerance, ranks)
    firsts, widths, blocks, values = [], [], [], []
    for begin in range(0, x.size, BLOCK):
        part = x[begin : begin + BLOCK]
        limit = x.dtype.type(min(step * ((2**31 - 2**9) // ranks - 1), float(np.finfo(x.dtype).max) - step))
        if not (np.abs(part) <= limit).all():
            firsts.append(0)
            widths.append(RAW)
            blocks.append(part.tobytes())
            values.append(part)
            continue
        integers = np.rint(part.astype(np.float64) * (1 / step)).astype(np.int64)
        # Of 32 bits; of sums of them, too, only the lower 32 count.
        differences = np.diff(integers, prepend=integers[0]).astype(np.int32).astype(np.int64)
        width = max(int(d if d >= 0 else ~d).bit_length() + 1 for d in differences) if differences.any() else 0
        rows = -(-part.size // LANES)
        codes = np.zeros(rows * LANES, np.int64)
        codes[: part.size] = differences
        bits = (codes.reshape(rows, LANES).T[:, :, None] >> np.arange(width)) & 1
        lanes = np.zeros((LANES, -(-rows * width // 32) * 32), np.uint8)
        lanes[:, : rows * width] = bits.reshape(LANES, -1)
        words = np.packbits(lanes, axis=1, bitorder="little").view("<u4")
        firsts.append(int(integers[0]))
        widths.append(width)
        blocks.append(words.T.tobytes())
        values.append((integers * step).astype(x.dtype))
    table = np.array(firsts, "<i4").tobytes() + bytes(widths) + bytes(-len(widths) % 4)
    return np.float64(step).tobytes() + table + b"".join(blocks), np.concatenate([*values, x[:0]])


def with_every_exponent(dtype: Any, n: int, seed: int) -> np.ndarray:
    """Runs of values, smooth or not, of any magnitude that the type has; also zeros, NaN and Inf."""
    rng = np.random.default_rng(seed)
    finest, largest = (-148, 127) if dtype == np.float32 else (-1070, 1023)
    x = np.empty(n, dtype)
    for begin in range(0, n, 300):
        part = x[begin : begin + 300]
        kind = rng.integers(0, 6)
        values = np.cumsum(rng.standard_normal(part.size)) if kind == 0 else rng.uniform(-1, 1, part.size)
        exponent = rng.integers(finest, largest, part.size if kind == 1 else 1)
        near = rng.integers(-12, 14)
        with np.errstate(over="ignore"):
            part[:] = np.ldexp(values, exponent if kind in (1, 2) else near)
        if kind == 3:
            part[rng.integers(0, part.size)] = rng.choice([0.0, -0.0, np.nan, np.inf, -np.inf])
    return x


def near_enough(results: np.ndarray, inputs: list[np.ndarray], tolerance: float, scale: float = 1.0) -> np.ndarray:
    """Where results are within the tolerance and half a unit in the last place; those of raw blocks as other sums."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide = [x.astype(np.longdouble) for x in inputs]
        right, magnitudes = sum(wide) * scale, sum(map(np.abs, wide)) * scale
        half = np.spacing(np.abs(results)).astype(np.longdouble) / 2
        limit = step_of(tolerance, len(inputs)) / scale * ((2**31 - 2**9) // len(inputs) - 2)
        starts = range(0, results.size, BLOCK)
        greatest = np.max([np.maximum.reduceat(np.abs(x), starts) for x in inputs], axis=0)
        raw = np.repeat(~(greatest <= limit), BLOCK)[: results.size]
        # As many roundings as there are additions and encodings of a partial sum.
        allowed = tolerance + np.where(raw, 4 * len(inputs) * np.finfo(results.dtype).eps * magnitudes, half)
        overflows = raw & (magnitudes >= np.finfo(results.dtype).max)
        return (np.abs(results - right) <= allowed) | overflows | (~np.isfinite(right) & ~np.isfinite(results))


@examples(150)
@given(
    dtype=st.sampled_from([np.float32, np.float64]),
    n=st.integers(0, 3000),
    seed=st.integers(0, 2**31),
    tolerance=st.floats(1e-6, 1e3),
    ranks=st.sampled_from([1, 2, 3, 8, 1000]),
    instruction_set=st.sampled_from(SETS),
)
def test_wires_are_as_defined(
    dtype: Any, n: int, seed: int, tolerance: float, ranks: int, instruction_set: str
) -> None:
    x = with_every_exponent(dtype, n, seed)
    wire, values = wire_of(x, tolerance, ranks)
    coder = bind(dtype, tolerance=tolerance, ranks=ranks, instruction_set=instruction_set)
    assert encoded(coder, x).tobytes() == wire
    got = decoded(coder, dtype, n, np.frombuffer(wire, np.uint8))
    np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize("width", range(33))
@pytest.mark.parametrize("instruction_set", SETS)
def test_every_width(width: int, instruction_set: str) -> None:
    """Differences of each number of bits, also of sums, in full blocks and short ones."""
    rng = np.random.default_rng(width)
    coder = bind(np.float64, tolerance=0.51, instruction_set=instruction_set)
    step = step_of(0.51, 1)
    most = 2 ** max(width - 2, 0) if width else 0
    x = rng.integers(-most, most, 1200, endpoint=True) * step if width < 32 else np.tile([-(2**29), 2**29], 600) * step
    wire, values = wire_of(x, 0.51)
    assert encoded(coder, x).tobytes() == wire
    for wires, add in (([wire, wire], None), ([wire], x), ([wire, wire, wire], None)):
        arrays = [np.frombuffer(each, np.uint8) for each in wires]
        total = decoded(coder, np.float64, 1200, encoded(coder, add, *arrays, n=1200))
        np.testing.assert_array_equal(total, values * (len(wires) + (add is not None)))
        np.testing.assert_array_equal(decoded(coder, np.float64, 1200, *arrays, add=add), total)


@examples(60)
@given(
    size=st.integers(1, 9),
    per_node=st.integers(1, 4),
    n=st.integers(1, 4000),
    dtype=st.sampled_from([np.float32, np.float64]),
    algorithm=st.sampled_from(ALGORITHMS),
    op=st.sampled_from(["sum", "mean"]),
    tolerance=st.floats(1e-5, 100),
    seed=st.integers(0, 2**31),
)
def test_sums_are_within_the_tolerance(
    size: int, per_node: int, n: int, dtype: Any, algorithm: str, op: str, tolerance: float, seed: int
) -> None:
    inputs = [with_every_exponent(dtype, n, seed + rank) for rank in range(size)]
    world = World(size, ranks_per_node=per_node)
    with np.errstate(all="ignore"):
        results = world.run(
            lambda comm, x: comm.iallreduce(x, op=op, codec=SZP(tolerance=tolerance), algorithm=algorithm), inputs
        )
    assert len({result.tobytes() for result in results}) == 1
    if size > 1:
        assert near_enough(results[0], inputs, tolerance, 1 / size if op == "mean" else 1.0).all()


@examples(25)
@given(
    n=st.integers(1, 5000),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    options=st.sampled_from([{"tolerance": 0.01}, {"tolerance": 3e-7}, {"relative": 1e-2}]),
    seed=st.integers(0, 2**31),
)
def test_the_same_bits_by_every_algorithm_and_in_every_order(
    n: int, dtype: Any, options: dict[str, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    inputs = [(rng.standard_normal(n) * 3).astype(dtype) for _ in range(4)]
    found = set()
    for number, order in enumerate(permutations(inputs)):
        for algorithm in ALGORITHMS[number % 4 :][:1] if number else ALGORITHMS:
            for per_node in (1, 2, 3, 4):
                world = World(4, ranks_per_node=per_node)
                results = world.run(
                    lambda comm, x, way=algorithm: comm.iallreduce(x, codec=SZP(**options), algorithm=way), order
                )
                found |= {result.tobytes() for result in results}
    assert len(found) == 1


def test_other_reductions_have_the_same_bits() -> None:
    rng = np.random.default_rng(5)
    inputs = [rng.standard_normal((4, 700)).astype(np.float32) for _ in range(4)]
    codec = SZP(tolerance=1e-3)
    whole = World(4).run(lambda comm, x: comm.iallreduce(x, codec=codec), inputs)[0]
    for algorithm in ("ring", "direct"):
        how: dict[str, Any] = {"codec": codec, "algorithm": algorithm}
        parts = World(4).run(lambda comm, x, how=how: comm.ireduce_scatter(x, **how), inputs)
        assert np.concatenate(parts).tobytes() == whole.tobytes()
        total = World(4).run(lambda comm, x, how=how: comm.ireduce(x, **how), inputs)[0]
        assert total.tobytes() == whole.tobytes()


def test_relative_is_of_all_ranks_largest_magnitude() -> None:
    """Not of a rank's own: the one large value is on the last rank, and NaN and Inf do not count."""
    inputs = [np.linspace(-1, 1, 2000, dtype=np.float32) for _ in range(3)]
    inputs[2][7], inputs[1][1999], inputs[0][0] = -50, np.inf, np.nan
    for op in ("sum", "mean"):
        results = World(3).run(lambda comm, x, op=op: comm.iallreduce(x, op=op, codec="szp", relative=1e-2), inputs)
        likewise = World(3).run(lambda comm, x, op=op: comm.iallreduce(x, op=op, codec="szp", tolerance=0.5), inputs)
        np.testing.assert_array_equal(results, likewise)
    results = World(3).run(lambda comm, x: comm.iallreduce(x, codec="szp", relative=1e-2), inputs)
    error = np.abs(results[0] - exact_sum(inputs))[520:1500]
    assert 0.05 < error.max() <= 0.5
    zeros = World(3).run(lambda comm, x: comm.iallreduce(x, codec="szp"), [0 * x[520:1500] for x in inputs])
    assert not np.any(zeros)


@pytest.mark.parametrize("large", [0, 1e12])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_feedback_keeps_this_ranks_rounding_error(algorithm: str, large: float) -> None:
    """Also where a block travels uncompressed because of another rank's value."""
    inputs = [np.random.default_rng(rank).standard_normal(3000) for rank in range(3)]
    inputs[2][7] += large
    reductions = ["allreduce", *({"ring", "direct"} & {algorithm} and ["reduce_scatter", "reduce"])]
    for collective in reductions:
        world, feedbacks = World(3, ranks_per_node=2), [ErrorFeedback() for _ in inputs]
        how: dict[str, Any] = {"codec": SZP(tolerance=0.3), "algorithm": algorithm}
        results = world.run(
            lambda comm, given, name=f"i{collective}", how=how: getattr(comm, name)(given[0], feedback=given[1], **how),
            list(zip(inputs, feedbacks, strict=True)),
        )
        total = np.concatenate(results) if collective == "reduce_scatter" else results[0]
        residuals = [feedback.residual for feedback in feedbacks]
        assert all(0 < np.abs(residual).max() <= 0.1 for residual in residuals)
        np.testing.assert_allclose(total + sum(residuals), exact_sum(inputs), rtol=1e-15, atol=1e-9)


def test_warns_if_nothing_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(1).standard_normal(5000)
    for quiet in (np.full(5000, np.nan), np.ones(5000)):  # overflowing gradients, and smooth data
        compcoll.encode(quiet, codec="szp", tolerance=1e-3)
    assert not caplog.records
    _warn_that_nothing_is_saved.cache_clear()
    for _ in range(2):
        compcoll.encode(x, codec="szp", tolerance=1e-300)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "szp saves nothing on some arrays of float64" in record.getMessage()


def test_bad_tolerances() -> None:
    for options in ({"tolerance": 0}, {"tolerance": -1.0}, {"tolerance": math.nan}, {"relative": 2.0}):
        with pytest.raises(InvalidArgument, match="must be"):
            SZP(**options)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        SZP(tolerance=1.0, relative=0.1)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("tolerance", [5e-324, 1e-310, 100.0, 1e308])
def test_extreme_tolerances(dtype: Any, tolerance: float) -> None:
    kind, codec = ml_dtypes.finfo(dtype), SZP(tolerance=tolerance)
    x = np.array([0.0, 1.0, -3.5, kind.max, kind.smallest_subnormal], dtype)
    got = compcoll.decode(compcoll.encode(x, codec), x.shape, dtype, codec)
    assert (np.abs(got.astype(np.longdouble) - x.astype(np.longdouble)) <= tolerance).all()


def test_changed_wires_are_refused() -> None:
    x = np.random.default_rng(3).standard_normal(1300).astype(np.float32)
    coder = bind(np.float32, tolerance=1e-3)
    wire = encoded(coder, x)
    table = 8 + 4 * 3
    for change in (
        lambda: wire[:-1],
        lambda: wire[:table],
        lambda: wire[:5],
        lambda: np.append(wire, wire[:4]),
        lambda: np.concatenate([wire[:table], [33], wire[table + 1 :]]).astype(np.uint8),
        lambda: np.concatenate([wire[:table], [wire[table] + 1], wire[table + 1 :]]).astype(np.uint8),
        lambda: encoded(bind(np.float32, tolerance=2e-3), x),
    ):
        with pytest.raises(WireCorrupted, match="szp wire of 1300 values"):
            decoded(coder, np.float32, 1300, change())


@examples(200)
@given(content=st.binary(max_size=3000), n=st.integers(0, 1500), widths=st.lists(st.integers(0, 32), max_size=3))
def test_any_bytes_are_refused_or_decode_alike(content: bytes, n: int, widths: list[int]) -> None:
    """Also bytes after a table that a wire may have."""
    step, blocks = step_of(1e-3, 1), -(-n // BLOCK)
    known = (widths + [RAW] * blocks)[:blocks]
    front = np.float64(step).tobytes() + content[: 4 * blocks].ljust(4 * blocks, b"x")
    front += bytes(known) + bytes(-blocks % 4)
    lengths = [min(BLOCK, n - begin) for begin in range(0, n, BLOCK)]
    rows = [math.ceil(length / LANES) for length in lengths]
    nbytes = sum(
        4 * length if width == RAW else 64 * math.ceil(row * width / 32)
        for width, length, row in zip(known, lengths, rows, strict=True)
    )
    body = (content * (nbytes // max(len(content), 1) + 1)).ljust(nbytes, b"y")[:nbytes]
    for wire in (content, front + body):
        found = []
        for one in SETS:
            coder = bind(np.float32, tolerance=1e-3, instruction_set=one)
            try:
                found.append(decoded(coder, np.float32, n, np.frombuffer(wire, np.uint8)).tobytes())
            except WireCorrupted:
                found.append(b"refused")
        assert len(set(found)) == 1
    assert found[0] != b"refused"
