"""The quantizers' formulas in NumPy, block by block: wires and decoded values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Coded = tuple[bytes, np.ndarray]
"""A wire and what it decodes to."""


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


def qsgd(x: np.ndarray, bits: int, block: int, norm: str, random: np.ndarray | None) -> Coded:
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


def onebit(x: np.ndarray, block: int, reconstructions: int) -> Coded:
    real = x.dtype.type

    def one(part: np.ndarray, begin: int) -> Coded:
        kind, exponent = largest(part)
        signs = np.signbit(part)
        if kind != "finite":
            means = (real(np.nan if kind == "nan" else 0),) * 2
            signs = np.zeros_like(signs)
        else:
            q = fixed_point(part, exponent)
            sums = (q[~signs].sum(), q[signs].sum())
            if reconstructions == 1:
                quotients = [float(sums[0] - sums[1]) / part.size]
                quotients.append(-quotients[0])
            else:
                counts = (np.count_nonzero(~signs), np.count_nonzero(signs))
                quotients = [float(s) / float(c) if c else 0.0 for s, c in zip(sums, counts)]
            means = tuple(real(value) * real(2.0 ** (exponent - 20)) for value in quotients)
        header = b"".join(mean.tobytes() for mean in means[:reconstructions])
        return header + packed(signs.astype(np.int64), 1), np.where(signs, means[1], means[0]).astype(real)

    return by_blocks(x, block, one)


def fp8(x: np.ndarray, block: int, format: str) -> Coded:
    real = x.dtype.type
    kind_of_byte, top = {"e4m3": (ml_dtypes.float8_e4m3fn, 7), "e5m2": (ml_dtypes.float8_e5m2, 14)}[format]
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

    return by_blocks(x, block, one)


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
