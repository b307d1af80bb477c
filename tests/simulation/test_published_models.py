"""The models of published papers: what ours compute is what the papers' formulas say."""

from __future__ import annotations

import json
import math

import pytest

from compcoll.__main__ import main
from compcoll.errors import InvalidArgument
from compcoll.layout import World
from compcoll.plan.cost import Link, Profile, Speed, WireFormat, formula, raw
from compcoll.simulation.network import Network
from compcoll.simulation.run import step_seconds

SLOW = Link(latency=0.0, per_byte=1e-6)
INSTANT = Profile(
    inside=SLOW,
    between=SLOW,
    speeds=tuple(Speed(codec, bits, *[1e30] * 4) for codec, bits in (("none", 32.0), ("sparse", 0.32))),
    message=0.0,
    call=0.0,
)
"""Machines on which bytes alone take time."""


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_sparse_ring_against_the_dense_ring(ranks: int) -> None:
    """Tsuzuku et al., section 5: T_v = n s p β / c, T_r = 2 (p - 1) n s β / p, so 2 (p - 1) c / p² times as fast."""
    nbytes, c = 64 << 20, 100
    dense = formula(INSTANT, "allreduce", "ring", nbytes, World(ranks), raw(), 1 << 30)
    sparse = formula(INSTANT, "allreduce", "sparse_ring", nbytes, World(ranks), WireFormat("sparse", 32 / c), 1 << 30)
    assert sparse == pytest.approx(nbytes * ranks * SLOW.per_byte / c)
    assert dense / sparse == pytest.approx(2 * (ranks - 1) * c / ranks**2)


def published_throughput(
    *, g: float, i: int, j: int, c_gpu: float, c_cpu: float, c_lat: float, c_net: float, t_b: float, batch: int
) -> float:
    """LDTE-BS's paper: T_comm, T_comp and examples a second, letter by letter."""
    t_comm = g / c_gpu * math.log2(i) + g / c_cpu + (c_lat + g / c_net) * math.log2(j)
    t_comp = t_b - g / c_cpu
    return i * j * batch / (t_comm + t_comp)


@pytest.mark.parametrize(("i", "j"), [(1, 1), (1, 8), (4, 1), (4, 32), (8, 3)])
def test_throughput_of_training(i: int, j: int) -> None:
    network = Network(Link(1e-6, 1 / 10e9), Link(50e-6, 1 / 125e6), ranks_per_node=i)
    expected = published_throughput(g=1e8, i=i, j=j, c_gpu=10e9, c_cpu=6e9, c_lat=50e-6, c_net=125e6, t_b=0.5, batch=32)
    assert i * j * 32 / step_seconds(1e8, 0.5, network, i * j) == pytest.approx(expected)


def test_throughput_of_what_cannot_be() -> None:
    network = Network(SLOW, SLOW, ranks_per_node=4)
    with pytest.raises(InvalidArgument, match="whole nodes"):
        step_seconds(1e8, 0.5, network, 6)
    with pytest.raises(InvalidArgument, match="positive"):
        step_seconds(1e8, 0.0, network, 8)


def test_simulate_tells_throughputs(capsys: pytest.CaptureFixture[str]) -> None:
    """The case of docs/simulation.md, beside the published 20.73 at 1 Gb/s."""
    words = "simulate --ranks 128 --ranks-per-node 4 --inside 80gbit --link 1gbit --latency 50us -m 528M --codec topk"
    words += " --density 0.001 --algorithm ring --computing 1.08s"
    assert main(words.split()) == 0
    assert "20.75 × as fast" in capsys.readouterr().out
    assert main([*words.split(), "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["training"]
    g = 528 * 2**20
    letters = {"i": 4, "j": 32, "c_gpu": 10e9, "c_cpu": 6e9, "c_lat": 50e-6, "c_net": 125e6, "t_b": 1.08, "batch": 1}
    assert 128 / step["uncompressed"] == pytest.approx(published_throughput(g=g, **letters))
    assert 128 / step["compressed"] == pytest.approx(published_throughput(g=0.002 * g, **letters))
