"""Slots: memory for wires, and message tags. Collectives in one slot run one after the other.

Collectives in different slots may run at the same time. Slot 0 is for a blocking collective while no rank has another
one under way. The other slots are used in rotation, so that all ranks put the same collective into the same slot.
"""

from __future__ import annotations

from collections.abc import Callable

from ..codecs.base import Array
from ..host.arena import Arena
from ..transports.base import Group, Transport
from .compiled_plan import Run

AT_ONCE = 4
"""Number of nonblocking collectives that run at the same time; later ones wait for a slot."""

_TAGS_EACH = 4  # one for each phase of a collective, since phases may overlap


class Slot:
    """Memory and tags of one slot.

    Parameters
    ----------
    number : int
        Index of the slot.
    transport : Transport
        Transport between all ranks.
    allocate : callable
        Returns memory of a given number of bytes.

    Attributes
    ----------
    group : Group
        All ranks, under the slot's tags.
    arena : Arena
        Memory for wires.
    allocate : callable
        Returns memory for a wire of a given number of bytes.
    last : Run or None
        The last run in the slot. (Not its request, since a persistent request may run again in another slot.)
    """

    def __init__(self, number: int, transport: Transport, allocate: Callable[[int], Array]) -> None:
        self.number = number
        self.group = Group(transport, (number + 1) * _TAGS_EACH)
        self.arena = Arena(allocate)
        self.allocate = self.arena.allocate
        self.last: Run | None = None

    @property
    def free(self) -> bool:
        """Whether no collective is under way in this slot."""
        return self.last is None or self.last.ended


class Slots:
    """All slots of a communicator; parameters are those of `Slot`.

    Attributes
    ----------
    alone : Slot
        For a blocking collective while no rank has another one under way.
    rotating : tuple of Slot
        `AT_ONCE` slots for all other collectives, chosen by the sequence number of the call.
    """

    def __init__(self, transport: Transport, allocate: Callable[[int], Array]) -> None:
        self.alone, *others = (Slot(number, transport, allocate) for number in range(1 + AT_ONCE))
        self.rotating = tuple(others)
