"""Casts against NumPy and ml_dtypes, on every instruction set; golden wires of casts and min-max quantization."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

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
def test_halves_stay_halves(dtype: str) -> None:
    x = np.random.default_rng(2).standard_normal(5000).astype(WIRES[dtype])
    device = HostDevice()
    coder = Cast(dtype).coder(device, dtype)
    wire, out = np.empty(coder.wire_nbytes(x.size), np.uint8), np.empty(x.size, np.uint16)
    coder.encode(x.size, device.flat(x, dtype), (), wire)
    coder.decode(x.size, None, (wire,), out)
    assert out.tobytes() == x.tobytes()


def test_golden_wires() -> None:
    """Bytes on the wire do not change from version to version without being told."""
    x = np.array([0.0, 1.0, 0.5, 0.25, -1.0], np.float32)
    assert encode("portable", MinMax(bits=8), x).tobytes().hex() == "000080bf0000803f80ffbf9f00"
    assert encode("portable", MinMax(bits=2), x).tobytes().hex() == "000080bf0000803fae00"
    assert encode("portable", Cast("float16"), x).tobytes().hex() == "0000003c0038003400bc"
    assert encode("portable", Cast("bfloat16"), x).tobytes().hex() == "0000803f003f803e80bf"
