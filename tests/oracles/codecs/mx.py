"""Microscaling formats and NVFP4 in NumPy: ml_dtypes rounds to the element types and the scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from oracles.codecs import Option, Reference, alike
from oracles.quantizers import Coded, by_blocks, packed

from compcoll import MX
from compcoll.codecs.base import ErrorBound

# By format: the element type, the exponent of its largest power of two, its largest number, its bits.
ELEMENTS: dict[str, tuple[Any, int, float, int]] = {
    "mxfp8_e4m3": (ml_dtypes.float8_e4m3fn, 8, 448.0, 8),
    "mxfp8_e5m2": (ml_dtypes.float8_e5m2, 15, 57344.0, 8),
    "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 4, 28.0, 6),
    "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 2, 7.5, 6),
    "mxfp4": (ml_dtypes.float4_e2m1fn, 2, 6.0, 4),
}
SIGNS = np.array([-1.0 if 0x243F6A88 >> i & 1 else 1.0 for i in range(32)])


def to_round_further(x: np.ndarray) -> np.ndarray:
    """ml_dtypes rounds float64 by way of float32: to odd first, so that it is rounded once."""
    narrow = x.astype(np.float32)
    if x.dtype == np.float64:
        towards_zero = np.where(np.abs(narrow) > np.abs(x), np.nextafter(narrow, np.float32(0)), narrow)
        inexact = (towards_zero.astype(np.float64) != x).astype(np.uint32)
        narrow = (towards_zero.view(np.uint32) | inexact).view(np.float32)
    return narrow


def rounded(x: np.ndarray, kind: Any, most: float) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and their values."""
    elements = np.clip(to_round_further(np.clip(x, -most, most)), -most, most).astype(kind)
    return elements.view(np.uint8).astype(np.int64), elements.astype(x.dtype)


def transformed(x: np.ndarray) -> np.ndarray:
    """The Hadamard transform of 32 values over √32, added in the order of the kernels."""
    x = x * x.dtype.type(np.sqrt(2) / 8)
    for distance in (16, 8, 4, 2, 1):
        pairs = x.reshape(-1, 2, distance)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
    return x


def rotated(part: np.ndarray, *, back: bool) -> np.ndarray:
    """Rotate each 32 values. What is left over stays as it is."""
    result, signs = part.copy(), SIGNS.astype(part.dtype)
    for begin in range(0, part.size - 31, 32):
        own = part[begin : begin + 32]
        result[begin : begin + 32] = transformed(own) * signs if back else transformed(own * signs)
    return result


def microscaled(codec: MX, y: np.ndarray) -> Coded:
    real = y.dtype.type
    exponent = int(np.frexp(np.abs(y).max())[1]) - 1 if y.any() else -(10**6)
    if codec.format == "mxint8":
        scale = max(min(exponent, 127), -127)
        with np.errstate(over="ignore"):
            codes = np.clip(np.rint(np.ldexp(y, 6 - scale).astype(np.float64)), -127, 127)
        byte, values = codes.astype(np.int8).astype(np.int64) & 255, np.ldexp(codes, scale - 6).astype(real)
        bits = 8
    else:
        kind, largest, most, bits = ELEMENTS[codec.format]
        scale = max(min(exponent - largest, 127), -127)
        with np.errstate(over="ignore"):
            byte, elements = rounded(np.ldexp(y, -scale), kind, most)
        values = np.ldexp(elements, scale)
    return np.array(2.0**scale).astype(ml_dtypes.float8_e8m0fnu).tobytes() + packed(byte, bits), values


