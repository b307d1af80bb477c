"""minmax in NumPy: levels between a block's smallest and largest value."""

from __future__ import annotations

import numpy as np
from oracles.codecs import Option, Reference, alike, block_of
from oracles.quantizers import Coded, by_blocks, packed

from compcoll import MinMax
from compcoll.codecs.base import ErrorBound


def formula(codec: MinMax, x: np.ndarray, rng_counter: int, position: int) -> Coded:
    """Compute in x's type."""
    real, smallest = x.dtype.type, np.finfo(x.dtype).tiny
    levels = real(2**codec.bits - 1)
    tiny, huge = (2.0**-90, 2.0**125) if real is np.float32 else (2.0**-900, 2.0**1021)

    def one(part: np.ndarray, begin: int) -> Coded:
        low, high = (value if abs(value) >= smallest else real(0) for value in (part.min(), part.max()))
        codes = np.zeros(part.size, np.int64)
        with np.errstate(all="ignore"):
            span = part.max() - part.min()
            shrink = real(0.125 if span >= huge else 1)
            if not np.isfinite(part).all():
                low = high = real(np.nan)
                values = np.full_like(part, low)
            elif span < tiny:
                high = low
                values = np.full_like(part, low)
            else:
                origin = low * shrink
                span = high * shrink - origin
                codes = ((part * shrink - origin) * (levels / span) + real(0.5)).astype(np.int64)
                codes = np.minimum(codes, int(levels))
                values = origin + codes.astype(real) * (span / levels)
                if shrink != 1:
                    values = np.minimum(values, high * shrink) / shrink
        return np.array([low, high], x.dtype).tobytes() + packed(codes, codec.bits), values

    return by_blocks(x, codec.block, one)


def bounds(bits: int) -> tuple[ErrorBound, ErrorBound]:
    half_a_level = 0.5 * (1 + 2.0**-10) / (2**bits - 1)
    single = ErrorBound(2048, 4 * 2.0**-24, half_a_level, 2.0**-126)
    return single, ErrorBound(2048, 4 * 2.0**-53, half_a_level, 2.0**-126)


REFERENCE = Reference(
    options={"bits": Option(8, (1, 8), (0, 9)), "block": block_of(2048)},
    formula=formula,
    bounds={MinMax(bits): bounds(bits) for bits in (1, 4, 8)},
    estimates={MinMax(4, block=64): alike(8.99393e-2), MinMax(1, block=1 << 20): alike(1.0)},
    instructions={
        MinMax(): {"encode": (13.5, 1.05), "accumulate": (12.5, 1.05), "recode": (24, 1.05), "feedback": (37, 1.05)},
    },
)
