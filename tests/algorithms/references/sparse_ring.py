"""Tsuzuku et al., "Variance-based Gradient Compression for Efficient Distributed Deep Learning", ICLR 2018 workshop."""

from __future__ import annotations

from math import ceil, log2

from compcoll.algorithms.costs import Costs

from . import Reference


def lengths(c: Costs, p: int) -> float:
    """Return the seconds in which ranks learn the lengths of all wires."""
    return ceil(log2(p)) * (c.latency + c.message)


def ends(c: Costs, p: int, n: float, wires: int) -> float:
    """Return the seconds of selection, lengths, zeros, and so many wires added to them."""
    return (c.encode + c.decode) * n + lengths(c, p) + 4 * wires * n * c.shrink * c.add


def hop(c: Costs, p: int, k: int, nbytes: float) -> tuple[float, float]:
    """Return what host and network take to send the wire of so many bytes to the next rank."""
    copy = c.inside * nbytes * c.shrink if k > 1 or p == k else 0.0
    return copy, c.between * nbytes * c.shrink * c.world.crossing


def seconds(c: Costs, p: int, k: int, n: float) -> float:
    copy, wire = hop(c, p, k, n)
    return ends(c, p, n, p) + (p - 1) * c.latency + max((p - 1) * c.message + p * copy, p * wire)


REFERENCE = Reference(seconds={"allreduce": seconds}, encodings={"allreduce": lambda p, nodes: (1, p)})
