"""Lanes: memory for wires, and tags, of collectives that run one after the other.

Collectives in different lanes may be under way at once. Lane 0 is for a blocking one while no rank has another; the
others are taken in turn, so that all ranks put the same collective into the same lane.
"""

from __future__ import annotations

from collections.abc import Callable

from ..codecs.base import Array
from ..host.arena import Arena
from ..transports.base import Group, Transport
from .engine import Request

AT_ONCE = 4
"""Lanes for collectives that are under way at once; more wait for these."""

_TAGS_EACH = 4  # a collective's phases may overlap


class Slot:
    """One lane.

    Parameters
    ----------
    number : int
        Its place among them.
    transport : Transport
        Between all ranks.
    allocate : callable
        Gives memory of so many bytes.

    Attributes
    ----------
    group : Group
        All ranks, under the lane's tags.
    arena : Arena
        Memory for wires.
    allocate : callable
        Gives it, in bytes.
    last : Request or None
        The collective that entered it last.
    """

    def __init__(self, number: int, transport: Transport, allocate: Callable[[int], Array]) -> None:
        self.number = number
        self.group = Group(transport, (number + 1) * _TAGS_EACH)
        self.arena = Arena(allocate)
        self.allocate = self.arena.allocate
        self.last: Request | None = None


class Slots:
    """All lanes of a communicator; parameters are those of `Slot`.

    Attributes
    ----------
    alone : Slot
        For a blocking collective while no rank has another.
    in_turn : tuple of Slot
        Those of all others, `AT_ONCE` of them, by the number of collectives that the communicator began before.
    """

    def __init__(self, transport: Transport, allocate: Callable[[int], Array]) -> None:
        self.alone, *others = (Slot(number, transport, allocate) for number in range(1 + AT_ONCE))
        self.in_turn = tuple(others)
