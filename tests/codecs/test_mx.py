"""Microscaling formats against the specification's tables, by hand, and at their limits.

`test_formulas.py` compares them with their formula.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from oracles.codecs.mx import ELEMENTS, SIGNS
from oracles.quantizers import packed
from scipy.linalg import hadamard

from compcoll import MX
from compcoll.host.device import HostDevice

SETS = HostDevice.instruction_sets()
every_set = pytest.mark.parametrize("instruction_set", SETS)


def encode(instruction_set: str, codec: MX, x: np.ndarray) -> bytes:
    coder = codec.coder(HostDevice(1, instruction_set), x.dtype.name)
    wire = np.empty(coder.wire_nbytes(x.size), np.uint8)
    coder.encode(x.size, x, (), wire)
    return wire.tobytes()


def decode(instruction_set: str, codec: MX, wire: bytes, n: int, dtype: Any = np.float32) -> np.ndarray:
    out = np.empty(n, dtype)
    codec.coder(HostDevice(1, instruction_set), out.dtype.name).decode(n, None, (np.frombuffer(wire, np.uint8),), out)
    return out


@every_set
@pytest.mark.parametrize(
    ("format", "codes", "values"),
    [
        # "OCP Microscaling Formats (MX) Specification" 1.0, tables of the element types: the largest normal number, the
        # smallest, the largest subnormal number, the smallest.
        ("mxfp8_e4m3", (0b1111110, 0b0001000, 0b0000111, 0b0000001), (448, 2**-6, 0.875 * 2**-6, 2**-9)),
        ("mxfp8_e5m2", (0b1111011, 0b0000100, 0b0000011, 0b0000001), (57344, 2**-14, 0.75 * 2**-14, 2**-16)),
        ("mxfp6_e3m2", (0b11111, 0b00100, 0b00011, 0b00001), (28, 0.25, 0.1875, 0.0625)),
        ("mxfp6_e2m3", (0b11111, 0b01000, 0b00111, 0b00001), (7.5, 1, 0.875, 0.125)),
        ("mxfp4", (0b111, 0b010, 0b001, 0b001), (6, 1, 0.5, 0.5)),
        # The largest number, the smallest positive one, and -1.
        ("mxint8", (0b01111111, 0b00000001, 0b11000000), (1 + 63 / 64, 1 / 64, -1)),
    ],
)
def test_numbers_of_the_specification(instruction_set: str, format: str, codes: Any, values: Any) -> None:
    bits = 8 if "8" in format else 6 if "6" in format else 4
    for scale, power in ((127, 1.0), (1, 2.0**-126), (230, 2.0**103)):
        wire = bytes([scale]) + packed(np.array(codes), bits)
        np.testing.assert_array_equal(decode(instruction_set, MX(format), wire, len(codes)), np.array(values) * power)


@every_set
@pytest.mark.parametrize("format", ELEMENTS)
def test_every_element(instruction_set: str, format: str) -> None:
    """All finite numbers of an element type, as ml_dtypes knows them, are kept."""
    kind, _, most, bits = ELEMENTS[format]
    codes = np.arange(1 << bits)
    values = codes.astype(np.uint8).view(kind).astype(np.float32)
    codes, values = codes[np.isfinite(values)], values[np.isfinite(values)]
    for code, value in zip(codes, values):
        block = np.array([most, value], np.float32)
        wire = bytes([127]) + packed(np.array([(1 << (bits - 1)) - 1 - (format == "mxfp8_e4m3"), code]), bits)
        if format == "mxfp8_e5m2":
            wire = bytes([127, 0x7B, code])
        assert encode(instruction_set, MX(format), block) == wire
        np.testing.assert_array_equal(decode(instruction_set, MX(format), wire, 2), block)


@every_set
def test_blocks_by_hand(instruction_set: str) -> None:
    """Ties to even; the largest value is bounded; a block of zeros, a block with Inf, a block cut short."""
    x = np.zeros(32 * 3 + 3, np.float32)
    x[:8] = 10, 7, 1, 0.5, -0.6, 3, 2.5, -15  # the scale is 2: 2**(3 - 2)
    x[64:66] = np.inf, 1
    x[96:] = 0.5, -0.25, 6
    codes = [6, 6, 1, 0, 9, 3, 2, 15]  # of 5, 3.5, 0.5, 0.25, -0.3, 1.5, 1.25, -7.5
    by_hand = bytes([128]) + packed(np.array([*codes, *[0] * 24]), 4) + bytes(17) + b"\xff" + bytes(16)
    assert encode(instruction_set, MX("mxfp4"), x) == by_hand + bytes([127, 0x81, 0x07])
    values = decode(instruction_set, MX("mxfp4"), by_hand, 96)
    np.testing.assert_array_equal(values[:8], [8, 8, 1, 0, -1, 3, 2, -12])
    assert not values[8:64].any() and np.isnan(values[64:]).all()
    assert encode(instruction_set, MX(), np.array([1000, -1, 2**-9, 0], np.float32)) == bytes([128, 0x7E, 0xB0, 0, 0])
    assert encode(instruction_set, MX("mxint8"), np.array([1.999, -1.999, -1, 1 / 128], np.float32)) == (
        bytes([127, 127, 0x81, 0xC0, 0])
    )


@every_set
def test_nvfp4_by_hand(instruction_set: str) -> None:
    """A float32 scale of 1, then scales of 448, 1 and 0.5 (E4M3), then elements."""
    x = np.zeros(40, np.float32)
    x[:3] = 2688, -448, 100  # over 448: 6, -1, 0.22
    x[16:20] = 6, 2.5, -0.75, 0.2
    x[32:34] = -3, 2  # over 0.5: -6, 4
    codes = np.zeros(40, int)
    codes[[0, 1, 16, 17, 18, 32, 33]] = 7, 10, 7, 4, 10, 15, 6
    wire = np.float32(1).tobytes() + bytes([0x7E, 0x38, 0x30]) + bytes(61) + packed(codes, 4)
    assert encode(instruction_set, MX("nvfp4"), x) == wire
    expected = np.zeros(40)
    expected[[0, 1, 16, 17, 18, 32, 33]] = 2688, -448, 6, 2, -1, -3, 2
    np.testing.assert_array_equal(decode(instruction_set, MX("nvfp4"), wire, 40), expected)


@every_set
@pytest.mark.parametrize("format", [*ELEMENTS, "mxint8"])
def test_scales_end(instruction_set: str, format: str) -> None:
    """Larger float64 values are bounded, and smaller ones become 0."""
    most = 127 / 64 if format == "mxint8" else ELEMENTS[format][2]
    x = np.array([1e300, -1e300, 1, 0])
    wire = encode(instruction_set, MX(format), x)
    assert wire[0] == 254
    got = decode(instruction_set, MX(format), wire, 4, np.float64)
    np.testing.assert_array_equal(got, [most * 2.0**127, -most * 2.0**127, 0, 0])
    wire = encode(instruction_set, MX(format), np.array([1e-60]))
    assert wire[0] == 0 and decode(instruction_set, MX(format), wire, 1, np.float64) == 0
    # Subnormal floats are encoded: 2**-127 is the smallest scale.
    small = np.array([2.0**-127, -(2.0**-128)], np.float32)
    wire = encode(instruction_set, MX(format), small)
    np.testing.assert_array_equal(decode(instruction_set, MX(format), wire, 2), small)


@every_set
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_rotation_is_that_of_the_hadamard_matrix(instruction_set: str, dtype: Any) -> None:
    """Decoding values that have few bits multiplies them by the transposed matrix."""
    codes = np.random.default_rng(0).integers(-127, 128, 64)
    wire = b"".join(bytes([127]) + part.astype(np.int8).tobytes() for part in (codes[:32], codes[32:]))
    got = decode(instruction_set, MX("mxint8", rotate=True), wire, 64, dtype)
    matrix = hadamard(32) @ np.diag(SIGNS) / np.sqrt(32)
    expected = codes.reshape(2, 32) / 64 @ matrix
    np.testing.assert_allclose(got, expected.reshape(-1), rtol=0, atol=20 * np.finfo(dtype).eps)


@every_set
@pytest.mark.parametrize(("format", "most"), [("mxint8", 0.65), ("mxfp4", 0.85)])
def test_rotations_help_values_of_very_different_size(instruction_set: str, format: str, most: float) -> None:
    x = np.random.default_rng(0).standard_t(3, 1 << 17).astype(np.float32)
    plain, rotated = (
        np.linalg.norm(decode(instruction_set, codec, encode(instruction_set, codec, x), x.size) - x)
        for codec in (MX(format), MX(format, rotate=True))
    )
    assert rotated < most * plain


@every_set
def test_rotated_values_that_could_overflow_are_nan(instruction_set: str) -> None:
    for format in ("mxfp8_e4m3", "nvfp4"):
        codec = MX(format, rotate=True)
        for largest, is_nan in ((2.0**117, False), (2.0**124, True)):
            x = np.full(64, largest, np.float32)
            assert np.isnan(decode(instruction_set, codec, encode(instruction_set, codec, x), 64)).all() == is_nan
        short = np.full(10, 2.0**124, np.float32)  # is not rotated
        assert np.isfinite(decode(instruction_set, codec, encode(instruction_set, codec, short), 10)).all()


FLUSHED = """
import numpy as np, torch
import compcoll
for flushes in (False, True):
    torch.set_flush_denormal(flushes)
    for codec, largest in (("mx:format=mxint8", 2.0**127), ("mx", 2.0**-119), ("mx:format=mxfp8_e5m2", 2.0**-112)):
        x = np.array([largest, largest / 4] * 16, np.float32)
        wire = compcoll.encode(x, codec)
        print(flushes, wire.tobytes().hex(), compcoll.decode(wire, x.shape, x.dtype, codec).tobytes().hex())
"""


def test_flushing_subnormal_numbers_changes_nothing() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", FLUSHED], capture_output=True, text=True, timeout=100, check=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines()]
    assert len(lines) == 6 and lines[:3] == lines[3:]
