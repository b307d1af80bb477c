"""qsgd in NumPy: evenly spaced levels, and Philox's random numbers."""

from __future__ import annotations

import numpy as np
from oracles.codecs import Option, Reference, alike, block_of, quantizer_bounds
from oracles.quantizers import Coded, by_blocks, fixed_point, largest, packed, random16

from compcoll import QSGD


def quantized(x: np.ndarray, bits: int, block: int, norm: str, random: np.ndarray | None) -> Coded:
    """Round to levels with these random numbers, or to the nearest."""
    real = x.dtype.type
    levels = 1 if bits == 1 else 2**bits - 2

    def one(part: np.ndarray, begin: int) -> Coded:
        kind, exponent = largest(part)
        if kind != "finite":
            h = real(np.nan if kind == "nan" else 0)
            return h.tobytes() + packed(np.zeros(part.size, np.int64), bits), np.full_like(part, h)
        relative = float(np.ldexp(np.abs(part).max(), -exponent))
        if norm == "l2":
            squares = int(np.sum(fixed_point(part, exponent) ** 2))
            relative = max(float(np.sqrt(np.float64(squares))) * 2.0**-20, relative)
        with np.errstate(over="ignore"):
            h = real(relative / levels) * real(2.0**exponent)
            most = np.nextafter(np.finfo(real).max / real(levels), real(0), dtype=real)
            h = min(h, most)
            t = (part * (real(32768) / h) + (real(32768 * levels) + real(0.5))).astype(np.int64)
        t = np.clip(t, 0, levels << 16)
        u = np.int64(32768) if random is None else random[begin : begin + part.size]
        codes = (t + u) >> 16
        return h.tobytes() + packed(codes, bits), (2 * codes - levels).astype(real) * h

    return by_blocks(x, block, one)


def formula(codec: QSGD, x: np.ndarray, rng_counter: int, position: int) -> Coded:
    random = random16(x.size, codec.seed, rng_counter, position) if codec.rounding == "stochastic" else None
    return quantized(x, codec.bits, codec.block, codec.norm, random)


SEED = Option(0, (0, (1 << 64) - 1), (-1, 1 << 64))

REFERENCE = Reference(
    options={
        "bits": Option(4, (1, 8), (0, 9)),
        "block": block_of(512),
        "norm": Option("max", ("max", "l2"), (8, 0.5)),
        "rounding": Option("stochastic", ("stochastic", "nearest"), (8, 0.5)),
        "seed": SEED,
    },
    formula=formula,
    # Levels from -7 to 7, and from -1 to 1: a step, or half of one.
    bounds={
        QSGD(bits=4, block=64): quantizer_bounds(64, (1 + 2.0**-16) / 7),
        QSGD(bits=4, block=64, rounding="nearest"): quantizer_bounds(64, (0.5 + 2.0**-16) / 7),
        QSGD(bits=4, block=64, norm="l2"): quantizer_bounds(64, (1 + 2.0**-16) * 8 / 7),
        QSGD(bits=1, block=64): quantizer_bounds(64, 2 * (1 + 2.0**-16)),
    },
    estimates={
        QSGD(bits=4, block=64): alike(0.150742),
        QSGD(bits=4, block=64, rounding="nearest"): alike(0.106591),
        QSGD(bits=4, block=64, norm="l2"): alike(0.466569),
        QSGD(bits=4, block=64, norm="l2", rounding="nearest"): alike(0.329914),
        QSGD(bits=1, block=64): alike(2.390066),
        QSGD(bits=2, block=64): alike(1.038352),
    },
    instructions={
        QSGD(4): {"encode": (30, 1.05), "accumulate": (13.5, 1.05), "recode": (41, 1.05), "feedback": (55, 1.05)},
    },
)
