"""Parts of the quantizers' formulas in NumPy, and values of all kinds to quantize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Coded = tuple[bytes, np.ndarray]  # a wire, and what it decodes to


def philox(counters: np.ndarray, key: tuple[int, int], rounds: int = 10) -> np.ndarray:
    """Philox4x32 of counters of shape (n, 4), as Salmon et al. (2011) define it."""
    a, b, c, d = (counters[:, word].astype(np.uint64) for word in range(4))
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    first, second = key
    for _ in range(rounds):
        one, two = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (two >> shift) ^ b ^ np.uint64(first), two & low
        c, d = (one >> shift) ^ d ^ np.uint64(second), one & low
        first, second = (first + 0x9E3779B9) % 2**32, (second + 0xBB67AE85) % 2**32
    return np.stack([a, b, c, d], axis=1).astype(np.uint32)


def random16(n: int, seed: int, rng_counter: int, position: int = 0) -> np.ndarray:
    """16 random bits for each of n values that begin at a position, which is a multiple of 8."""
    index = position // 8 + np.arange(-(-n // 8), dtype=np.uint64)
    words = [
        index % 2**32,
        index >> np.uint64(32),
        np.full_like(index, rng_counter % 2**32),
        np.full_like(index, rng_counter >> 32),
    ]
    blocks = philox(np.stack(words, axis=1), (seed % 2**32, seed >> 32))
    return blocks.astype("<u4").view("<u2").reshape(-1)[:n].astype(np.int64)


def packed(codes: np.ndarray, bits: int) -> bytes:
    fields = ((codes[:, None] >> np.arange(bits)) & 1).astype(np.uint8)
    return np.packbits(fields.ravel(), bitorder="little").tobytes()


def by_blocks(x: np.ndarray, block: int, one: Callable[[np.ndarray, int], Coded]) -> Coded:
    parts = [one(x[begin : begin + block], begin) for begin in range(0, x.size, block)]
    return b"".join(wire for wire, _ in parts), np.concatenate([values for _, values in parts] or [x])


def largest(part: np.ndarray) -> tuple[str, int]:
    """What kind of block it is, and the exponent of its largest magnitude."""
    if not np.isfinite(part).all():
        return "nan", 0
    magnitude = np.abs(part).max()
    exponent = int(np.frexp(magnitude)[1]) - 1
    tiny = -80 if part.dtype == np.float32 else -900
    return ("zero" if magnitude == 0 or exponent < tiny else "finite"), exponent


def fixed_point(part: np.ndarray, exponent: int) -> np.ndarray:
    return np.trunc(np.ldexp(part.astype(np.longdouble), 20 - exponent)).astype(np.int64)


def blocks_of_all_kinds(dtype: Any, n: int, seed: int) -> np.ndarray:
    """Normal values, and stretches of zeros, of tiny and of huge values, of subnormals, and of what is not finite."""
    rng = np.random.default_rng(seed)
    huge, small = float(np.finfo(dtype).max), float(np.finfo(dtype).tiny)
    x = rng.standard_normal(n)
    for begin in range(0, n, 97):
        part = x[begin : begin + 97]
        kind = rng.integers(0, 12)
        if kind == 0:
            part *= 0
        elif kind == 1:
            part[:] = rng.standard_normal()
        elif kind == 2 and rng.integers(0, 3) == 0:
            part[rng.integers(0, part.size)] = rng.choice([np.nan, np.inf, -np.inf])
        elif kind == 3:
            part[:] = rng.choice([huge, -huge, 0.0, huge / 3], part.size)
        elif kind == 4:
            part *= small * 1e-3
        elif kind == 5:
            part *= 2.0**-81 if dtype == np.float32 else 2.0**-901
        elif kind == 6:
            part[:] = np.round(part * 4)
        elif kind == 7:
            part[:] = np.abs(part) * -0.0
        elif kind == 8:
            part[:] = np.abs(part)
        elif kind == 9:
            part *= 2.0 ** rng.integers(-60, 60, part.size)
        elif kind == 10:
            part *= huge / 8
    return x.astype(dtype)
