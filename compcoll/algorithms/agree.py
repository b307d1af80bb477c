"""The opening of every collective: do all ranks make the same call?

Dissemination: in round i a rank sends the smallest and largest fingerprint that it knows of to the rank 2^i above and
learns those of the rank 2^i below; after ceil(log2 p) rounds of 16 bytes every rank knows the extremes of all. When
they differ, the ranks send each other one line on their calls, so that everybody can tell who asked for what.

D. Hensgen, R. Finkel, U. Manber, "Two Algorithms for Barrier Synchronization", Int. J. Parallel Programming 17, 1988.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from ..errors import CollectiveMismatch
from ..request import Steps
from ..transports.base import Group, Wire

_EXTREMES = struct.Struct("<QQ")
_TEXT_NBYTES = 512


def fingerprint(call: str) -> int:
    """64 bits that differ for calls that do not belong together."""
    return int.from_bytes(blake2b(call.encode(), digest_size=8).digest(), "little")


def opening_wires(size: int, allocate: Callable[[int], Any]) -> list[tuple[Wire, Wire]]:
    """An outgoing and an incoming wire for each round among ``size`` ranks."""
    nbytes = _EXTREMES.size
    return [(Wire(allocate(nbytes)), Wire(allocate(nbytes))) for _ in range((size - 1).bit_length())]


def agree(group: Group, call: str, own: int, wires: Sequence[tuple[Wire, Wire]], take: Callable[[int], Any]) -> Steps:
    """Find out whether all ranks make the same call.

    Parameters
    ----------
    group : Group
        All ranks of the communicator.
    call : str
        One line on this rank's call, for the error.
    own : int
        Its `fingerprint`.
    wires : sequence of pairs of Wire
        Those of `opening_wires`, not in use by another collective.
    take : callable
        Gives memory for the lines on the calls.

    Raises
    ------
    CollectiveMismatch
        On every rank, if they do not.
    """
    low = high = own
    rank, size = group.rank, group.size
    distance = 1
    for outgoing, incoming in wires:
        arriving = group.irecv(incoming, (rank - distance) % size)
        _EXTREMES.pack_into(outgoing.buffer, 0, low, high)
        sending = group.isend(outgoing, (rank + distance) % size)
        yield arriving
        other_low, other_high = _EXTREMES.unpack_from(incoming.buffer)
        if other_low != low or other_high != high:
            low, high = min(low, other_low), max(high, other_high)
        yield sending
        distance *= 2
    if low != high:
        calls = yield from _exchange(group, call, take)
        raise CollectiveMismatch(_table(calls, group.rank))


def _exchange(group: Group, text: str, take: Callable[[int], Any]) -> Steps:
    """Every rank's line."""
    own = Wire(take(_TEXT_NBYTES))
    encoded = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES)
    memoryview(own.buffer)[:] = encoded
    others = [rank for rank in range(group.size) if rank != group.rank]
    lines = {rank: Wire(take(_TEXT_NBYTES)) for rank in others}
    arriving = [group.irecv(lines[rank], rank) for rank in others]
    sending = [group.isend(own, rank) for rank in others]
    for pending in arriving + sending:
        yield pending
    texts = {rank: bytes(wire.buffer).decode(errors="replace").rstrip() for rank, wire in lines.items()}
    return [texts.get(rank, text) for rank in range(group.size)]


def _table(calls: list[str], own: int) -> str:
    """The error's text: equal calls on one line, this rank's marked."""
    callers: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        callers.setdefault(call, []).append(rank)
    lines = [
        f"  rank {', '.join(map(str, ranks))}{' (this one)' if own in ranks else ''}: {call}"
        for call, ranks in callers.items()
    ]
    return "the ranks' calls do not belong together:\n" + "\n".join(lines)
