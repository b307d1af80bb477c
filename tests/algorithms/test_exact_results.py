"""Results bit by bit: the algorithms' references in NumPy, with zfpy and casts for codecs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zfpy
from algorithms.references import RoundTrip, Values, reference
from fakes.loopback import World, normals
from promises import ALGORITHMS

from compcoll import ZFP, Cast, Codec


def by_zfpy(rate: float) -> RoundTrip:
    def round_trip(x: Values) -> Values:
        stream = zfpy.compress_numpy(np.ascontiguousarray(x), rate=rate, write_header=False)
        return np.array(zfpy._decompress(stream + bytes(64), zfpy.dtype_to_ztype(x.dtype), x.shape, rate=rate))

    return round_trip


def by_cast(dtype: Any) -> RoundTrip:
    return lambda x: x.astype(dtype).astype(x.dtype)


def replayed(algorithm: str, xs: list[Values], code: RoundTrip) -> Values:
    replay = reference(algorithm).replay
    assert replay is not None, f"tests/algorithms/references/{algorithm}.py needs a replay"
    return replay(xs, code)


CODECS: list[tuple[Codec, RoundTrip, Any]] = [
    (ZFP(rate=8), by_zfpy(8), np.float32),
    (ZFP(rate=16), by_zfpy(16), np.float32),
    (ZFP(rate=5.25), by_zfpy(5.25), np.float32),
    (ZFP(rate=20), by_zfpy(20), np.float64),
    (Cast("float16"), by_cast(np.float16), np.float32),
    (Cast("float32"), by_cast(np.float32), np.float64),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("codec", "code", "dtype"), CODECS, ids=lambda v: repr(v) if isinstance(v, Codec) else "")
@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_bits_are_those_of_the_replay(algorithm: str, codec: Codec, code: RoundTrip, dtype: Any, p: int) -> None:
    n = 64 * p * (p // 2 + p % 2)  # chunks of equal length, for the ranks and for the nodes
    xs = normals(p, n, dtype, seed=p)
    results = World(p, ranks_per_node=2, seed=p).allreduce(xs, codec=codec, algorithm=algorithm)
    expected = replayed(algorithm, xs, code)
    for result in results:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_means_divide_before_encoding(algorithm: str) -> None:
    xs = normals(4, 960)
    results = World(4, ranks_per_node=2).allreduce(xs, op="mean", codec="zfp", rate=16, algorithm=algorithm)
    expected = replayed(algorithm, [x * np.float32(0.25) for x in xs], by_zfpy(16))
    np.testing.assert_array_equal(results[3], expected)
