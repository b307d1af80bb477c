"""Thakur et al. 2005 on powers of two; else Bruck et al. 1997. The handshake's own messages do not count."""

from __future__ import annotations

from compcoll.algorithms.costs import Costs

from . import Reference


def seconds(c: Costs, p: int, k: int, n: float) -> float:
    """Sums travel on each of log2 p levels, or all other ranks' arrays; each takes the host half a microsecond."""
    arrays = p.bit_length() - 1 if p & p - 1 == 0 else p - 1
    return arrays * (0.5e-6 + n * (c.inside if p == k else c.between) + n * c.add)


REFERENCE = Reference(seconds={"allreduce": seconds}, encodings={"allreduce": lambda p, nodes: (0, 0)})
