"""One message stream between the root and each other rank: what the root does, and one segment at the other end."""

from __future__ import annotations

from math import ceil

from compcoll.algorithms.costs import Costs

from . import Reference, both


def at_root(c: Costs, p: int, k: int, block: float, coding: float, other: float = 0.0) -> float:
    """Return the root's seconds for a block of so many bytes to or from each other rank, beside other work of its."""
    messages = (p - 1) * ceil(block / c.segment)
    copy, wire = c.inside * (k - 1) * block * c.shrink, c.between * (p - k) * block * c.shrink
    return c.latency + both(other + coding * (p - 1) * block + messages * c.message / 2 + copy, wire, messages)


def seconds(c: Costs, p: int, k: int, block: float, here: float, there: float) -> float:
    return there * block / ceil(block / c.segment) + at_root(c, p, k, block, here, (c.encode + c.decode) * block)


REFERENCE = Reference(
    seconds={
        "gather": lambda c, p, k, n: seconds(c, p, k, n, c.decode, c.encode),
        "scatter": lambda c, p, k, n: seconds(c, p, k, n / p, c.encode, c.decode),
    }
)
