"""A binomial tree: the root sends to log2 p others, and a segment passes as many hops."""

from __future__ import annotations

from math import ceil, log2

from compcoll.algorithms.costs import Costs

from . import Reference, both


def seconds(c: Costs, p: int, k: int, n: float) -> float:
    m, hops = ceil(n / c.segment), ceil(log2(p))
    copy = c.inside * n * c.shrink if k > 1 else 0.0
    wire = c.between * n * c.shrink * c.world.crossing
    root = both(c.encode * n + hops * copy + hops * m * c.message, hops * wire, m)
    return root + hops * c.latency + hops * copy / m + hops * wire / m + hops * c.decode * n / m


REFERENCE = Reference(seconds={"bcast": seconds})
