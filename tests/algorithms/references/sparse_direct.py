"""Li & Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP 2022."""

from __future__ import annotations

from compcoll.algorithms.costs import Costs

from . import Reference, both
from .sparse_ring import ends, hop, lengths


def seconds(c: Costs, p: int, k: int, n: float) -> float:
    """Lengths twice: of the parts that go to their owners, and of the merged ones that go around a ring."""
    part = n / p
    near, far = c.inside * (k - 1) * part * c.shrink, c.between * (p - k) * k * part * c.shrink
    total = ends(c, p, n, 2) + lengths(c, p) + c.latency + both(2 * (p - 1) * c.message + near, far, p - 1)
    total += 20 * n * c.shrink * c.add + c.encode * part
    copy, wire = hop(c, p, k, part)
    return total + (p - 1) * (c.latency + max(copy + c.message, wire))


REFERENCE = Reference(seconds={"allreduce": seconds}, encodings={"allreduce": lambda p, nodes: (2, p + 1)})
