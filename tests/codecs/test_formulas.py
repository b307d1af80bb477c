"""Codecs against their formulas in NumPy (`oracles.codecs`), on every instruction set."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.codecs import configurations, random_codecs, references
from oracles.quantizers import blocks_of_all_kinds
from promises import FIXED
from properties import examples

import compcoll
from compcoll import Codec
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions

SETS = HostDevice.instruction_sets()
SIZES = [(10000, 2048), (6001, 64), (333, 8), (777, 24), (5, 2048), (2049, 2048), (1500, 512)]
FORMULAS = {name: one.formula for name, one in references().items() if one.formula is not None}


def encode(instruction_set: str, codec: Codec, x: np.ndarray, rng_counter: int = 0, position: int = 0) -> bytes:
    coder = codec.coder(HostDevice(1, instruction_set), x.dtype.name)
    guarded = np.full(coder.wire_nbytes(x.size) + 64, 0xA5, np.uint8)
    how = EncodeOptions(rng_counter=rng_counter, position=position)
    nbytes = coder.encode(x.size, x, (), guarded[:-64], how)
    assert (guarded[nbytes:] == 0xA5).all()
    return guarded[:nbytes].tobytes()


def decode(instruction_set: str, codec: Codec, wire: bytes, n: int, dtype: Any, add: Any = None) -> np.ndarray:
    out = np.full(n + 16, 7.0, dtype)
    coder = codec.coder(HostDevice(1, instruction_set), np.dtype(dtype).name)
    coder.decode(n, add, (np.frombuffer(wire, np.uint8),), out[:n])
    assert (out[n:] == 7.0).all()
    return out[:n]


def check(instruction_set: str, codec: Codec, x: np.ndarray, rng_counter: int = 0, position: int = 0) -> None:
    with np.errstate(under="ignore"):
        wire, values = FORMULAS[codec.name](codec, x, rng_counter, position)
    assert encode(instruction_set, codec, x, rng_counter, position) == wire
    nan = np.isnan(values)
    decoded = decode(instruction_set, codec, wire, x.size, x.dtype)
    assert np.isnan(decoded[nan]).all() and np.isfinite(decoded[~nan]).all()
    np.testing.assert_array_equal(decoded[~nan], values[~nan])
    base = np.random.default_rng(x.size).standard_normal(x.size).astype(x.dtype)
    sums = decode(instruction_set, codec, wire, x.size, x.dtype, add=base)
    np.testing.assert_array_equal(sums[~nan], (base + values)[~nan])


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("codec", [codec for name in FORMULAS for codec in configurations(name)], ids=repr)
def test_codecs_follow_their_formulas(instruction_set: str, dtype: Any, codec: Any) -> None:
    for seed, (n, block) in enumerate(SIZES):
        own = {one.name for one in fields(codec)}
        given = {name: value for name, value in {"block": block, "seed": 2**63 + seed}.items() if name in own}
        x = blocks_of_all_kinds(dtype, n, seed)
        check(instruction_set, replace(codec, **given), x, rng_counter=7 << 32 | seed, position=8 * n)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Any, Any]:
    """Draw a codec that has a formula, and an element type."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return draw(st.sampled_from(sorted(FORMULAS)).flatmap(lambda name: random_codecs(name, dtype.__name__))), dtype


@examples(200)
@given(
    drawn=drawn(),
    n=st.integers(0, 3000),
    seed=st.integers(0, 2**31),
    rng_counter=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40).map(lambda p: 8 * p),
    instruction_set=st.sampled_from(SETS),
)
def test_wires_are_the_formulas(
    drawn: tuple[Any, Any], n: int, seed: int, rng_counter: int, position: int, instruction_set: str
) -> None:
    codec, dtype = drawn
    check(instruction_set, codec, blocks_of_all_kinds(dtype, n, seed), rng_counter, position)


@examples(150)
@given(content=st.binary(max_size=600), drawn=drawn())
def test_any_bytes_decode_alike(content: bytes, drawn: tuple[Any, Any]) -> None:
    (codec, dtype), n = drawn, 150
    length = codec.coder(HostDevice(), np.dtype(dtype).name).wire_nbytes(n)
    wire = (content + bytes(length))[:length]
    results = [decode(one, codec, wire, n, dtype) for one in SETS]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("codec", [codec for codec in FIXED if codec.name in FORMULAS], ids=repr)
def test_halves_are_computed_on_in_float32(dtype: str, codec: Codec) -> None:
    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    x = np.random.default_rng(2).standard_normal(5000).astype(kind)
    wire, values = FORMULAS[codec.name](codec, x.astype(np.float32), 0, 0)
    got = compcoll.encode(x, codec)
    assert got.tobytes() == wire
    assert compcoll.decode(got, x.shape, x.dtype, codec).tobytes() == values.astype(kind).tobytes()


@pytest.mark.parametrize("codec", FIXED, ids=repr)
def test_threads_do_not_change_the_bits(codec: Codec) -> None:
    x = np.random.default_rng(0).standard_normal(300_001).astype(np.float32)
    wires = []
    for threads in (1, 2):
        coder = codec.coder(HostDevice(threads), "float32")
        wires.append(np.zeros(coder.wire_nbytes(x.size), np.uint8))
        coder.encode(x.size, x, (), wires[-1], EncodeOptions(rng_counter=3))
    np.testing.assert_array_equal(wires[0], wires[1])


@examples(80)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(FORMULAS)),
    n=st.integers(1, 3000),
    seed=st.integers(0, 2**31),
    feed=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
)
def test_residuals_are_what_was_lost(
    data: st.DataObject, name: str, n: int, seed: int, feed: bool, scale: float
) -> None:
    codec = data.draw(random_codecs(name, "float32"), "codec")
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    before = np.random.default_rng(seed + 1).standard_normal(n).astype(np.float32)
    for instruction_set in SETS:
        coder = codec.coder(HostDevice(1, instruction_set), "float32")
        wire, residual, decoded = np.empty(coder.wire_nbytes(n), np.uint8), before.copy(), np.empty_like(x)
        coder.encode(n, x, (), wire, EncodeOptions(residual=residual, feed=feed, residual_scale=scale, decoded=decoded))
        wanted = x + before if feed else x
        np.testing.assert_array_equal(decoded, FORMULAS[name](codec, wanted, 0, 0)[1])
        lost = (wanted - decoded) * np.float32(scale)
        np.testing.assert_array_equal(residual, lost if feed else before + lost)
