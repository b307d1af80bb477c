"""Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009."""

from __future__ import annotations

from math import ceil

import numpy as np

from compcoll.algorithms.costs import Costs

from . import Reference, RoundTrip, Values
from .linear import at_root


def replay(xs: list[Values], code: RoundTrip) -> Values:
    p, m = len(xs), xs[0].size // len(xs)
    out = np.empty_like(xs[0])
    for chunk in range(p):
        here = np.s_[chunk * m : (chunk + 1) * m]
        partial = xs[(chunk + 1) % p][here]
        for step in range(2, p + 1):
            partial = xs[(chunk + step) % p][here] + code(partial)
        out[here] = code(partial)
    return out


def seconds(c: Costs, p: int, k: int, chunk: float, phases: str) -> float:
    """Return the seconds for chunks of so many bytes. Phases: ``s``, reduce-scatter, and ``g``, allgather."""
    m = ceil(chunk / c.segment)
    nbytes = chunk / m * c.shrink
    copy = c.inside * nbytes if k > 1 or k == p else 0.0
    wire, total = c.between * nbytes * c.world.crossing, 0.0
    for phase in phases:
        work, passing = (c.recode, c.recode) if phase == "s" else (c.decode, 0.0)
        host = work * chunk / m + c.message + copy
        hop = passing * chunk / m + c.message + copy + wire + c.latency
        total += (p - 1) * max(m * host, m * wire, hop)
        total += c.encode * chunk / m if phase == "s" or phases == "g" else 0.0
        total += c.decode * chunk / m if phase == "g" else 0.0
    return total


def along(terms: range, again: float) -> float:
    """Return the variance, in units of ε², of partial sums of so many terms that are encoded one after the other."""
    variance = 0.0
    for j in terms:
        variance += j + again * variance
    return variance


REFERENCE = Reference(
    seconds={
        "allreduce": lambda c, p, k, n: seconds(c, p, k, n / p, "sg"),
        "reduce_scatter": lambda c, p, k, n: seconds(c, p, k, n / p, "s"),
        "reduce": lambda c, p, k, n: seconds(c, p, k, n / p, "s") + at_root(c, p, k, n / p, c.decode),
        "allgather": lambda c, p, k, n: seconds(c, p, k, n, "g"),
        "allgatherv": lambda c, p, k, n: seconds(c, p, k, n, "g"),
    },
    encodings={
        "allreduce": lambda p, nodes: (p, p),
        "reduce_scatter": lambda p, nodes: (p - 1, p - 1),
        "reduce": lambda p, nodes: (p, p),
    },
    variance={
        "allreduce": lambda p, again: along(range(1, p + 1), again),
        "reduce_scatter": lambda p, again: along(range(1, p), again),
        # Of p chunks one stays on the root without a last encoding.
        "reduce": lambda p, again: ((p - 1) * along(range(1, p + 1), again) + along(range(1, p), again)) / p,
    },
    # An integral in place of the sum, of which it is within 25 %: `test_error_growth.py`.
    alike=dict.fromkeys(("allreduce", "reduce_scatter", "reduce"), lambda p: 2 / 3 * p),
    replay=replay,
    sent=lambda p: 2 * (p - 1) / p,
)
