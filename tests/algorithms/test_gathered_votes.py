"""Sign-SGD's majority vote at one bit a value: what is sent, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, normals

from compcoll import Sign, Stats
from compcoll.host.device import HostDevice


def vote(inputs: list[np.ndarray], algorithm: str, block: int = 64) -> tuple[list[np.ndarray], Stats]:
    world = World(len(inputs), ranks_per_node=1)
    requests = [
        c.iallreduce(x, codec=Sign(block=block), algorithm=algorithm) for c, x in zip(world.comms, inputs, strict=True)
    ]
    return world.loopback.run(requests), requests[0].stats


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 15])
def test_one_bit_a_value_of_each_rank(ranks: int, algorithm: str) -> None:
    """p - 1 bits a value leave a rank: 1, 3 and 7 on 2, 4 and 8; fields that are added were 4, 6 and 14."""
    n = 1 << 16
    results, stats = vote(normals(ranks, n), algorithm, 2048)
    assert ranks - 1 <= 8 * stats.wire_nbytes / n < ranks - 1 + 0.05
    assert stats.ratio == pytest.approx(2 * 32 / ranks, rel=0.06)
    assert len({result.tobytes() for result in results}) == 1


def test_many_ranks_add_fields() -> None:
    """On 16 ranks both forms send 15 bits a value, and from there on fields fewer."""
    assert Sign().quantizer(HostDevice(), "float32", 15).gathered is not None
    assert Sign().quantizer(HostDevice(), "float32", 16).gathered is None
    n = 1 << 13
    _, stats = vote(normals(16, n), "ring", 2048)
    assert stats.ratio == pytest.approx(4, rel=0.06)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 63, 64, 65, 1000])
@pytest.mark.parametrize("ranks", [2, 5, 15])
def test_zeros_do_not_vote_and_what_is_not_finite_marks_its_block(ranks: int, n: int) -> None:
    """Some blocks have zeros on some ranks, some NaN; negative zeros, subnormal numbers and ties are among them."""
    rng = np.random.default_rng(n)
    inputs = [np.round(rng.standard_normal(n)).astype(np.float32) for _ in range(ranks)]
    for x in inputs:
        x[128:512] = rng.choice([-1e-40, 1e-40], x[128:512].size)
        x[x == 0] = rng.choice([-0.0, 0.0], np.count_nonzero(x == 0))
    if n > 700:
        inputs[1][700] = np.nan
        inputs[0][800] = -np.inf
    expected = np.sign(np.sum([np.sign(x.astype(np.float64)) for x in inputs], axis=0))
    for where in (700, 800):
        expected[where // 64 * 64 : where // 64 * 64 + 64] = np.nan
    for algorithm in ("ring", "direct"):
        results, stats = vote(inputs, algorithm)
        for result in results:
            np.testing.assert_array_equal(result, expected)
    if n == 1000:  # 16 blocks: 6 without zeros; 2 or 3 are not finite
        assert 1.3 < 8 * stats.wire_nbytes / n / (ranks - 1) < 1.9


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_checksums_and_types(dtype: Any) -> None:
    from compcoll.dtypes import numpy_dtype

    inputs = [x.astype(numpy_dtype(dtype)) for x in normals(4, 3001)]
    expected = np.sign(np.sum([np.sign(x.astype(np.float64)) for x in inputs], axis=0))
    for checksum in (False, True):
        results = World(4, checksum=checksum).allreduce(inputs, codec="sign", algorithm="ring")
        np.testing.assert_array_equal(results[3].astype(np.float64), expected)
