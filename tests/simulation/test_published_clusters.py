"""The clusters drawn in docs/measurements/networks.md: compressed and uncompressed sums run on one device."""

from __future__ import annotations

import pytest

from compcoll.codecs import ZFP
from compcoll.simulation import run as simulation
from osu_like_bench.pages.networks import CLUSTERS


@pytest.mark.parametrize("rate", [8, 16])
@pytest.mark.parametrize("name", ["ring", "recursive_doubling"])
def test_no_more_is_saved_than_the_ratio_allows(name: str, rate: int) -> None:
    """A baseline that adds on another device than the codec's saved 87 % of the time where half of the bytes went."""
    for cluster in CLUSTERS:
        for nbytes in (1 << 19, 1 << 27):
            plain = simulation.allreduce(cluster.scenario(16, nbytes, 0), name).seconds
            compressed = simulation.allreduce(cluster.scenario(16, nbytes, rate), name, ZFP(rate=rate)).seconds
            assert rate / 32 <= compressed / plain < 1, (cluster.name, nbytes)
