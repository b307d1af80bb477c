"""Gan et al., "BAGUA", VLDB 2021: all chunks to their owners at once, then all sums to everybody at once."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np

from compcoll.algorithms.costs import Costs

from . import Reference, RoundTrip, Values, both
from .linear import at_root


def replay(xs: list[Values], code: RoundTrip) -> Values:
    p, m = len(xs), xs[0].size // len(xs)
    out = np.empty_like(xs[0])
    for owner in range(p):
        here = np.s_[owner * m : (owner + 1) * m]
        total = xs[owner][here]
        for rank in range(p):
            if rank != owner:
                total = total + code(xs[rank][here])
        out[here] = code(total)
    return out


def seconds(c: Costs, p: int, k: int, chunk: float, collective: str) -> float:
    """Return the seconds for chunks of so many bytes."""
    m, others = ceil(chunk / c.segment), p - 1
    copy, wire = c.inside * (k - 1) * chunk * c.shrink, c.between * (p - k) * k * chunk * c.shrink
    sent = others * m
    taken = c.decode * others * chunk + sent * c.message / 2 + copy
    if collective == "allgather":
        return c.latency + c.encode * chunk / m + both(taken + sent * c.message / 2, wire, sent)
    scatter = c.latency + both(c.encode * others * chunk + sent * c.message + copy, wire, sent)
    added = c.accumulate * (p - 2) * chunk
    if collective == "reduce_scatter":
        return scatter + added + c.accumulate * chunk
    added += c.recode * chunk
    if collective == "reduce":
        return scatter + added / m + at_root(c, p, k, chunk, c.decode, added - added / m)
    return scatter + added / m + c.latency + both(added - added / m + taken + sent * c.message / 2, wire, sent)


REFERENCE = Reference(
    seconds={
        "allreduce": lambda c, p, k, n: seconds(c, p, k, n / p, "allreduce"),
        "reduce_scatter": lambda c, p, k, n: seconds(c, p, k, n / p, "reduce_scatter"),
        "reduce": lambda c, p, k, n: seconds(c, p, k, n / p, "reduce"),
        "allgather": lambda c, p, k, n: seconds(c, p, k, n, "allgather"),
        "allgatherv": lambda c, p, k, n: seconds(c, p, k, n, "allgather"),
    },
    # Each single term but the owner's, and then their sum. The errors of a reduce_scatter are upper bounds: of its p
    # terms one is not encoded.
    encodings={
        "allreduce": lambda p, nodes: (2, p),
        "reduce_scatter": lambda p, nodes: (1, p - 1),
        "reduce": lambda p, nodes: (2, p),
    },
    variance={
        "allreduce": lambda p, again: (p - 1) + (p + again * (p - 1)),
        "reduce_scatter": lambda p, again: p,
        # Of p chunks one stays on the root, as in a reduce_scatter.
        "reduce": lambda p, again: ((p - 1) * ((p - 1) + (p + again * (p - 1))) + p) / p,
    },
    alike={
        "allreduce": lambda p: (p - 1) / sqrt(p) + 1,
        "reduce_scatter": lambda p: p / sqrt(p),
        "reduce": lambda p: sqrt(((p - 1) * ((p - 1) / sqrt(p) + 1) ** 2 + p) / p),
    },
    replay=replay,
    sent=lambda p: 2 * (p - 1) / p,
)
