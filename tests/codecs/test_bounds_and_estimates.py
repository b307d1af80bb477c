"""Bounds and estimates of codecs' errors, number by number: against the formulas and integrals that they stand for."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
from promises import ENCODED

from compcoll import FP8, QSGD, ZFP, Cast, Codec, IntSum, MinMax, OneBit, Sign, TernGrad
from compcoll.codecs import ALL, Int8
from compcoll.codecs.base import ErrorBound
from compcoll.codecs.quantization import largest_of, rounding_error
from compcoll.host.device import HostDevice

SINGLE, DOUBLE = 2.0**-24, 2.0**-53  # what rounding loses, of a value


@pytest.mark.parametrize(
    ("n", "expected"), [(2, 0.56419), (5, 1.16296), (10, 1.53875), (100, 2.50759), (1000, 3.24144)]
)
def test_the_largest_of_normal_values(n: int, expected: float) -> None:
    """Means of order statistics, as tabulated: H. L. Harter, "Expected values of normal order statistics", 1961."""
    assert largest_of(n) == pytest.approx(expected, rel=0.05 if n == 2 else 0.02)


@pytest.mark.parametrize("step", [0.4, 1.0, 2.0, 3.0, 6.0])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("stochastic", [True, False])
def test_the_loss_of_rounding_is_its_integral(step: float, zero: bool, stochastic: bool) -> None:
    x = np.linspace(-9, 9, 1_800_001)
    part = (x / step + (0.0 if zero else 0.5)) % 1
    squares = part * (1 - part) if stochastic else np.minimum(part, 1 - part) ** 2
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    expected = step * math.sqrt(float((squares * density).sum()) * (x[1] - x[0]))
    assert rounding_error(step, zero=zero, stochastic=stochastic) == pytest.approx(expected, rel=1e-5)


def quantizer(block: int, of_largest: float) -> tuple[ErrorBound, ErrorBound]:
    """Of float32 and float64."""
    single = ErrorBound(block, of_largest + 4 * SINGLE, 0.0, 2.0**-79)
    return single, ErrorBound(block, of_largest + 4 * DOUBLE, 0.0, 2.0**-899)


BOUNDS: list[tuple[Codec, tuple[ErrorBound, ErrorBound]]] = [
    (OneBit(block=64), quantizer(64, 1.0)),
    (Sign(scale="mean", block=64), quantizer(64, 1.0)),
    (TernGrad(block=64), quantizer(64, 1.0)),
    (Int8(), quantizer(Int8().block, 0.5 / 127)),
    (FP8(format="e4m3"), quantizer(FP8().block, 2.0**-4)),
    (FP8(format="e5m2"), quantizer(FP8().block, 2.0**-3)),
    # Levels from -7 to 7, and from -1 to 1: a step, or half of one.
    (QSGD(bits=4, block=64), quantizer(64, (1 + 2.0**-16) / 7)),
    (QSGD(bits=4, block=64, rounding="nearest"), quantizer(64, (0.5 + 2.0**-16) / 7)),
    (QSGD(bits=4, block=64, norm="l2"), quantizer(64, (1 + 2.0**-16) * 8 / 7)),
    (QSGD(bits=1, block=64), quantizer(64, 2 * (1 + 2.0**-16))),
]
OTHERS = {"cast", "minmax", "zfp"}  # whose bounds have tests of their own below


def test_every_codec_has_its_bounds() -> None:
    own = {cls.name for cls in ALL}
    known = {codec.name for codec, _ in BOUNDS} | OTHERS
    assert {codec.name for codec in ENCODED} & own == known, "BOUNDS needs the error bound of each codec"


@pytest.mark.parametrize(("codec", "expected"), BOUNDS, ids=repr)
def test_bounds_of_quantizers(codec: Codec, expected: tuple[ErrorBound, ErrorBound]) -> None:
    for dtype, (block, relative, spread, absolute) in zip(("float32", "float64"), map(astuple, expected)):
        bound = codec.error_bound(dtype)
        assert bound is not None and (bound.block, bound.spread, bound.absolute) == (block, spread, absolute)
        assert bound.relative == pytest.approx(relative, rel=1e-12)


def test_estimates_of_quantizers() -> None:
    """TernGrad is QSGD of 2 bits; a step of levels from -7 to 7 is a seventh of the largest of 64 magnitudes."""
    assert TernGrad(block=64).encoding_error("float32") == QSGD(bits=2, block=64).encoding_error("float32")
    largest = largest_of(128)
    for rounding, stochastic in (("stochastic", True), ("nearest", False)):
        expected = rounding_error(largest / 7, zero=True, stochastic=stochastic)
        assert QSGD(bits=4, block=64, rounding=rounding).encoding_error("float32") == pytest.approx(expected)
        expected = rounding_error(8 / 7, zero=True, stochastic=stochastic)
        assert QSGD(bits=4, block=64, rounding=rounding, norm="l2").encoding_error("float32") == pytest.approx(expected)
    assert MinMax(4, block=64).encoding_error("float32") == pytest.approx(2 * largest_of(64) / 15 / math.sqrt(12))
    assert MinMax(1, block=1 << 20).encoding_error("float32") == 1.0


def test_bounds_of_casts_and_ranges() -> None:
    assert Cast("float32").error_bound("float32") == Cast("float64").error_bound("float32") == ErrorBound()
    assert Cast("float16").error_bound("float32") == ErrorBound(1, 2.0**-11, 0.0, 2.0**-25)
    assert Cast("bfloat16").error_bound("float64") == ErrorBound(1, 2.0**-8, 0.0, 2.0**-134)
    for bits in (1, 4, 8):
        half_a_level = 0.5 * (1 + 2.0**-10) / (2**bits - 1)
        assert MinMax(bits).error_bound("float32") == ErrorBound(MinMax().block, 4 * SINGLE, half_a_level, 2.0**-126)
        assert MinMax(bits).error_bound("float64") == ErrorBound(MinMax().block, 4 * DOUBLE, half_a_level, 2.0**-126)


@pytest.mark.parametrize(
    ("codec", "dtype", "planes"),
    [
        # Of 4 · rate bits 9 or 12 are the exponent's; k planes take 4 k + 3 at most.
        (ZFP(rate=8), "float32", 5),
        (ZFP(rate=10), "float32", 7),
        (ZFP(rate=16), "float32", 13),
        (ZFP(rate=10.75), "float32", 7),
        (ZFP(rate=11), "float32", 8),
        (ZFP(rate=3), "float32", 0),
        (ZFP(rate=4), "float32", 1),
        (ZFP(rate=8), "float64", 4),
        (ZFP(rate=32), "float64", 28),
        (ZFP(precision=16), "float32", 16),
        (ZFP(precision=16), "float64", 16),
    ],
    ids=repr,
)
def test_bounds_of_bit_planes(codec: ZFP, dtype: str, planes: int) -> None:
    rounded, flushed = (2.0**-57, 2.0**-962) if dtype == "float64" else (2.0**-25, 2.0**-98)
    assert codec.error_bound(dtype) == ErrorBound(4, 20 * 2.0**-planes + rounded, 0.0, flushed)


def test_bounds_of_tolerances() -> None:
    assert ZFP(tolerance=1e-3).error_bound("float32") == ErrorBound(4, 4 * SINGLE, 0.0, 1e-3)
    assert ZFP(tolerance=1e-3).error_bound("float64") == ErrorBound(4, 4 * DOUBLE, 0.0, 1e-3)
    assert (
        ZFP(lossless=True).error_bound("float32") == ErrorBound() and ZFP(lossless=True).encoding_error("float32") == 0
    )


def test_estimates_of_zfp() -> None:
    """Half as much for every bit; of float64, three bits of each four values more are the exponent's."""
    at_8 = ZFP(rate=8).encoding_error("float32")
    assert at_8 == pytest.approx(5.5e-2, rel=0.01)
    for rate in (6, 10, 16):
        single, double = (ZFP(rate=rate).encoding_error(dtype) for dtype in ("float32", "float64"))
        assert single is not None and double is not None
        assert single == pytest.approx(at_8 * 2.0 ** (8 - rate)) and double == pytest.approx(single * 2**0.75)
    assert ZFP(rate=32).encoding_error("float32") == SINGLE and ZFP(rate=64).encoding_error("float64") == DOUBLE
    assert ZFP(rate=2.25).encoding_error("float64") == 1.0 and ZFP(precision=8).encoding_error("float32") is None


