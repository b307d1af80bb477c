"""Results bit by bit: the algorithms replayed in NumPy, with zfpy and casts for codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zfpy
from fakes.loopback import World, normals
from promises import ALGORITHMS

from compcoll import ZFP, Cast, Codec

Values = np.ndarray
RoundTrip = Callable[[Values], Values]


def by_zfpy(rate: float) -> RoundTrip:
    def round_trip(x: Values) -> Values:
        stream = zfpy.compress_numpy(np.ascontiguousarray(x), rate=rate, write_header=False)
        return np.array(zfpy._decompress(stream + bytes(64), zfpy.dtype_to_ztype(x.dtype), x.shape, rate=rate))

    return round_trip


def by_cast(dtype: Any) -> RoundTrip:
    return lambda x: x.astype(dtype).astype(x.dtype)


def ring(xs: list[Values], code: RoundTrip) -> Values:
    p, m = len(xs), xs[0].size // len(xs)
    out = np.empty_like(xs[0])
    for chunk in range(p):
        here = np.s_[chunk * m : (chunk + 1) * m]
        partial = xs[(chunk + 1) % p][here]
        for step in range(2, p + 1):
            partial = xs[(chunk + step) % p][here] + code(partial)
        out[here] = code(partial)
    return out


def direct(xs: list[Values], code: RoundTrip) -> Values:
    p, m = len(xs), xs[0].size // len(xs)
    out = np.empty_like(xs[0])
    for owner in range(p):
        here = np.s_[owner * m : (owner + 1) * m]
        total = xs[owner][here]
        for rank in range(p):
            if rank != owner:
                total = total + code(xs[rank][here])
        out[here] = code(total)
    return out


def recursive_doubling(xs: list[Values], code: RoundTrip) -> Values:
    p = len(xs)
    power = 1 << (p.bit_length() - 1)
    folded = p - power
    pairs = [xs[2 * i + 1] + code(xs[2 * i]) for i in range(folded)]
    values = pairs + xs[2 * folded :]
    distance = 1
    while distance < power:
        decoded = [code(value) for value in values]
        values = [decoded[i & ~distance] + decoded[i | distance] for i in range(power)]
        distance *= 2
    return values[0]


def hierarchical(xs: list[Values], code: RoundTrip, per_node: int = 2) -> Values:
    sums = []
    for first in range(0, len(xs), per_node):
        total = xs[first]
        for x in xs[first + 1 : first + per_node]:
            total = total + x
        sums.append(total)
    return direct(sums, code) if len(sums) > 1 else sums[0]


REPLAYS = {"ring": ring, "direct": direct, "recursive_doubling": recursive_doubling, "hierarchical": hierarchical}
CODECS: list[tuple[Codec, RoundTrip, Any]] = [
    (ZFP(rate=8), by_zfpy(8), np.float32),
    (ZFP(rate=16), by_zfpy(16), np.float32),
    (ZFP(rate=5.25), by_zfpy(5.25), np.float32),
    (ZFP(rate=20), by_zfpy(20), np.float64),
    (Cast("float16"), by_cast(np.float16), np.float32),
    (Cast("float32"), by_cast(np.float32), np.float64),
]


def test_every_algorithm_has_a_replay() -> None:
    assert set(ALGORITHMS) == set(REPLAYS), "REPLAYS needs each algorithm in NumPy"


@pytest.mark.parametrize("algorithm", REPLAYS)
@pytest.mark.parametrize(("codec", "code", "dtype"), CODECS, ids=lambda v: repr(v) if isinstance(v, Codec) else "")
@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_bits_are_those_of_the_replay(algorithm: str, codec: Codec, code: RoundTrip, dtype: Any, p: int) -> None:
    n = 64 * p * (p // 2 + p % 2)  # chunks of equal length, for the ranks and for the nodes
    xs = normals(p, n, dtype, seed=p)
    results = World(p, ranks_per_node=2, seed=p).allreduce(xs, codec=codec, algorithm=algorithm)
    expected = REPLAYS[algorithm](xs, code)
    for result in results:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("algorithm", REPLAYS)
def test_means_divide_before_encoding(algorithm: str) -> None:
    xs = normals(4, 960)
    results = World(4, ranks_per_node=2).allreduce(xs, op="mean", codec="zfp", rate=16, algorithm=algorithm)
    expected = REPLAYS[algorithm]([x * np.float32(0.25) for x in xs], by_zfpy(16))
    np.testing.assert_array_equal(results[3], expected)
