"""Selectors and sparse wires against NumPy, on every instruction set."""

from __future__ import annotations

import math
import shutil
import struct
import subprocess
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

import compcoll
from compcoll.devices.host import HostDevice
from compcoll.dtypes import DTYPES, numpy_dtype
from compcoll.errors import WireCorrupted
from compcoll.sparse import RandomK, TopK, Variance
from compcoll.sparse.contract import FULL, POWER, SIGN, WIRES
from compcoll.sparse.selectors import SELECTORS

SETS = HostDevice.instruction_sets()
KINDS = ["normal", "laplace", "shifted", "zeros", "ties", "constant", "few", "huge", "tiny"]
MOST = {"exact": 1.0, "trimmed": 1.0, "ldte": 1.5, "hierarchical": 2.0, "bisection": 2.0}


def values(kind: str, n: int, dtype: Any, seed: int, bad: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = {
        "normal": lambda: rng.standard_normal(n),
        "laplace": lambda: rng.laplace(size=n),
        "shifted": lambda: rng.standard_normal(n) + 3,
        "zeros": lambda: np.zeros(n),
        "ties": lambda: rng.integers(-3, 4, n),
        "constant": lambda: np.full(n, -0.7),
        "few": lambda: rng.standard_normal(n) * (rng.random(n) < 0.003),
        "huge": lambda: rng.standard_normal(n) * 1e37,
        "tiny": lambda: rng.standard_normal(n) * 1e-41,
    }[kind]()
    x = np.asarray(x, np.float64).astype(dtype)
    if n:
        x[rng.integers(0, n, bad)] = rng.choice([np.nan, np.inf, -np.inf], bad)
    return x


def check_largest(x: np.ndarray, indices: np.ndarray, k: int, most: float) -> None:
    """Promises of every selector: NumPy's order of magnitudes is the oracle."""
    magnitude = np.where(np.isfinite(x), np.abs(x), np.inf)
    chosen = np.zeros(x.size, bool)
    chosen[indices] = True
    assert np.all(np.diff(indices.astype(np.int64)) > 0)
    assert chosen[~np.isfinite(x)].all()
    assert not chosen[x == 0].any()
    infinite, nonzero = int(np.count_nonzero(~np.isfinite(x))), int(np.count_nonzero(x))
    assert min(k, nonzero) <= indices.size <= max(math.ceil(most * k), k + (most > 1), infinite)
    if 0 < indices.size < nonzero:
        assert magnitude[chosen].min() >= magnitude[~chosen].max()


arrays = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "n": st.one_of(st.integers(1, 300), st.integers(300, 20000), st.sampled_from([65536, 70001, 200_003])),
        "dtype": st.sampled_from([np.float32, np.float64]),
        "seed": st.integers(0, 1000),
        "bad": st.sampled_from([0, 0, 0, 1, 5]),
    }
)


@pytest.mark.parametrize("select", list(SELECTORS))
@examples(60)
@given(array=arrays, density=st.sampled_from([1e-4, 1e-3, 0.01, 0.1, 0.3, 0.9, 1.0]))
def test_the_largest(select: str, array: dict[str, Any], density: float) -> None:
    x = values(**array)
    k = min(math.ceil(density * x.size), x.size)
    found = []
    for instruction_set in SETS:
        kernels = HostDevice(1, instruction_set).selection(x.dtype.name)
        found.append(SELECTORS[select](kernels, x, k))
    assert all(np.array_equal(found[0], other) for other in found[1:])
    check_largest(x, found[0], k, MOST[select])
    if select in ("exact", "trimmed") and np.isfinite(x).all():
        nonzero = np.flatnonzero(x)
        order = np.lexsort((nonzero, -np.abs(x[nonzero])))
        assert np.array_equal(found[0], np.sort(nonzero[order[:k]]))


