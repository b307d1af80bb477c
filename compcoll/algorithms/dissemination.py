"""Allreduces of small arrays, which travel with the handshake of the call (`compcoll.execute.handshake`)."""

from __future__ import annotations

from ..layout import SIGNATURE_NBYTES, longest_message, shares
from .costs import Costs
from .job import Job
from .record import Algorithm

_REDUCTION = 0.5e-6  # host seconds for adding one small array to another


def largest(ranks: int) -> int:
    """Bytes of the largest array of each rank that can travel along; 0 if none can."""
    return (longest_message(ranks) - SIGNATURE_NBYTES) // max(shares(ranks), default=1)


def surely_small(ranks: int) -> int:
    """Bytes of an array that travels along faster than MPI's own collective reduces it after the handshake, as far as
    seen: of longer ones that depends.
    """
    return min(largest(ranks), 16384 // max(len(shares(ranks)), 1))


def _cost(c: Costs, collective: str) -> float:
    """Estimate what the arrays add to the handshake: their bytes and their sum."""
    arrays, link = sum(shares(c.world.size)), c.inside if c.world.nodes == 1 else c.between
    return arrays * (_REDUCTION + c.n * link + c.n * c.add)


def _always_faster(nbytes: float, ranks: int) -> bool:
    return nbytes <= surely_small(ranks)


DISSEMINATION: Algorithm[Job] = Algorithm(
    "dissemination",
    ("allreduce",),
    _cost,
    restricted=True,
    always_faster=_always_faster,
    cost_proxy="native",
)
