"""Allreduces of small arrays, which the messages of the call's handshake carry (`compcoll.execute.handshake`)."""

from __future__ import annotations

from ..layout import SIGNATURE_NBYTES, longest_message, shares
from .costs import Costs
from .job import Job
from .record import Algorithm

_REDUCTION = 0.5e-6  # host seconds for adding one small array to another


def largest(ranks: int) -> int:
    """Return the bytes of the largest array that the handshake's messages can carry for each rank; 0 if none."""
    return (longest_message(ranks) - SIGNATURE_NBYTES) // max(shares(ranks), default=1)


def surely_small(ranks: int) -> int:
    """Return the bytes up to which this was never slower in measurements than MPI's own collective after a handshake.

    For larger arrays it depends.
    """
    return min(largest(ranks), 16384 // max(len(shares(ranks)), 1))


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds that the arrays add to the handshake: their transfer and their sum."""
    arrays, link = sum(shares(c.world.size)), c.inside if c.world.nodes == 1 else c.between
    return arrays * (_REDUCTION + c.n * link + c.n * c.add)


DISSEMINATION: Algorithm[Job] = Algorithm(
    "dissemination",
    {"allreduce": None},
    _cost,
    always_faster=lambda nbytes, ranks: nbytes <= surely_small(ranks),
    cost_proxy="native",
)
