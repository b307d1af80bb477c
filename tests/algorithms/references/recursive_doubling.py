"""Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19, 2005."""

from __future__ import annotations

from math import ceil, log2, sqrt

from compcoll.algorithms.costs import Costs

from . import Reference, RoundTrip, Values, both


def replay(xs: list[Values], code: RoundTrip) -> Values:
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


def seconds(c: Costs, p: int, k: int, n: float) -> float:
    m, total, work, distance = ceil(n / c.segment), c.accumulate * n, c.encode, 1
    while 2 * distance <= p:
        if p > k and distance >= k:
            total += c.latency + both(work * n + m * c.message, c.between * n * c.shrink * k, m)
        else:
            total += c.inside_latency + work * n + c.inside * n * c.shrink + m * c.message
        work, distance = c.recode, 2 * distance
    if distance == p:
        return total
    # The ranks beyond hand in their buffers, and get the two wires of the last exchange.
    copy, wire = c.inside * n * c.shrink if k > 1 else 0.0, c.between * n * c.shrink * c.world.crossing
    total += c.latency + both(c.encode * n + copy + m * c.message, wire, m)
    return total + c.latency + both(2 * copy + 2 * m * c.message, 2 * wire, m)


def encodings(p: int, nodes: int) -> tuple[int, int]:
    """Count those of teams that halve in number from level to level, and of the ranks beyond a power of two."""
    teams = 1 << (p.bit_length() - 1)
    total = p - teams
    while teams > 1:
        total, teams = total + teams, teams // 2
    return ceil(log2(p)), total


def variance(p: int, again: float) -> float:
    """Both halves of what a level adds are encoded."""
    if p == 1:
        return 0.0
    half = variance(p // 2, again)
    return 2 * (half + p / 2 + again * half)


REFERENCE = Reference(
    seconds={"allreduce": seconds},
    encodings={"allreduce": encodings},
    variance={"allreduce": variance},
    alike={"allreduce": lambda p: sum(p / 2**j * sqrt(2**j) for j in range(int(log2(p)))) / sqrt(p)},
    replay=replay,
)
