"""ByteGrad in Gan et al., "BAGUA", VLDB 2021."""

from __future__ import annotations

from math import ceil

from compcoll.algorithms.costs import Costs
from compcoll.layout import World

from . import Reference, RoundTrip, Values, direct


def replay(xs: list[Values], code: RoundTrip) -> Values:
    sums = []
    for first in range(0, len(xs), 2):
        total = xs[first]
        for x in xs[first + 1 : first + 2]:
            total = total + x
        sums.append(total)
    return direct.replay(sums, code) if len(sums) > 1 else sums[0]


def seconds(c: Costs, p: int, k: int, n: float) -> float:
    total = 0.0
    if k > 1:
        plain, m = c.among(c.world, False), ceil(n / c.segment)
        total += 2 * c.inside_latency + (k - 1) * n * (c.inside + plain.accumulate) + 2 * (k - 1) * m * c.message
        total += plain.encode * n / m + n * (plain.encode + c.inside + plain.decode)
    if (nodes := p // k) > 1:
        leaders = c.among(World(nodes), True)
        total += direct.seconds(leaders, nodes, 1, n / nodes, "allreduce")
    return total


REFERENCE = Reference(
    seconds={"allreduce": seconds},
    encodings={"allreduce": lambda p, nodes: (0, 0) if nodes == 1 else (2, nodes)},
    # On nodes of single ranks.
    variance=direct.REFERENCE.variance,
    alike=direct.REFERENCE.alike,
    replay=replay,
    sent=direct.REFERENCE.sent,
)