def test_estimates_of_sums_of_integers() -> None:
    """A block's largest magnitude of all ranks is the highest level."""
    codec = IntSum(16, 64)
    for ranks in (2, 5):
        expected = largest_of(2 * 64 * ranks) / codec.levels(ranks) / math.sqrt(12)
        assert codec.sum_error(ranks) == pytest.approx(expected)


@pytest.mark.parametrize("block", [16, 64, 256, 1024])
def test_the_estimate_of_int8_is_what_normal_values_lose(block: int) -> None:
    """Simulated: a scale is the 127th part of the largest magnitude of a block."""
    x = np.random.default_rng(block).standard_normal((1 << 18) // block * block).reshape(-1, block)
    scales = np.abs(x).max(axis=1, keepdims=True) / 127
    lost = np.sqrt(np.mean((np.rint(x / scales) * scales - x) ** 2))
    assert Int8(block=block).encoding_error("float32") == pytest.approx(lost, rel=0.02)


WIDTHS: list[Codec] = [cls() for cls in ALL if cls is not Cast]
WIDTHS += [IntSum(8), IntSum(32), Sign("mean"), ZFP(rate=16), Cast("float16"), Cast("bfloat16"), Cast("float32")]


@pytest.mark.parametrize("codec", WIDTHS, ids=repr)
def test_usual_speeds_are_of_widths_that_codecs_have(codec: Codec) -> None:
    """Of a value on the wire, beside what a block shares: at least one of a codec's kind is of that width."""
    bits = codec.wire_bits(HostDevice(1), "float64" if codec.name == "cast" else "float32")
    known = [speed for speed in codec.speeds if speed.codec == codec.kind]
    assert any(bits == pytest.approx(speed.bits, rel=0.07) for speed in known)
    assert all(1e8 < rate < 2e10 for speed in known for rate in astuple(speed)[2:])


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("codec", [IntSum(8, 64), IntSum(8, 2048), IntSum(16, 512)], ids=repr)
def test_errors_of_added_integers_are_as_estimated(codec: IntSum, ranks: int) -> None:
    """Steps are of all ranks' largest value in a block: rounding each to nearest loses step / sqrt(12) of a mean."""
    rng = np.random.default_rng(ranks)
    values = rng.standard_normal((ranks, (1 << 18) // codec.block, codec.block))
    steps = np.abs(values).max(axis=(0, 2), keepdims=True) / codec.levels(ranks)
    lost = (np.rint(values / steps) * steps - values).sum(axis=0)
    measured = np.linalg.norm(lost) / np.linalg.norm(values.sum(axis=0))
    told = codec.sum_error(ranks)
    assert told == pytest.approx(measured, rel=0.03)
