"""fp8 in NumPy: 8-bit floats with a power of two for each block."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from oracles.codecs import ROUNDING, Option, Reference, alike, block_of, quantizer_bounds
from oracles.quantizers import Coded, by_blocks, largest

from compcoll import FP8


def formula(codec: FP8, x: np.ndarray, rng_counter: int, position: int) -> Coded:
    real = x.dtype.type
    kind_of_byte, top = {"e4m3": (ml_dtypes.float8_e4m3fn, 7), "e5m2": (ml_dtypes.float8_e5m2, 14)}[codec.format]
    bias, last = (127, 127) if real is np.float32 else (1023, 1023)

    def one(part: np.ndarray, begin: int) -> Coded:
        kind, exponent = largest(part)
        if kind != "finite":
            header = 2 * bias + 1 if kind == "nan" else 0
            value = real(np.nan if kind == "nan" else 0)
            return np.uint16(header).tobytes() + bytes(part.size), np.full_like(part, value)
        scaled = np.ldexp(part, top - exponent).astype(real)
        # ml_dtypes rounds float64 by way of float32: to odd first, so that it is rounded once.
        narrow = scaled.astype(np.float32)
        if real is np.float64:
            towards_zero = np.where(np.abs(narrow) > np.abs(scaled), np.nextafter(narrow, np.float32(0)), narrow)
            inexact = (towards_zero.astype(np.float64) != scaled).astype(np.uint32)
            narrow = (towards_zero.view(np.uint32) | inexact).view(np.float32)
        codes = narrow.astype(kind_of_byte)
        if exponent == last:  # 2 · 2**top would be infinite
            below = np.array(2.0 ** (top + 1)).astype(kind_of_byte).view(np.uint8) - 1
            bytes_ = codes.view(np.uint8)
            bytes_ = np.minimum(bytes_ & 0x7F, below) | (bytes_ & 0x80)
            codes = bytes_.astype(np.uint8).view(kind_of_byte)
        values = codes.astype(np.float32).astype(real) * real(2.0 ** (exponent - top))
        return np.uint16(exponent + bias).tobytes() + codes.tobytes(), values

    return by_blocks(x, codec.block, one)


REFERENCE = Reference(
    options={"format": Option("e4m3", ("e4m3", "e5m2"), (8, 0.5)), "block": block_of(128)},
    formula=formula,
    bounds={FP8(): quantizer_bounds(128, 2.0**-4), FP8("e5m2"): quantizer_bounds(128, 2.0**-3)},
    estimates={FP8(): alike(ROUNDING * 2.0**-4), FP8("e5m2"): alike(ROUNDING * 2.0**-3)},
    instructions={
        FP8(): {"encode": (11.8, 1.05), "accumulate": (15, 1.05), "recode": (25, 1.05), "feedback": (40.5, 1.05)},
    },
)
