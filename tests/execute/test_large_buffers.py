"""Buffers beyond 2 GiB: no count or offset overflows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fakes.loopback import World

GIB = 1 << 30
N = (1 << 29) + 4097


def available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.slow
@pytest.mark.big
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("codec", "bound"), [("zfp", 1.5), ("minmax", 0.05)])
def test_more_than_two_gib(codec: str, bound: float) -> None:
    if available_nbytes() < 10 * GIB:
        pytest.skip(f"10 GiB of memory are needed, {available_nbytes() / GIB:.1f} are available")
    pattern = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    inputs = [np.resize(pattern, N), np.resize(pattern[::-1], N)]
    expected = pattern.astype(np.float64) + pattern[::-1]
    world = World(2, seed=None)
    world.loopback.run([c.iallreduce(x, codec=codec, algorithm="direct", out=x) for c, x in zip(world.comms, inputs)])
    for begin in range(0, N, 1 << 20):
        part = inputs[0][begin : begin + (1 << 20)]
        assert np.abs(part - expected[: part.size]).max() < bound, begin
        assert part.tobytes() == inputs[1][begin : begin + (1 << 20)].tobytes(), begin