def nvfp4(y: np.ndarray) -> Coded:
    real, n = y.dtype.type, y.size
    groups = np.concatenate([y, np.zeros(1024 - n, y.dtype)]).reshape(64, 16)
    largest = np.abs(groups).max(axis=1)
    with np.errstate(all="ignore"):
        whole = np.float32(largest.max() / real(2688))
        if np.isinf(whole):
            whole = np.finfo(np.float32).max
        if np.isinf(real(6) * (real(448) * real(whole))):
            whole = np.nextafter(np.nextafter(whole, np.float32(0)), np.float32(0))
        if largest.max() < 2.0**-80:
            return bytes(4 + 64 + (n + 1) // 2), np.zeros_like(y)
        scales, widened = rounded(largest / real(6) / real(whole), ml_dtypes.float8_e4m3fn, 448.0)
        unit = (widened * real(whole))[:, None]
        codes, elements = rounded(groups / np.where(unit == 0, real(np.inf), unit), ml_dtypes.float4_e2m1fn, 6.0)
    header = np.float32(whole).tobytes() + scales.astype(np.uint8).tobytes()
    return header + packed(codes.reshape(-1)[:n], 4), (elements * unit).reshape(-1)[:n]


def formula(codec: MX, x: np.ndarray, rng_counter: int, position: int) -> Coded:
    most = 2.0**120 if x.dtype == np.float32 else 2.0**1016
    is_nvfp4 = codec.format == "nvfp4"
    bits = 4 if is_nvfp4 or codec.format == "mxfp4" else 6 if "fp6" in codec.format else 8

    def one(part: np.ndarray, begin: int) -> Coded:
        with np.errstate(all="ignore"):
            y = rotated(part, back=False) if codec.rotate else part
        if not np.isfinite(y).all() or (codec.rotate and part.size >= 32 and np.abs(y).max() >= most):
            header = np.float32(np.nan).tobytes() + bytes(64) if is_nvfp4 else b"\xff"
            return header + packed(np.zeros(part.size, np.int64), bits), np.full_like(part, np.nan)
        wire, values = nvfp4(y) if is_nvfp4 else microscaled(codec, y)
        return wire, rotated(values, back=True) if codec.rotate else values

    return by_blocks(x, codec.block, one)


def bounds(block: int, of_largest: float, absolute: float) -> tuple[ErrorBound, ErrorBound]:
    single = ErrorBound(block, of_largest * (1 + 64 * 2.0**-24), absolute=absolute)
    return single, ErrorBound(block, of_largest * (1 + 64 * 2.0**-53), absolute=absolute)


REFERENCE = Reference(
    options={
        "format": Option("mxfp8_e4m3", (*ELEMENTS, "mxint8", "nvfp4"), (8, "mxfp8")),
        "rotate": Option(False, (False, True), (2, "yes")),
    },
    formula=formula,
    bounds={
        MX(): bounds(32, 2.0**-3, 2.0**-126),
        MX("mxfp8_e5m2"): bounds(32, 2.0**-3, 2.0**-126),
        MX("mxfp6_e3m2"): bounds(32, 2.0**-3, 2.0**-126),
        MX("mxfp6_e2m3"): bounds(32, 2.0**-4, 2.0**-126),
        MX("mxfp4"): bounds(32, 2.0**-2, 2.0**-126),
        MX("mxint8"): bounds(32, 2.0**-7, 2.0**-126),
        MX("nvfp4"): bounds(1024, 0.18, 2.0**-79),
        MX("mxfp4", rotate=True): bounds(32, 8.0, 2.0**-126),
    },
    estimates={
        MX(): alike(2.9343e-2),
        MX("mxfp8_e5m2"): alike(5.3961e-2),
        MX("mxfp6_e3m2"): alike(5.3961e-2),
        MX("mxfp6_e2m3"): alike(2.8375e-2),
        MX("mxfp4"): alike(1.14947e-1),
        MX("mxint8"): alike(8.2561e-3),
        MX("nvfp4"): alike(9.5141e-2),
        MX("nvfp4", rotate=True): alike(9.5141e-2),
    },
    instructions={
        MX(): {"encode": (13, 1.05), "accumulate": (13.5, 1.05), "recode": (25, 1.05), "feedback": (40, 1.05)},
        MX("mxfp4"): {"encode": (20, 1.05), "accumulate": (16, 1.05), "recode": (33.5, 1.05), "feedback": (48, 1.05)},
        MX("mxint8"): {"encode": (17, 1.05), "accumulate": (15.5, 1.05), "recode": (31, 1.05), "feedback": (46, 1.05)},
        MX("mxfp6_e2m3"): {"encode": (16, 1.05), "accumulate": (17, 1.05), "recode": (31, 1.05)},
        MX("mxfp4", rotate=True): {"encode": (35, 1.05), "accumulate": (33, 1.05), "recode": (67, 1.05)},
    },
)
