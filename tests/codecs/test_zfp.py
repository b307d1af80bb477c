"""Fixed-rate ZFP against zfpy, on every instruction set that this CPU has."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zfpy
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from compcoll import ZFP
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions

SETS = HostDevice.instruction_sets()


def as_bytes(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint8)


# zfpy corrupts memory at float32 rates up to 2 and float64 rates below 3: it is never called there.
RATES = {
    np.float32: [2.25, 2.5, 3, 4, 5.25, 7.75, 8, 9.5, 10, 11, 12, 14.5, 15.75, 16, 17, 20, 24, 28.25, 31.5, 32],
    np.float64: [3, 3.25, 4, 8, 10.5, 16, 17, 23.25, 24, 31, 32, 40, 48.5, 57, 63.75, 64],
}
SMALLEST = {np.float32: 2.0**-97, np.float64: 2.0**-961}


def coder(instruction_set: str, rate: float, dtype: Any) -> Any:
    return ZFP(rate=rate).coder(HostDevice(1, instruction_set), np.dtype(dtype).name)


def encode(instruction_set: str, rate: float, x: np.ndarray) -> bytes:
    bound = coder(instruction_set, rate, x.dtype)
    guarded = np.full(bound.wire_nbytes(x.size) + 64, 0xA5, np.uint8)
    nbytes = bound.encode(x.size, x, (), guarded[: -64 or None])
    assert (guarded[nbytes:] == 0xA5).all()
    return guarded[:nbytes].tobytes()


def decode(
    instruction_set: str, rate: float, wire: bytes, n: int, dtype: Any, add: np.ndarray | None = None
) -> np.ndarray:
    # The wire ends where its memory does: reading on would show under a sanitizer, writing on shows here.
    out = np.full(n + 16, 7.0, dtype)
    coder(instruction_set, rate, dtype).decode(n, add, (np.frombuffer(wire, np.uint8),), out[:n])
    assert (out[n:] == 7.0).all()
    return out[:n]


def reference(x: np.ndarray, rate: float) -> bytes:
    return bytes(zfpy.compress_numpy(x, rate=rate, write_header=False))


def reference_decode(wire: bytes, n: int, dtype: Any, rate: float) -> np.ndarray:
    # Room behind the stream, since libzfp reads whole words.
    ztype = zfpy.dtype_to_ztype(np.dtype(dtype))
    return np.array(zfpy._decompress(wire + bytes(64), ztype, (n,), rate=rate))


def data(kind: str, n: int, dtype: Any, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(n)
    exponents = np.finfo(dtype).maxexp - 3
    kinds = {
        "normal": normal * 1e-3,
        "large": normal / np.abs(normal).max(initial=1) * 2.0**exponents,
        "small": normal * SMALLEST[dtype] * 64,
        "smooth": np.sin(np.arange(n) * 0.001),
        "ramp": np.arange(n) * 0.37 - 11,
        "integers": rng.integers(-5, 6, n),
        "constant": np.full(n, -math.pi),
        "sparse": np.where(rng.random(n) < 0.02, normal, 0.0),
        "mixed": normal * 2.0 ** rng.integers(-90, 90, n),
        "mixed blocks": normal * np.repeat(2.0 ** rng.integers(-60, 60, -(-n // 4)), 4)[:n],
        "signs": np.where(normal < 0, -1.0, 1.0),
        "powers": 2.0 ** rng.integers(-20, 20, n),
        "half zero": np.where(np.arange(n) // 64 % 2, normal, 0.0),
    }
    return kinds[kind].astype(dtype)


KINDS = [
    "normal",
    "large",
    "small",
    "smooth",
    "ramp",
    "integers",
    "constant",
    "sparse",
    "mixed",
    "mixed blocks",
    "signs",
]
KINDS += ["powers", "half zero"]


def keep_out_of_the_flushed_range(x: np.ndarray) -> np.ndarray:
    """Blocks whose largest magnitude is too small for libzfp's scale are ours to flush: make them larger."""
    padded = np.zeros(-(-x.size // 4) * 4, x.dtype)
    padded[: x.size] = x
    blocks = padded.reshape(-1, 4)
    tiny = (np.abs(blocks).max(axis=1) < SMALLEST[x.dtype.type]) & (blocks != 0).any(axis=1)
    blocks[tiny] = 0
    return padded[: x.size]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_values_of_zfpy(instruction_set: str, dtype: Any, kind: str) -> None:
    x = keep_out_of_the_flushed_range(data(kind, 9001, dtype))
    for rate in RATES[dtype]:
        expected = reference(x, rate)
        wire = encode(instruction_set, rate, x)
        assert wire == expected, (
            f"rate {rate}: byte {next(i for i, (a, b) in enumerate(zip(wire, expected)) if a != b)}"
        )
        decoded = decode(instruction_set, rate, wire, x.size, dtype)
        assert decoded.tobytes() == reference_decode(expected, x.size, dtype, rate).tobytes(), f"rate {rate}"
        sums = decode(instruction_set, rate, wire, x.size, dtype, add=x)
        assert sums.tobytes() == (x + decoded).tobytes(), f"rate {rate}"


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_length(instruction_set: str, dtype: Any) -> None:
    x = data("normal", 1200, dtype)
    for n in [*range(1, 300), 511, 512, 513, 1023, 1025, 1200]:
        for rate in (8, 16, 5.25):
            expected = reference(x[:n].copy(), rate)
            assert encode(instruction_set, rate, x[:n]) == expected, (n, rate)
            decoded = decode(instruction_set, rate, expected, n, dtype)
            assert decoded.tobytes() == reference_decode(expected, n, dtype, rate).tobytes(), (n, rate)


bits32 = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200)


@examples(300)
@given(bits=bits32, rate=st.sampled_from(RATES[np.float32]))
def test_any_bit_pattern(bits: list[int], rate: float) -> None:
    """Finite blocks as zfpy codes them, the others as NaN, on every instruction set."""
    x = np.array(bits, np.uint32).view(np.float32)
    blocks = -(-x.size // 4)
    finite_block = np.array([np.isfinite(x[4 * i : 4 * i + 4]).all() for i in range(blocks)])
    finite = keep_out_of_the_flushed_range(np.where(np.repeat(finite_block, 4)[: x.size], x, np.float32(0)))
    expected = np.frombuffer(reference(finite, rate), np.uint8)
    for instruction_set in SETS:
        wire = np.frombuffer(encode(instruction_set, rate, finite), np.uint8)
        assert wire.tobytes() == expected.tobytes()
        got = decode(instruction_set, rate, encode(instruction_set, rate, x), x.size, np.float32)
        for i in range(blocks):
            block = got[4 * i : 4 * i + 4]
            assert np.isfinite(block).all() if finite_block[i] else np.isnan(block).all()


@examples(200)
@given(content=st.binary(min_size=1, max_size=900), rate=st.sampled_from(RATES[np.float32]), wide=st.booleans())
def test_any_bytes_decode_alike(content: bytes, rate: float, wide: bool) -> None:
    dtype = np.float64 if wide else np.float32
    if wide:
        rate = max(rate, 3)
    n = 4 * (len(content) * 8 // math.floor(4 * rate + 0.5))
    wire = content + bytes(coder(SETS[0], rate, dtype).wire_nbytes(n))
    results = {decode(s, rate, wire, n, dtype).tobytes() for s in SETS}
    assert len(results) == 1


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_blocks(instruction_set: str, dtype: Any, value: float) -> None:
    for n in (1, 4, 7, 64, 1000):
        for where in {0, n // 2, n - 1}:
            x = data("normal", n, dtype)
            x[where] = value
            first = where // 4 * 4
            for rate in (3, 8, 16, 32):
                got = decode(instruction_set, rate, encode(instruction_set, rate, x), n, dtype)
                assert np.isnan(got[first : first + 4]).all()
                rest = np.delete(got, np.s_[first : first + 4])
                assert np.isfinite(rest).all()


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiny_blocks_become_zero(instruction_set: str, dtype: Any) -> None:
    smallest = SMALLEST[dtype] / 2
    for value in (np.finfo(dtype).tiny, np.finfo(dtype).smallest_subnormal, smallest * 0.999, -smallest / 3):
        x = np.full(64, value, dtype)
        wire = encode(instruction_set, 8, x)
        assert not any(wire)
        got = decode(instruction_set, 8, wire, 64, dtype)
        assert got.tobytes() == np.zeros(64, dtype).tobytes()
    kept = np.full(64, smallest * 2, dtype)
    np.testing.assert_allclose(
        decode(instruction_set, 16, encode(instruction_set, 16, kept), 64, dtype), kept, rtol=1e-3
    )


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("offset", range(1, 8))
def test_unaligned_memory(instruction_set: str, offset: int) -> None:
    x = data("normal", 1000 + offset, np.float32)[offset:]
    assert encode(instruction_set, 8, x) == reference(x.copy(), 8)


def rough(kind: str, n: int, seed: int) -> np.ndarray:
    """Also what zfpy cannot take."""
    rng = np.random.default_rng(seed)
    if kind == "any bits":
        return rng.integers(0, 2**32, n, np.uint32).view(np.float32)
    x = data("normal" if kind not in KINDS else kind, n, np.float32, seed)
    if kind == "sums":
        return np.cumsum(x)
    if kind == "subnormal":
        return x * np.float32(1e-36)
    if kind == "lowest":
        return x * np.float32(1e3 * SMALLEST[np.float32])
    if kind == "not finite":
        x[rng.random(n) < 0.01] = rng.choice([np.nan, np.inf, -np.inf])
    if kind == "some equal":
        x[rng.random(n) < 0.5] = 1.5
    return x


ROUGH = [*KINDS, "any bits", "sums", "subnormal", "lowest", "not finite", "some equal"]
parts = st.lists(
    st.tuples(st.sampled_from(ROUGH), st.integers(1, 700) | st.sampled_from([4, 64, 256, 1024])),
    min_size=1,
    max_size=6,
)


def together(parts: list[tuple[str, int]], seed: int) -> np.ndarray:
    return np.concatenate([rough(kind, n, seed + i) for i, (kind, n) in enumerate(parts)])


@examples(300)
@given(
    parts=parts,
    seed=st.integers(0, 2**31),
    maxbits=st.integers(9, 36) | st.sampled_from([16, 32]),
    dtype=st.sampled_from([np.float32, np.float32, np.float16, ml_dtypes.bfloat16]),
    wires=st.integers(0, 1),
    feed=st.sampled_from([None, True, False]),
)
def test_encoders_know_what_others_decode(
    parts: list[tuple[str, int]], seed: int, maxbits: int, dtype: Any, wires: int, feed: bool | None
) -> None:
    """Bit for bit, wherever the bits run out, and on every instruction set the same."""
    with np.errstate(all="ignore"):
        x = together(parts, seed).astype(dtype)
        n, results = x.size, set()
        before = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
        for instruction_set in SETS:
            bound = coder(instruction_set, maxbits / 4, dtype)
            first, wire, wanted_wire = (np.zeros(bound.wire_nbytes(n), np.uint8) for _ in range(3))
            decoded, own, wanted = np.full(n + 16, 7, dtype), np.zeros(n, dtype), np.zeros(n, dtype)
            bound.encode(n, as_bytes(x), (), first)
            given_wires = (first,) * wires
            residual = None if feed is None else before.copy()
            how = EncodeOptions(residual, bool(feed), residual_scale=0.5, decoded=as_bytes(decoded[:n]))
            bound.encode(n, as_bytes(x), given_wires, wire, how)
            bound.decode(n, None, (wire,), as_bytes(wanted))
            assert decoded[:n].tobytes() == wanted.tobytes()
            assert (decoded[n:] == 7).all()
            if feed is None:
                bound.encode(n, as_bytes(x), given_wires, wanted_wire)
                assert wire.tobytes() == wanted_wire.tobytes()
                own[:] = x  # in place
                bound.encode(n, as_bytes(own), given_wires, wanted_wire, EncodeOptions(decoded=as_bytes(own)))
                assert own.tobytes() == wanted.tobytes()
            elif dtype is np.float32 and wires == 0:
                total = x + before if feed else x
                lost = (total - wanted) * np.float32(0.5) + (np.float32(0) if feed else before)
                kept = np.where(np.isfinite(lost), lost, np.float32(0) if feed else before)
                np.testing.assert_array_equal(residual, kept)
            results.add((wire.tobytes(), wanted.tobytes(), None if residual is None else residual.tobytes()))
        assert len(results) == 1


@pytest.mark.parametrize("kind", ROUGH)
def test_encoders_know_what_others_decode_at_every_rate(kind: str) -> None:
    x = rough(kind, 5003, 5).astype(np.float32)
    for instruction_set in SETS:
        for maxbits in range(9, 129):
            bound = coder(instruction_set, maxbits / 4, np.float32)
            wire, own, wanted = np.zeros(bound.wire_nbytes(x.size), np.uint8), np.zeros_like(x), np.zeros_like(x)
            bound.encode(x.size, x, (), wire, EncodeOptions(decoded=own))
            bound.decode(x.size, None, (wire,), wanted)
            assert own.tobytes() == wanted.tobytes(), maxbits


def test_variable_size_modes_are_zfpys() -> None:
    x = data("integers", 5000, np.float32)
    for options in ({"tolerance": 1e-4}, {"precision": 12}, {"lossless": True}):
        bound = ZFP(**options).coder(HostDevice(), "float32")  # type: ignore[arg-type]
        wire = np.empty(bound.wire_nbytes(x.size), np.uint8)
        nbytes = bound.encode(x.size, x, (), wire)
        mode = {} if "lossless" in options else options
        assert wire[1:nbytes].tobytes() == bytes(zfpy.compress_numpy(x, write_header=False, **mode))
        out = np.empty_like(x)
        bound.decode(x.size, None, (wire[:nbytes],), out)
        if "tolerance" in options:
            assert np.abs(out - x).max() <= 1e-4
        if "lossless" in options:
            assert out.tobytes() == x.tobytes()
