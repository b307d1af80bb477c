"""What a codec says of itself: its options, its estimates and bounds, and that all of the library goes by them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, normals
from hypothesis import given
from hypothesis import strategies as st
from promises import ENCODED, EVERY, FIXED, FLAT

import compcoll
from compcoll import Codec, errors
from compcoll.codecs import registry
from compcoll.codecs.base import Coder, Device, ErrorBound
from compcoll.codecs.options import OneOf, option
from compcoll.dtypes import DTYPES, computed_on, numpy_dtype
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions
from compcoll.kernels import _host
from compcoll.plan.wire_formats import wire_format
from compcoll.tools import arguments, explain, simulate
from osu_like_bench import bounds
from osu_like_bench.parser import build_parser

DEVICE = HostDevice()


def round_trip(codec: Codec, x: np.ndarray) -> np.ndarray:
    coder = codec.coder(DEVICE, x.dtype.name)
    flat = DEVICE.flat(x, x.dtype.name)
    wire, out = np.empty(coder.wire_nbytes(x.size), np.uint8), np.empty_like(flat)
    coder.decode(x.size, None, (wire[: coder.encode(x.size, flat, (), wire)],), out)
    return out.view(x.dtype).astype(np.float64)


def test_every_kernel_has_a_codec_and_every_codec_an_example() -> None:
    bound = {codec.coder(_Noting(), "float32") for codec in FIXED}  # type: ignore[arg-type]
    assert bound == set(_host.codecs())
    assert {codec.name for codec in EVERY} == set(compcoll.list_codecs())
    for cls in registry.codec_classes().values():
        for example in cls.examples:
            codec = cls(**example.options)
            digests = len(DTYPES) if codec in FIXED or codec.homomorphic else 0
            assert len(example.digests.split()) == digests or not registry.is_own(cls), example
            assert cls(**example.options).label.startswith(cls.name)


class _Noting:
    """A device that tells only which kernels are asked for."""

    def coder(self, kernel: tuple[str, int, int], dtype: str, *, variant: int = 0, seed: int = 0) -> Any:
        return kernel[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("codec", ENCODED, ids=repr)
def test_estimates_are_those_of_normal_values(codec: Codec, dtype: str) -> None:
    x = np.random.default_rng(1).standard_normal(1 << 18).astype(dtype)
    error = np.linalg.norm(round_trip(codec, x) - x) / np.linalg.norm(x)
    expected = codec.encoding_error(dtype)
    if expected is None:
        assert not codec.fixed_size
    else:
        assert error == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("codec", ENCODED, ids=repr)
def test_no_value_is_farther_off_than_the_bound(codec: Codec, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal(20_000) * 2.0 ** rng.integers(-12, 12, 20_000)).astype(numpy_dtype(dtype))
    bound = codec.error_bound(dtype)
    assert bound is not None and bound == bounds.bound_of(codec, dtype)
    exact = x.astype(np.float64)
    got = round_trip(codec, x)
    allowed = bounds.spread_out(bound, bounds.of_blocks(bound, exact), x.size)
    if DTYPES[dtype].is_half:
        allowed = allowed + np.abs(got) * DTYPES[dtype].rounding
    assert (np.abs(got - exact) <= allowed).all()


@pytest.mark.parametrize("codec", FIXED, ids=repr)
def test_feedback_keeps_no_more_than_an_encoding_loses(codec: Codec) -> None:
    """After 200 encodings of one array with what the ones before lost, where the codec says that feedback converges and
    that it loses little.
    """
    n = 1 << 14
    x = np.random.default_rng(3).standard_normal(n).astype(np.float32)
    coder = codec.coder(DEVICE, "float32")
    residual, wire = DEVICE.zeros_residual(n, "float32"), np.empty(coder.wire_nbytes(n), np.uint8)
    for rng_counter in range(200):
        coder.encode(n, x, (), wire, EncodeOptions(residual=residual, rng_counter=rng_counter))
    kept, error = np.linalg.norm(residual) / np.linalg.norm(x), codec.encoding_error("float32")
    assert error is not None
    if codec.feedback_converges("float32") and error < 0.5:
        assert kept <= 1.25 * error
    else:
        assert kept > 1 and codec.name in ("onebit", "sign", "terngrad")


def test_bits_on_the_wire_are_what_is_sent() -> None:
    for codec in FIXED:
        coder = codec.coder(DEVICE, "float32")
        assert wire_format(codec, DEVICE, "float32", 4).bits == 8 * coder.wire_nbytes(1 << 16) / (1 << 16)


# ---- options ----


@given(st.sampled_from(sorted(registry.codec_classes())), st.data())
def test_command_lines_make_every_codec(name: str, data: st.DataObject) -> None:
    """What is given as text is the codec that its fields make."""
    example = data.draw(st.sampled_from([codec for codec in EVERY if codec.name == name]))
    parser = argparse.ArgumentParser()
    arguments.add_codec_options(parser, "")
    words = ["--codec", name]
    for one in fields(example):  # type: ignore[arg-type]
        value = getattr(example, one.name)
        if value == one.default or not one.metadata["on_command_line"]:
            continue
        flag = {"dtype": "--codec-dtype", "seed": "--codec-seed"}.get(one.name, "--" + one.name)
        words += [flag] if value is True else [flag, str(value)]
    assert arguments.chosen_codec(parser.parse_args(words)) == example
    text = ",".join(f"{one.name}={getattr(example, one.name)}" for one in fields(example))  # type: ignore[arg-type]
    assert arguments.chosen_codec(parser.parse_args(["--codec", f"{name}:{text}" if text else name])) == example


@given(st.sampled_from(EVERY), st.data())
def test_texts_make_every_codec(codec: Codec, data: st.DataObject) -> None:
    """Whichever of its options stand behind the name; the others are arguments."""
    options = {one.name: getattr(codec, one.name) for one in fields(codec)}  # type: ignore[arg-type]
    written = data.draw(st.lists(st.sampled_from(sorted(options)), unique=True)) if options else []
    text = ",".join(f"{name}={options.pop(name)}" for name in written)
    text = f"{codec.name}:{text}" if written else codec.name
    assert compcoll.get_codec(text, **options) == codec == registry.as_codec(text, options)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("minmax:bits=many", {}, "minmax: bits='many' must be an integer from 1 to 8"),
        ("minmax:bits=4.0", {}, "minmax: bits='4.0' must be an integer from 1 to 8"),
        ("minmax:bits=9,block=64", {}, "minmax: bits=9 must be an integer from 1 to 8"),
        ("zfp:rate=fast", {}, "zfp: rate='fast' must be above 2 and at most 64"),
        ("zfp:lossless=maybe", {}, "zfp: lossless='maybe' must be True or False"),
        ("qsgd:norm=l1", {}, 'qsgd: norm=\'l1\' is neither "l2" nor "max"'),
        (
            "zfp:rte=8",
            {},
            "codec 'zfp' has no option 'rte' (did you mean 'rate'?): it takes lossless, precision, rate,",
        ),
        ("int8", {"rate": 8}, "codec 'int8' has no option 'rate' (an option of zfp): it takes block"),
        ("zfp:rate", {}, "codec='zfp:rate': 'rate' is not option=value: write NAME:option=value,option=value"),
        ("zfp:", {}, "codec='zfp:': '' is not option=value"),
        ("zfp:rate=8,", {}, "codec='zfp:rate=8,': '' is not option=value"),
        ("zfp:rate=8,rate=9", {}, "codec='zfp:rate=8,rate=9': rate is given twice"),
        ("zfp:rate=8", {"rate": 8}, "codec='zfp:rate=8' and rate=8: rate is given twice"),
        ("zpf:rate=8", {}, "unknown codec 'zpf' (did you mean 'zfp'?)"),
        ("", {}, "unknown codec ''"),
    ],
)
def test_texts_that_make_no_codec(text: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidArgument) as raised:
        compcoll.get_codec(text, **options)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rate 8", "--rate without a codec: give --codec cast, "),
        ("--codec none --codec-seed 1", "--codec-seed without a codec"),
        ("--codec minmax --bits many", "minmax: bits='many' must be an integer from 1 to 8"),
        ("--codec zfp:rate=8 --rate 8", "codec='zfp:rate=8,rate=8': rate is given twice"),
        ("--codec minmax --rate 8", "codec 'minmax' has no option 'rate'"),
        ("--codec zip", "unknown codec 'zip'"),
        ("--codec qsgd --norm l1", 'is neither "l2" nor "max"'),
    ],
)
def test_command_lines_say_what_is_wrong(words: str, said: str) -> None:
    parser = argparse.ArgumentParser()
    arguments.add_codec_options(parser, "")
    with pytest.raises(errors.InvalidArgument) as raised:
        arguments.chosen_codec(parser.parse_args(words.split()))
    assert said in str(raised.value)


def test_every_command_has_the_same_options_of_codecs() -> None:
    """None of them is what the command calls an option of its own: that would have raised."""
    tools = [argparse.ArgumentParser() for _ in range(2)]
    explain.add_arguments(tools[0])
    simulate.add_arguments(tools[1])
    alone = argparse.ArgumentParser()
    arguments.add_codec_options(alone, "")
    own = {flag for flag in alone.format_help().split() if flag.startswith("--")}
    assert {"--codec", "--rate", "--codec-dtype", "--no-lossless", "--zeta"} <= own and "--out-format" not in own
    for help_of in (
        *(tool.format_help() for tool in tools),
        _help(build_parser(), "allreduce"),
        _help(build_parser(), "codecs"),
    ):
        assert all(flag in help_of for flag in own if flag != "--help")


def _help(parser: argparse.ArgumentParser, command: str) -> str:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    text: str = commands.choices[command].format_help()
    return text


# ---- codecs of other packages ----


@dataclass(frozen=True)
class Keep(Codec):
    """Sends values as they are: no more than a name and a coder."""

    level: int = 1
    mode: str = option("plain", OneOf(("plain", "fancy")), "how")

    name = "keep"

    def coder(self, device: Device, dtype: str) -> Coder:
        return device.coder(("cast", computed_on(dtype).precision, 0), dtype)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep is installed."""
    point = EntryPoint("keep", f"{__name__}:Keep", "compcoll.codecs")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "compcoll.codecs" else [])
    registry.codec_classes.cache_clear()
    yield
    monkeypatch.undo()
    registry.codec_classes.cache_clear()


