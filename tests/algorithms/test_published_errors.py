"""What bit-identical results cost: recursive doubling against the form in which each rank keeps its own half exact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fakes.loopback import World, exact_sum, normals

import compcoll
from compcoll import ZFP, Cast, Codec, MinMax
from compcoll.codecs import FP8


def own_half_exact(inputs: Sequence[np.ndarray], codec: Codec) -> list[np.ndarray]:
    """Add what comes, decoded, to what is there: log2 p exchanges with rank XOR 2**k."""
    values, distance = list(inputs), 1
    while distance < len(values):
        coded = [compcoll.decode(compcoll.encode(x, codec), x.size, x.dtype, codec) for x in values]
        values = [x + coded[rank ^ distance] for rank, x in enumerate(values)]
        distance *= 2
    return values


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [
        (ZFP(rate=8), 1.40, 1.65),
        (ZFP(rate=16), 1.40, 1.65),
        (MinMax(bits=8), 1.40, 1.44),
        (MinMax(bits=4), 1.39, 1.44),
        (Cast("bfloat16"), 1.40, 1.52),
        (FP8(), 1.40, 1.53),
    ],
)
def test_equal_bits_cost_about_the_root_of_two(codec: Codec, least: float, most: float, ranks: int) -> None:
    """docs/internals/algorithms.md has the factors."""
    inputs = normals(ranks, 1 << 15, seed=ranks)
    exact = exact_sum(inputs)
    results = World(ranks).allreduce(inputs, codec=codec, algorithm="recursive_doubling")
    assert all(np.array_equal(result, results[0]) for result in results)
    others = own_half_exact(inputs, codec)
    assert not np.array_equal(others[0], others[1])
    theirs = np.sqrt(np.mean([np.sum((other - exact) ** 2) for other in others]))
    assert least < np.linalg.norm(results[0] - exact) / theirs < most
