"""Casts against NumPy and ml_dtypes, min-max quantization against its formula in NumPy, on every instruction set."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.quantizers import blocks_of_all_kinds
from properties import examples

from compcoll import Cast, Codec, MinMax
from compcoll.host.device import HostDevice

SETS = HostDevice.instruction_sets()
WIRES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def encode(instruction_set: str, codec: Codec, x: np.ndarray) -> np.ndarray:
    coder = codec.coder(HostDevice(1, instruction_set), x.dtype.name)
    guarded = np.full(coder.wire_nbytes(x.size) + 64, 0xA5, np.uint8)
    nbytes = coder.encode(x.size, x, (), guarded[:-64])
    assert (guarded[nbytes:] == 0xA5).all()
    return guarded[:nbytes]


def decode(instruction_set: str, codec: Codec, wire: np.ndarray, n: int, dtype: Any, add: Any = None) -> np.ndarray:
    out = np.full(n + 16, 7.0, dtype)
    codec.coder(HostDevice(1, instruction_set), np.dtype(dtype).name).decode(n, add, (wire,), out[:n])
    assert (out[n:] == 7.0).all()
    return out[:n]


def interesting(dtype: Any, seed: int = 0) -> np.ndarray:
    """Normal values of all sizes, ties, limits, subnormals, zeros and what is not finite."""
    rng = np.random.default_rng(seed)
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves = halves[np.isfinite(halves)]
    ties = (halves[:-1] + halves[1:]) / 2
    bfloats = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    parts = [
        rng.standard_normal(3000) * 2.0 ** rng.integers(-30, 20, 3000),
        rng.standard_normal(3000) * 2.0 ** rng.integers(-149, 127, 3000),
        halves,
        ties,
        np.nextafter(ties, np.inf),
        np.nextafter(ties, -np.inf),
        (bfloats[:-1] + bfloats[1:]) / 2,
        [0.0, -0.0, 65504, 65519.99, 65520, 1e5, 3e38, -3e38, 3.4e38, np.inf, -np.inf, np.nan],
    ]
    with np.errstate(over="ignore"):
        return np.concatenate(parts).astype(dtype)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16", "float32"])
def test_cast_rounds_as_numpy(instruction_set: str, dtype: Any, wire_dtype: str) -> None:
    x = interesting(dtype)
    wire = encode(instruction_set, Cast(wire_dtype), x).view(WIRES[wire_dtype])
    with np.errstate(over="ignore"):
        # ml_dtypes rounds float64 twice on its way to bfloat16; once is right.
        expected = round_once_to_bfloat16(x) if wire_dtype == "bfloat16" else x.astype(WIRES[wire_dtype])
    nan = np.isnan(x)
    assert np.isnan(wire[nan].astype(np.float64)).all()
    assert wire[~nan].tobytes() == expected[~nan].tobytes()


def round_once_to_bfloat16(x: np.ndarray) -> np.ndarray:
    exact = x.astype(np.float32)
    if x.dtype == np.float64:
        # To odd: an inexact float32 whose last bit says so rounds to bfloat16 as the float64 would.
        with np.errstate(over="ignore", invalid="ignore"):
            towards_zero = np.where(
                np.abs(exact.astype(np.float64)) > np.abs(x), np.nextafter(exact, np.float32(0)), exact
            )
        inexact = (towards_zero.astype(np.float64) != x) & np.isfinite(x)
        exact = (towards_zero.view(np.uint32) | inexact).view(np.float32)
    return exact.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
def test_every_half_decodes_exactly(instruction_set: str, dtype: Any, wire_dtype: str) -> None:
    halves = np.arange(65536, dtype=np.uint16).view(WIRES[wire_dtype])
    out = decode(instruction_set, Cast(wire_dtype), halves.view(np.uint8), 65536, dtype)
    with np.errstate(invalid="ignore"):
        expected = halves.astype(dtype)
    nan = np.isnan(expected)
    assert np.isnan(out[nan]).all() and out[~nan].tobytes() == expected[~nan].tobytes()
    base = np.random.default_rng(1).standard_normal(65536).astype(dtype)
    sums = decode(instruction_set, Cast(wire_dtype), halves.view(np.uint8), 65536, dtype, add=base)
    with np.errstate(over="ignore", invalid="ignore"):
        assert sums[~nan].tobytes() == (base + expected)[~nan].tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_go_through_every_codec(dtype: str) -> None:
    x = np.random.default_rng(2).standard_normal(5000).astype(WIRES[dtype])
    device = HostDevice()
    for codec in (Cast(dtype), MinMax(bits=8)):
        coder = codec.coder(device, dtype)
        wire, out = np.empty(coder.wire_nbytes(x.size), np.uint8), np.empty(x.size, np.uint16)
        coder.encode(x.size, device.flat(x, dtype), (), wire)
        coder.decode(x.size, None, (wire,), out)
        error = np.abs(out.view(WIRES[dtype]).astype(float) - x.astype(float)).max()
        assert error <= (0 if isinstance(codec, Cast) else 8 / 255)


def minmax_reference(x: np.ndarray, bits: int, block: int) -> tuple[bytes, np.ndarray]:
    """Wire and decoded values by the documented rules, block by block, in the element type's own arithmetic."""
    real, smallest = x.dtype.type, np.finfo(x.dtype).tiny
    levels = real(2**bits - 1)
    tiny, huge = (2.0**-90, 2.0**125) if real is np.float32 else (2.0**-900, 2.0**1021)
    wire, values = b"", np.empty_like(x)
    for begin in range(0, x.size, block):
        part, here = x[begin : begin + block], np.s_[begin : begin + block]
        low, high = (value if abs(value) >= smallest else real(0) for value in (part.min(), part.max()))
        codes = np.zeros(part.size, np.int64)
        with np.errstate(all="ignore"):
            span = part.max() - part.min()
            shrink = real(0.125 if span >= huge else 1)
            if not np.isfinite(part).all():
                low = high = real(np.nan)
                values[here] = np.nan
            elif span < tiny:
                high = low
                values[here] = low
            else:
                origin = low * shrink
                span = high * shrink - origin
                codes = np.minimum(
                    ((part * shrink - origin) * (levels / span) + real(0.5)).astype(np.int64), int(levels)
                )
                values[here] = origin + codes.astype(real) * (span / levels)
                if shrink != 1:
                    values[here] = np.minimum(values[here], high * shrink) / shrink
        packed = np.packbits(((codes[:, None] >> np.arange(bits)) & 1).astype(np.uint8).ravel(), bitorder="little")
        wire += np.array([low, high], x.dtype).tobytes() + packed.tobytes()
    return wire, values


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", range(1, 9))
def test_minmax_follows_its_formula(instruction_set: str, dtype: Any, bits: int) -> None:
    for n, block, seed in [(10000, 2048, 0), (6001, 64, 1), (333, 8, 2), (777, 24, 3), (5, 2048, 4), (2049, 2048, 5)]:
        x = blocks_of_all_kinds(dtype, n, seed)
        codec = MinMax(bits, block)
        expected_wire, expected = minmax_reference(x, bits, block)
        wire = encode(instruction_set, codec, x)
        assert wire.tobytes() == expected_wire
        nan = np.isnan(expected)
        got = decode(instruction_set, codec, wire, n, dtype)
        assert np.isnan(got[nan]).all() and got[~nan].tobytes() == expected[~nan].tobytes()
        finite = np.where(np.isfinite(x), x, 1).astype(dtype)
        sums = decode(instruction_set, codec, wire, n, dtype, add=finite)
        with np.errstate(over="ignore"):
            assert sums[~nan].tobytes() == (finite + expected)[~nan].tobytes()


@examples(200)
@given(
    content=st.binary(min_size=0, max_size=600), bits=st.integers(1, 8), dtype=st.sampled_from([np.float32, np.float64])
)
def test_any_bytes_decode_alike(content: bytes, bits: int, dtype: Any) -> None:
    codec = MinMax(bits, 64)
    n = 150
    coder = codec.coder(HostDevice(), np.dtype(dtype).name)
    wire = np.frombuffer((content + bytes(coder.wire_nbytes(n)))[: coder.wire_nbytes(n)], np.uint8)
    results = [decode(s, codec, wire, n, dtype) for s in SETS]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_golden_wires() -> None:
    """Bytes on the wire do not change from version to version without being told."""
    x = np.array([0.0, 1.0, 0.5, 0.25, -1.0], np.float32)
    assert encode("portable", MinMax(bits=8), x).tobytes().hex() == "000080bf0000803f80ffbf9f00"
    assert encode("portable", MinMax(bits=2), x).tobytes().hex() == "000080bf0000803fae00"
    assert encode("portable", Cast("float16"), x).tobytes().hex() == "0000003c0038003400bc"
    assert encode("portable", Cast("bfloat16"), x).tobytes().hex() == "0000803f003f803e80bf"
