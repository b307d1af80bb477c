"""int8 in NumPy: 8-bit integers with a scale for each block."""

from __future__ import annotations

import numpy as np
from oracles.codecs import Reference, alike, block_of, quantizer_bounds
from oracles.quantizers import Coded, by_blocks, largest

from compcoll import Int8


def formula(codec: Int8, x: np.ndarray, rng_counter: int, position: int) -> Coded:
    """Compute scale and product in x's type."""
    real = x.dtype.type

    def one(part: np.ndarray, begin: int) -> Coded:
        kind, _ = largest(part)
        if kind != "finite":
            scale = real(np.nan if kind == "nan" else 0)
            return scale.tobytes() + bytes(part.size), np.full_like(part, scale)
        scale = real(np.abs(part).max() / real(127))
        with np.errstate(over="ignore"):
            if not np.isfinite(scale * real(127)):
                scale = np.nextafter(scale, real(0))
        codes = np.rint((part / scale).astype(np.float64)).astype(int)
        assert np.abs(codes).max() <= 127
        return scale.tobytes() + codes.astype(np.int8).tobytes(), codes.astype(real) * scale

    return by_blocks(x, codec.block, one)


REFERENCE = Reference(
    options={"block": block_of(256)},
    formula=formula,
    bounds={Int8(): quantizer_bounds(256, 0.5 / 127)},
    estimates={Int8(): alike(6.8888e-3), Int8(block=64): alike(5.8751e-3)},
    instructions={
        Int8(): {"encode": (20.5, 1.05), "accumulate": (10.8, 1.05), "recode": (29, 1.05), "feedback": (45.5, 1.05)},
    },
)