@pytest.mark.parametrize(("k", "passes"), [(1, 1), (20, 1), (21, 2), (40, 2), (60, 3), (80, 4), (100, 5)])
def test_the_threshold_of_redsync_falls_in_steps(k: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the mean, 50, to the largest, 100: above 90, 80, 70, 60 and 50 are 10 values each of both signs.

    J. Fang et al., JPDC 133, 2019, algorithm 2, with steps of a fifth.
    """
    kernels = HostDevice(1, SETS[0]).selection("float64")
    x = np.r_[np.arange(51, 101), -np.arange(51, 101), np.full(100, 24.5)].astype(np.float64)
    assert np.abs(x).mean() == 50
    thresholds: list[float] = []
    above = type(kernels).above

    def count(self: Any, values: Any, threshold: float, limit: int) -> Any:
        thresholds.append(threshold)
        return above(self, values, threshold, limit)

    monkeypatch.setattr(type(kernels), "above", count)
    found = SELECTORS["trimmed"](kernels, x, k)
    assert list(dict.fromkeys(thresholds)) == pytest.approx([90, 80, 70, 60, 50][:passes])
    assert sorted(np.abs(x[found]))[0] == 100 - (k - 1) // 2
    assert found.size == k


@examples(60)
@given(array=arrays)
def test_passes(array: dict[str, Any]) -> None:
    x = values(**array)
    finite = x[np.isfinite(x)].astype(np.float64)
    threshold = float(np.median(np.abs(finite))) if finite.size else 1.0
    infinite = ~np.isfinite(x)
    above = np.flatnonzero(infinite | (np.abs(x) > x.dtype.type(threshold)))
    variances = np.abs(values("laplace", x.size, x.dtype, array["seed"] + 1, 0)) * x.dtype.type(threshold)
    with np.errstate(all="ignore"):
        wanted = (np.abs(x) > 0) & (x * x > x.dtype.type(1.5) * variances) | infinite
    known = []
    for instruction_set in SETS:
        kernels = HostDevice(1, instruction_set).selection(x.dtype.name)
        known.append(kernels.moments(x))
        assert kernels.count(x, threshold) == above.size
        got, count = kernels.above(x, threshold, x.size)
        assert count == above.size and np.array_equal(got, above)
        assert kernels.above(x, threshold, max(above.size - 1, 0))[0] is None or above.size == 0
        assert np.array_equal(kernels.unambiguous(x, variances, 1.5, 0.0), np.flatnonzero(wanted))
    assert len({repr(moments) for moments in known}) == 1  # sums of what is huge may be NaN
    scale = np.abs(finite).sum()
    # Sums of what is huge, and squares of what is huge or tiny, leave the range of float32.
    if array["kind"] != "huge":
        assert abs(known[0][0] - finite.sum()) <= 1e-4 * scale and abs(known[0][1] - scale) <= 1e-4 * scale
    assert known[0][3] == np.abs(finite).max(initial=0)
    if array["kind"] not in ("huge", "tiny"):
        assert known[0][2] == pytest.approx((finite**2).sum(), rel=1e-4)


@examples(60)
@given(array=arrays, part=st.floats(0.0, 1.0), k=st.integers(1, 300), wider=st.floats(1.0, 3.0))
def test_choices_of_a_search(array: dict[str, Any], part: float, k: int, wider: float) -> None:
    assert_choices(values(**array), part, k, wider)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_choices_among_subnormal_values(part: float) -> None:
    """Thresholds between them are no numbers of float32: kernels compare with the nearest one."""
    assert_choices(np.array([np.inf, 1.3e-42, 6.4e-42], np.float32), part, 1, 1.0)


def assert_choices(x: np.ndarray, part: float, k: int, wider: float) -> None:
    magnitude = np.where(np.isfinite(x), np.abs(x), np.inf).astype(np.float64)
    finite = magnitude[np.isfinite(magnitude)]
    largest = float(finite.max(initial=0.0))
    computed = np.float64 if x.dtype == np.float64 else np.float32  # what kernels compare in
    threshold = float(computed(np.quantile(finite, part))) if finite.size else 0.0
    most = max(math.ceil(wider * k), k)
    wanted = np.flatnonzero(magnitude > threshold)
    for room in (x.size, max(wanted.size - 1, 0)):
        for instruction_set in SETS:
            kernels = HostDevice(1, instruction_set).selection(x.dtype.name)
            found, above = kernels.chosen(x, (k, most, threshold, largest, 0.3 * largest, 1.2 * k), room)
            assert above == wanted.size
            if above < k or above > room:
                assert found is None
                continue
            assert found is not None and np.all(np.diff(found.astype(np.int64)) > 0)
            left_out = np.delete(magnitude, found)
            assert left_out.max(initial=0.0) < magnitude[found].min() or above == found.size
            assert k <= found.size <= most or np.array_equal(found, wanted)
    if x.size:
        bound = HostDevice().selection(x.dtype.name).bisected(x, k, most, 0.0, largest, threshold, 0.7 * largest)
        assert bound is None or k <= np.count_nonzero(magnitude > float(computed(bound))) <= most


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fitted_distributions(dtype: Any) -> None:
    """Against the formulas in float64, and what they are estimates of."""
    rng, n, density = np.random.default_rng(3), 1 << 16, 0.01
    kernels, quantile = HostDevice().selection(np.dtype(dtype).name), NormalDist().inv_cdf(1 - density / 2)
    for x in (rng.laplace(0.4, 2.0, n).astype(dtype), rng.laplace(-3.0, 0.5, n).astype(dtype)):
        mean, b = x.mean(dtype=np.float64), np.sqrt(x.var(dtype=np.float64) / 2)
        expected = b * np.log(np.cosh(mean / b) / density)
        got = kernels.laplacian(x, n, density, quantile)
        if np.mean(np.abs(x)) / np.sqrt(np.mean(np.square(x, dtype=np.float64))) < 0.753:
            np.testing.assert_allclose(got[:4], [expected, abs(mean), np.abs(x).max(), b], rtol=1e-4)
        else:
            np.testing.assert_allclose(got[4], min(expected, np.abs(x).max()), rtol=1e-4)
    normal = rng.standard_normal(n).astype(dtype)
    for m in (n, n // 32):
        assert np.mean(np.abs(normal) > kernels.laplacian(normal, m, density, quantile)[0]) == pytest.approx(
            0.01, rel=0.3
        )
    assert kernels.laplacian(np.zeros(64, dtype), 64, density, quantile) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert kernels.laplacian(np.full(64, np.nan, dtype), 64, density, quantile) == (0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("nbytes", [0, 4, 100, (8 << 20) - 4, 8 << 20, (8 << 20) + 68])
@pytest.mark.parametrize("begin", [0, 1, 15])
def test_cleared_memory(nbytes: int, begin: int) -> None:
    """All of it, and no more, past the caches, too."""
    memory = np.full(nbytes // 4 + 48, 7.0, np.float32)
    HostDevice().selection("float32").clear(memory[begin : begin + nbytes // 4])
    assert not memory[begin : begin + nbytes // 4].any()
    assert (memory[:begin] == 7).all() and (memory[begin + nbytes // 4 :] == 7).all()


def test_random_indices_are_a_uniform_choice() -> None:
    n, k, kernels = 1000, 50, HostDevice().selection("float32")
    counts = np.zeros(n)
    for key in range(2000):
        indices = kernels.random(n, k, key)
        assert np.unique(indices).size == k and indices.max() < n
        counts[indices] += 1
    expected, deviation = 2000 * k / n, math.sqrt(2000 * k / n * (1 - k / n))
    assert np.abs(counts - expected).max() < 5 * deviation
    assert counts.std() == pytest.approx(deviation, rel=0.15)
    assert np.array_equal(kernels.random(n, n, 7), np.arange(n))


def nearest_power(x: np.ndarray) -> np.ndarray:
    """Exponent of the power of two nearest to a value; the upper one halfway between two."""
    mantissa, exponent = np.frexp(np.abs(x.astype(np.float64)))
    return np.where(mantissa >= 0.75, exponent, exponent - 1)


@examples(60)
@given(
    n=st.integers(1, 3000),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([np.float32, np.float64]),
    wide=st.booleans(),
)
def test_power_codes(n: int, seed: int, dtype: Any, wide: bool) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 2.0 ** rng.integers(-20 if wide else -3, 3, n)).astype(dtype)
    codec = TopK(1.0, wire="packed")
    decoded = compcoll.decode(compcoll.encode(x, codec), n, dtype, codec)
    top = int(np.floor(np.log2(np.abs(x).max())))
    power = np.minimum(nearest_power(x), top)
    expected = np.where(top - power <= 7, np.sign(x) * 2.0**power, 0)
    np.testing.assert_array_equal(decoded, expected)


wires = st.fixed_dictionaries(
    {
        "n": st.one_of(st.integers(0, 400), st.sampled_from([65535, 65536, 200_000, 262_143])),
        "part": st.sampled_from([0.0, 1e-5, 1e-3, 0.05, 0.7, 1.0]),
        "seed": st.integers(0, 1000),
        "dtype": st.sampled_from([np.float32, np.float64]),
        "index_format": st.integers(0, 3),
        "value_format": st.integers(0, 2),
    }
)


def made_wire(case: dict[str, Any]) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(case["seed"])
    n = case["n"]
    x = rng.standard_normal(n).astype(case["dtype"])
    if case["value_format"] == SIGN:
        x = (np.sign(x) * 0.25).astype(case["dtype"])
    if case["value_format"] == POWER:
        x = np.exp2(rng.integers(0, 8, n)).astype(case["dtype"]) * rng.choice([-1, 1], n).astype(case["dtype"])
    indices = np.flatnonzero(rng.random(n) < case["part"]).astype(np.uint32)
    kernels = HostDevice().selection(x.dtype.name)
    _, top = kernels.powers(x[indices])
    formats = case["index_format"], case["value_format"]
    wire = np.empty(kernels.wire_nbytes(n, indices, *formats), np.uint8)
    top = top if case["value_format"] == POWER else 0
    assert kernels.write(n, indices, x[indices], *formats, 0.25, top, wire) == wire.size
    return kernels, x, indices, wire


@examples(150)
@given(case=wires)
def test_wires_round_trip(case: dict[str, Any]) -> None:
    if WIRES[case["index_format"]] == "packed":
        case = case | {"value_format": POWER}
    kernels, x, indices, wire = made_wire(case)
    got, sent = kernels.read(wire, x.size)
    np.testing.assert_array_equal(got, indices)
    np.testing.assert_array_equal(sent, x[indices])


@examples(300)
@given(case=wires, data=st.data())
def test_no_bytes_break_the_decoder(case: dict[str, Any], data: st.DataObject) -> None:
    """Whatever a wire holds, it is refused by name, or gives ascending indices inside the buffer."""
    case = case | {"n": case["n"] % 5000}
    if WIRES[case["index_format"]] == "packed":
        case = case | {"value_format": POWER}
    kernels, x, _, wire = made_wire(case)
    wire = wire[: data.draw(st.integers(0, wire.size))].copy() if data.draw(st.booleans()) else wire
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(0, 4))):
        if wire.size:
            near = int(rng.integers(0, min(wire.size, 40) if rng.random() < 0.7 else wire.size))
            wire[near] = rng.integers(0, 256)
    try:
        indices, sent = kernels.read(wire, x.size)
    except WireCorrupted:
        return
    assert indices.size == sent.size <= x.size
    assert np.all(np.diff(indices.astype(np.int64)) > 0) and (indices.size == 0 or indices[-1] < x.size)


@pytest.mark.parametrize("nbytes", [0, 1, 31, 32, 33, 64, 1000])
def test_random_bytes_are_no_wire(nbytes: int) -> None:
    rng = np.random.default_rng(nbytes)
    kernels = HostDevice().selection("float32")
    for _ in range(200):
        with pytest.raises(WireCorrupted, match="sparse wire"):
            kernels.read(rng.integers(0, 256, nbytes).astype(np.uint8), 1000)


def test_the_shortest_format_is_taken() -> None:
    rng = np.random.default_rng(0)
    coder = TopK(0.5).coder(HostDevice(), "float32")
    n = 1_000_000
    for part, expected in [(0.5, "mask"), (0.02, "runs"), (3e-6, "pairs")]:
        x = rng.standard_normal(n).astype(np.float32)
        x[rng.random(n) > part] = 0
        chosen = TopK(1.0).coder(HostDevice(), "float32").select(n, x, 1.0, None)
        assert WIRES[chosen.index_format] == expected and chosen.value_format == FULL
        lengths = [coder.kernels.wire_nbytes(n, chosen.indices, number, FULL) for number in (0, 2, 3)]
        assert coder.nbytes_of(chosen) == min(lengths)


def test_indices_beyond_28_bits_take_another_format() -> None:
    n = (1 << 28) + 5
    values = np.array([1.0, -2.0], np.float32)
    coder = TopK(1e-9, wire="packed").coder(HostDevice(), "float32")
    chosen = coder._formatted(n, np.array([3, 1 << 28], np.uint32), values, POWER, 0.0, 128)
    assert chosen.formats == "pairs of power values"
    wire = np.empty(coder.nbytes_of(chosen), np.uint8)
    coder.write(chosen, 0, n, wire)
    indices, sent = coder.read(wire, n)
    assert indices.tolist() == [3, 1 << 28] and sent.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [TopK(0.1), TopK(0.1, wire="packed"), RandomK(0.2), Variance(), TopK(1.0)])
def test_encode_and_decode_without_mpi(codec: Any, dtype: str) -> None:
    x = np.random.default_rng(3).standard_normal((20, 50)).astype(numpy_dtype(dtype))
    wire = compcoll.encode(x, codec)
    got = compcoll.decode(wire, x.shape, x.dtype, codec)
    sent = got != 0
    assert np.count_nonzero(sent) >= {"topk": 100, "randomk": 200, "variance": 500}[codec.name]
    near = 0.0 if codec.sent_values == FULL else 0.5
    assert np.all(np.abs(got[sent].astype(np.float64) - x[sent].astype(np.float64)) <= near * np.abs(x).max())
    if codec == TopK(1.0):
        assert got.tobytes() == x.tobytes()


def test_wires_are_as_documented() -> None:
    """Byte by byte, as kernels/sparse_wire.h describes them."""
    n = 70_000
    indices, values = [2, 5, 69_999], [1.5, -4.0, 2.0]
    top = 127 + 2
    masks = bytearray(-(-n // 8))
    for index in indices:
        masks[index // 8] |= 1 << index % 8
    # 1.5 is halfway between 1 and 2 and becomes 2; codes count down from 4.
    codes = [1, 0 | 8, 1]
    runs = [2, 2, 0xFFFF, 69_999 - 6 - 0xFFFF]
    full = struct.pack("<3f", *values)
    for index_format, value_format, step, exponent, body in [
        (0, FULL, 0.0, 0, struct.pack("<3I", *indices) + full),
        (1, POWER, 0.0, top, struct.pack("<3I", *(i | c << 28 for i, c in zip(indices, codes)))),
        (2, FULL, 0.0, 0, struct.pack("<4H", *runs) + full),
        (3, FULL, 0.0, 0, bytes(masks) + full),
        (0, SIGN, 0.5, 0, struct.pack("<3I", *indices) + bytes([0b010])),
        (0, POWER, 0.0, top, struct.pack("<3I", *indices) + bytes([codes[0] | codes[1] << 4, codes[2]])),
    ]:
        head = struct.pack("<4BidQQ", index_format, value_format, 4, 0, exponent, step, n, 3)
        for instruction_set in SETS:
            kernels = HostDevice(1, instruction_set).selection("float32")
            wire = np.empty(1 << 17, np.uint8)
            sent = np.array(indices, np.uint32), np.array(values, np.float32)
            nbytes = kernels.write(n, *sent, index_format, value_format, step, exponent, wire)
            assert wire[:nbytes].tobytes() == head + body


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_the_arithmetic_compiles_for_gpus(tmp_path: Path) -> None:
    kernels = Path(compcoll.__file__).parent / "kernels"
    source = tmp_path / "all.cu"
    source.write_text("""#include "sparse.h"
using namespace compcoll;
template <class T> __device__ void all(T* x, int* codes, uint64_t n) {
    codes[0] = power_code(x[0], power_below(x[1])) + nearest_power(x[2]) + (magnitude_bits(x[3]) > 0);
    x[4] = power_value<T>(codes[1], 130);
    codes[2] = static_cast<int>(permuted(3, n, mixed(7)));
}
__global__ void in_both(float* x, double* y, int* codes, uint64_t n) { all(x, codes, n); all(y, codes, n); }
""")
    command = [
        "nvcc",
        "-arch=sm_80",
        "-std=c++17",
        "--fmad=false",
        "-c",
        "-I",
        kernels,
        source,
        "-o",
        tmp_path / "all.o",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
