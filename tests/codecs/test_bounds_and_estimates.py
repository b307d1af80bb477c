"""Bounds and estimates of codecs' errors: their numbers, and the integrals that they stand for."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
from oracles.codecs import Reference, references
from promises import ENCODED

from compcoll import ZFP, Cast, Codec, IntSum, Sign
from compcoll.codecs import ALL
from compcoll.codecs.quantization import largest_of, rounding_error
from compcoll.host.device import HostDevice
from compcoll.kernels import _host


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


ROWS = [(codec, one) for one in references().values() for codec in one.bounds]


def test_every_codec_has_its_reference() -> None:
    known = references()
    lacking = [f"tests/oracles/codecs/{cls.name}.py" for cls in ALL if cls.name not in known]
    assert not lacking, "write these as tests/oracles/codecs/int8.py"
    for cls in ALL:
        one, encodes = known[cls.name], any(codec.name == cls.name for codec in ENCODED)
        where = f"tests/oracles/codecs/{cls.name}.py lacks"
        assert bool(one.bounds) == bool(one.estimates) == encodes, f"{where} bounds or estimates"
        assert cls.name not in _host.codecs() or one.instructions, f"{where} the instructions of its kernels"


@pytest.mark.parametrize(("codec", "reference"), ROWS, ids=lambda value: repr(value)[:60])
def test_bounds(codec: Codec, reference: Reference) -> None:
    for dtype, expected in zip(("float32", "float64"), reference.bounds[codec]):
        bound = codec.error_bound(dtype)
        assert bound is not None and (bound.block, bound.absolute) == (expected.block, expected.absolute)
        assert (bound.relative, bound.spread) == pytest.approx((expected.relative, expected.spread), rel=1e-12, abs=0)


@pytest.mark.parametrize("name", references())
def test_estimates(name: str) -> None:
    """Measured values are in `test_estimates_are_those_of_normal_values`."""
    for codec, expected in references()[name].estimates.items():
        for dtype, value in zip(("float32", "float64"), expected):
            assert codec.encoding_error(dtype) == (value if value is None else pytest.approx(value, rel=1e-4)), codec


def test_estimates_of_sums_of_integers() -> None:
    """A block's largest magnitude of all ranks is the highest level."""
    codec = IntSum(16, 64)
    for ranks in (2, 5):
        expected = largest_of(2 * 64 * ranks) / codec.levels(ranks) / math.sqrt(12)
        assert codec.sum_error(ranks) == pytest.approx(expected)


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