@pytest.mark.usefixtures("foreign")
def test_codecs_of_others_need_little() -> None:
    assert "keep" in compcoll.list_codecs() and compcoll.get_codec("keep", level=3) == Keep(3)
    inputs = normals(4, 1000)
    for algorithm in (*FLAT, "auto"):
        for result in World(4).allreduce(inputs, codec="keep", algorithm=algorithm):
            np.testing.assert_allclose(result, np.sum(inputs, axis=0), rtol=1e-4, atol=1e-5)
    assert Keep().feedback_converges("float32") and Keep().error_bound("float32") is None
    with pytest.raises(errors.InvalidArgument, match="has no error bound"):
        bounds.bound_of(Keep(), "float32")
    assert wire_format(Keep(), DEVICE, "float32", 4).bits == 32


def test_what_a_codec_is_taken_for_that_says_nothing() -> None:
    keep = Keep()
    assert (keep.block, keep.fixed_size, keep.additive, keep.stochastic, keep.kind) == (1, True, False, False, "keep")
    assert keep.quantizer(DEVICE, "float32", 2) is None and keep.sum_error(2) is None
    assert keep.encoding_error("float32") is None and keep.bias(recoded=True) == keep.bias(recoded=False) == 0
    assert (keep.label, Keep(2).label, Keep(2, "fancy").label) == ("keep", "keep level=2", "keep level=2,mode=fancy")
    assert compcoll.QSGD(seed=5).label == "qsgd bits=4" and compcoll.MinMax().label == "minmax bits=8"
    assert [compcoll.ZFP(tolerance=1e-3).wire_bits(DEVICE, dtype) for dtype in ("float32", "float64")] == [16, 32]


