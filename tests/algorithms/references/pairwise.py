"""A chunk to each other rank, all at once."""

from __future__ import annotations

from math import ceil

from compcoll.algorithms.costs import Costs

from . import Reference, both


def seconds(c: Costs, p: int, k: int, n: float) -> float:
    chunk = n / p
    messages = (p - 1) * ceil(chunk / c.segment)
    copy, wire = c.inside * (k - 1) * chunk * c.shrink, c.between * (p - k) * k * chunk * c.shrink
    return c.latency + both(n * c.encode + n * c.decode + 2 * copy + messages * c.message, wire, messages)


REFERENCE = Reference(seconds={"alltoall": seconds, "alltoallv": seconds})
