"""Options of codecs: their defaults and limits, as the documentation has them, to the last value allowed."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from oracles.codecs import Option, references

from compcoll import ZFP, Codec, errors, get_codec
from compcoll.codecs import ALL, base, numpy_codec
from compcoll.codecs.checksum import CheckedCoder
from compcoll.codecs.numpy_codec import NumpyCoder
from compcoll.codecs.options import Integers, OneOf, Reals
from compcoll.codecs.sparse.sparsifier import SparseCoder
from compcoll.host.device import HostCoder, HostDevice
from compcoll.host.encode_options import EncodeOptions
from compcoll.host.quantizer import NumberCoder
from compcoll.sparse import Hybrid, RandomK, Strom, TopK, Variance

ABOVE_ZERO = 5e-324
POSITIVE = ((ABOVE_ZERO, 1.7e308), (0, math.inf))
OPTIONS: dict[type[Codec], dict[str, Option]] = {
    TopK: {"density": Option(0.01, (ABOVE_ZERO, 1), (0, math.nextafter(1, 2)))},
    RandomK: {
        "density": Option(0.01, (ABOVE_ZERO, 1), (0, math.nextafter(1, 2))),
        "seed": Option(0, (0, (1 << 32) - 1), (-1, 1 << 32)),
    },
    Strom: {"threshold": Option(1e-3, *POSITIVE)},
    Variance: {"alpha": Option(1.5, *POSITIVE), "zeta": Option(0.999, (0, 1), (-ABOVE_ZERO, math.nextafter(1, 2)))},
    Hybrid: {
        "threshold": Option(1e-3, *POSITIVE),
        "alpha": Option(1.5, *POSITIVE),
        "zeta": Option(0.999, (0, 1), (-ABOVE_ZERO, math.nextafter(1, 2))),
    },
    **{cls: references()[cls.name].options for cls in ALL if cls.name in references()},
}


def test_every_option_of_a_reference() -> None:
    for name, one in references().items():
        own = {each.name for each in fields(get_codec(name))}  # type: ignore[arg-type]
        assert set(one.options) == own, f"the options in tests/oracles/codecs/{name}.py"


@pytest.mark.parametrize(
    ("codec", "name", "option"), [(codec, *row) for codec, options in OPTIONS.items() for row in options.items()]
)
def test_limits(codec: type[Codec], name: str, option: Option) -> None:
    assert {field.name: field.default for field in fields(codec)}[name] == option.default
    for value in option.accepted:
        assert getattr(codec(**{name: value}), name) == value
    for value in (*option.refused, "other", [], math.nan, *([None] if option.default is not None else [])):
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