@pytest.mark.parametrize(("error", "stochastic", "converges"), [
    *((1.0, False, True), (1.02, False, False), (0.69, True, True), (0.71, True, False), (None, True, True)),
])  # fmt: skip
def test_feedback_needs_errors_below_what_is_there(error: float | None, stochastic: bool, converges: bool) -> None:
    class Lossy(Keep):
        def encoding_error(self, dtype: str) -> float | None:
            return error

    Lossy.stochastic = stochastic  # type: ignore[assignment, method-assign]
    assert Lossy().feedback_converges("float32") == converges


@pytest.mark.usefixtures("foreign")
def test_codecs_of_others_have_their_options_on_command_lines() -> None:
    parser = argparse.ArgumentParser()
    arguments.add_codec_options(parser, "")
    words = ["--codec", "keep", "--codec-level", "3", "--codec-mode", "fancy"]
    assert arguments.chosen_codec(parser.parse_args(words)) == Keep(3, "fancy")
    with pytest.raises(errors.InvalidArgument, match="keep: mode='odd' is neither"):
        arguments.chosen_codec(parser.parse_args([*words[:-1], "odd"]))
    with pytest.raises(errors.InvalidArgument, match="keep: level='high' must be of type int"):
        compcoll.get_codec("keep:level=high")


def test_what_is_no_codec_is_refused() -> None:
    class Alike:
        name, block, fixed_size = "alike", 1, True

        def coder(self, device: Any, dtype: str) -> Any: ...

    with pytest.raises(errors.InvalidArgument, match="is neither a codec nor the name of one"):
        registry.as_codec(Alike(), {})  # type: ignore[arg-type]


def test_bounds_are_values() -> None:
    assert ErrorBound() == bounds.bound_of(None, "float32")


@pytest.mark.parametrize("codec", ENCODED, ids=repr)
def test_coders_know_whether_wires_are_of_one_size(codec: Codec) -> None:
    """Who receives takes any other length than `wire_nbytes` for an error if `fixed_size` says so."""
    coder, n = codec.coder(HostDevice(), "float32"), 4096
    wires = np.zeros(coder.wire_nbytes(n), np.uint8)
    values = (np.zeros(n, np.float32), np.random.default_rng(0).standard_normal(n).astype(np.float32))
    lengths = {coder.encode(n, x, (), wires) for x in values}
    assert coder.fixed_size == codec.fixed_size == (lengths == {wires.size})
