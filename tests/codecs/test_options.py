"""Options of codecs: their defaults and limits, as the documentation has them, to the last value allowed."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from compcoll import FP8, QSGD, ZFP, Cast, Codec, Int8, IntSum, MinMax, OneBit, Sign, TernGrad, errors
from compcoll.codecs import base, numpy_codec
from compcoll.codecs.checksum import CheckedCoder
from compcoll.codecs.numpy_codec import NumpyCoder
from compcoll.codecs.options import Integers, OneOf, Reals
from compcoll.codecs.sparse.sparsifier import SparseCoder
from compcoll.host.device import HostCoder, HostDevice
from compcoll.host.encode_options import EncodeOptions
from compcoll.host.quantizer import NumberCoder
from compcoll.sparse import Hybrid, RandomK, Strom, TopK, Variance

MILLION, SHORT = 1 << 20, 1 << 16
ABOVE_ZERO = 5e-324

# codec, option, default, least and largest value, the values next to them that are refused
LIMITS: list[tuple[type[Codec], str, Any, Any, Any, Any, Any]] = [
    *((codec, "block", default, 8, MILLION, 0, MILLION + 8) for codec, default in (
        *((MinMax, 2048), (QSGD, 512), (TernGrad, 2048), (FP8, 128)),
        *((Int8, 256), (IntSum, 2048)),
    )),
    *((codec, "block", 2048, 8, SHORT, 0, SHORT + 8) for codec in (OneBit, Sign)),
    (MinMax, "bits", 8, 1, 8, 0, 9),
    (QSGD, "bits", 4, 1, 8, 0, 9),
    (IntSum, "bits", 16, 8, 32, 4, 64),
    *((codec, "seed", 0, 0, (1 << 64) - 1, -1, 1 << 64) for codec in (QSGD, TernGrad)),
    (RandomK, "seed", 0, 0, (1 << 32) - 1, -1, 1 << 32),
    (ZFP, "rate", None, math.nextafter(2, 3), 64, 2, math.nextafter(64, 65)),
    (ZFP, "tolerance", None, ABOVE_ZERO, 1.7e308, 0, math.inf),
    (ZFP, "precision", None, 1, 64, 0, 65),
    *((codec, "density", 0.01, ABOVE_ZERO, 1, 0, math.nextafter(1, 2)) for codec in (TopK, RandomK)),
    *((codec, "threshold", 1e-3, ABOVE_ZERO, 1.7e308, 0, math.inf) for codec in (Strom, Hybrid)),
    *((codec, "alpha", 1.5, ABOVE_ZERO, 1.7e308, 0, math.inf) for codec in (Variance, Hybrid)),
    *((codec, "zeta", 0.999, 0, 1, -ABOVE_ZERO, math.nextafter(1, 2)) for codec in (Variance, Hybrid)),
]  # fmt: skip

CHOICES: list[tuple[type[Codec], str, Any, tuple[Any, ...]]] = [
    (Cast, "dtype", "float16", ("float16", "bfloat16", "float32", "float64")),
    (FP8, "format", "e4m3", ("e4m3", "e5m2")),
    (QSGD, "norm", "max", ("max", "l2")),
    (QSGD, "rounding", "stochastic", ("stochastic", "nearest")),
    (Sign, "scale", None, (None, "mean")),
    (ZFP, "lossless", False, (False, True)),
]


@pytest.mark.parametrize(("codec", "name", "default", "least", "largest", "below", "above"), LIMITS)
def test_limits(codec: type[Codec], name: str, default: Any, least: Any, largest: Any, below: Any, above: Any) -> None:
    assert {field.name: field.default for field in fields(codec)}[name] == default
    for value in (least, largest):
        assert getattr(codec(**{name: value}), name) == value
    for value in (below, above, "8", None if default is not None else [], math.nan):
        with pytest.raises(errors.InvalidArgument, match=f"{name}="):
            codec(**{name: value})


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (OneOf((8, 16, 32)), "8, 16 or 32"),
        (OneOf(("l2", "max")), "l2 or max"),
        (OneOf((None, "mean")), "mean"),
        (Reals(0, 1, closed=True), "from 0 to 1"),
        (Reals(0, 1), "above 0 and at most 1"),
        (Reals(0, math.inf), "above 0 and finite"),
        (Integers(0, 2**31 - 1), "an integer from 0 to 2147483647"),
        (Integers(8, 2**32 - 1, 8), "a multiple of 8 from 8 to 2**32 - 1"),
    ],
)
def test_limits_as_command_lines_have_them(limits: Any, text: str) -> None:
    assert str(limits) == text


@pytest.mark.parametrize("codec", sorted({row[0] for row in LIMITS if row[1] == "block"}, key=lambda c: c.__name__))
def test_blocks_are_multiples_of_eight(codec: type[Codec]) -> None:
    for value in (9, 12, 8.0):
        with pytest.raises(errors.InvalidArgument, match="block="):
            codec(block=value)


@pytest.mark.parametrize(("codec", "name", "default", "values"), CHOICES)
def test_choices(codec: type[Codec], name: str, default: Any, values: tuple[Any, ...]) -> None:
    assert {field.name: field.default for field in fields(codec)}[name] == default
    for value in values:
        assert getattr(codec(**{name: value}), name) == value
    for value in ("other", 8, [], 0.5):
        with pytest.raises(errors.InvalidArgument, match=f"{name}="):
            codec(**{name: value})


class NotANumber:
    def __float__(self) -> float:
        raise ValueError("no")


@pytest.mark.parametrize("value", [NotANumber(), [], 10**400, "1"])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="rate="):
        ZFP(rate=value)


@pytest.mark.parametrize("coder", [HostCoder, NumpyCoder, NumberCoder, SparseCoder, CheckedCoder])
def test_coders_have_the_defaults_of_the_contract(coder: type) -> None:
    for method in ("encode", "decode"):
        contract = inspect.signature(getattr(base.Coder, method)).parameters
        for name, parameter in inspect.signature(getattr(coder, method)).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                assert parameter.default == contract[name].default, (coder, method, name)
    given = inspect.signature(base.Coder.encode).parameters["how"].default
    assert given._asdict() == {
        **{"residual": None, "feed": True, "residual_scale": 1.0, "decoded": None},
        **{"scale": 1.0, "rng_counter": 0, "position": 0},
    }
    assert inspect.signature(base.Coder.decode).parameters["scale"].default == 1.0


@pytest.mark.parametrize(
    ("dtype", "allowed", "refused"),
    [
        *((dtype, (2.25, 8, 32), (2.1, 32.25, 64)) for dtype in ("float16", "bfloat16", "float32")),
        ("float64", (3, 8, 32.25, 64), (2.25, 2.8)),
    ],
)
def test_rates_of_zfp_by_type(dtype: str, allowed: tuple[float, ...], refused: tuple[float, ...]) -> None:
    for rate in allowed:
        bits = 8 * ZFP(rate=rate).coder(HostDevice(), dtype).wire_nbytes(1 << 16) / (1 << 16)
        assert bits == pytest.approx(rate, abs=0.01)
    for rate in refused:
        with pytest.raises(errors.InvalidArgument, match=f"rate={rate:g} is out of range for {dtype}"):
            ZFP(rate=rate).coder(HostDevice(), dtype)


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("content", [b"", b"\0", b"\1", b"\2", b"\0\0\0\0", b"\2" + bytes(40)])
def test_wires_of_zfpy_that_are_too_short(n: int, content: bytes) -> None:
    """Neither a stream nor all values: refused by name, whatever their first byte."""
    coder = ZFP(tolerance=1e-3).coder(HostDevice(), "float32")
    kept = np.full(n, 7, np.float32)
    wire = np.frombuffer(content, np.uint8)
    kind = wire[0] if len(wire) else None
    raw, encoded = numpy_codec._RAW, numpy_codec._ENCODED
    if (kind == raw and len(wire) - 1 >= 4 * n) or (kind == encoded and len(wire) > 1 and n):
        coder.decode(n, None, (wire,), kept)
    else:
        with pytest.raises(errors.WireCorrupted, match=f"bytes for {n} values"):
            coder.decode(n, None, (wire,), kept)


@pytest.mark.parametrize("feed", [True, False])
def test_zfpy_keeps_what_it_loses(feed: bool) -> None:
    """Of values that are fed with what was lost, the new loss alone; else one more loss: scaled, in float32."""
    coder = ZFP(tolerance=0.05).coder(HostDevice(), "float32")
    x, before = np.random.default_rng(0).standard_normal((2, 500)).astype(np.float32)
    residual, decoded, wire = before.copy(), np.empty_like(x), np.empty(coder.wire_nbytes(500), np.uint8)
    how = EncodeOptions(residual=residual, feed=feed, residual_scale=0.5, decoded=decoded)
    coder.encode(500, x, (), wire, how)
    sent = x + before if feed else x
    assert 0 < np.abs(sent - decoded).max() <= 0.05
    np.testing.assert_allclose(residual, (0 if feed else before) + (sent - decoded) / 2, atol=1e-6)
