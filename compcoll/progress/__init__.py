"""Collectives under way, and what makes them advance."""

from .engine import Engine, end_all, give_way, under_way
from .request import Ended, Request
from .steps import THREADS, NeedsLooks, Patience, Peers, Pending, Steps, Turn, keep_forever, wait_for
from .stream_watch import Watch

__all__ = [
    "THREADS",
    "Ended",
    "Engine",
    "NeedsLooks",
    "Patience",
    "Peers",
    "Pending",
    "Request",
    "Steps",
    "Turn",
    "Watch",
    "end_all",
    "give_way",
    "keep_forever",
    "under_way",
    "wait_for",
]
