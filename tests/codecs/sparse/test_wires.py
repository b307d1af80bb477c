"""Sparse wires against NumPy, on every instruction set."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

import compcoll
from compcoll.codecs.sparse.sparsifier import FULL, POWER, SIGN, WIRES
from compcoll.dtypes import DTYPES, numpy_dtype
from compcoll.errors import WireCorrupted
from compcoll.host.device import HostDevice
from compcoll.sparse import RandomK, TopK, Variance


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
        for instruction_set in HostDevice.instruction_sets():
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
    codes[0] = power_code(x[0], biased_exponent(x[1])) + nearest_power(x[2]) + (magnitude_bits(x[3]) > 0);
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
