"""The opening of every collective: do all ranks make the same call?

Dissemination: in round i a rank sends the smallest and largest fingerprint that it knows of to the rank 2^i above and
learns those of the rank 2^i below; after ceil(log2 p) rounds of 16 bytes every rank knows the extremes of all. When
they differ, the ranks send each other one line on their calls, so that everybody can tell who asked for what.

D. Hensgen, R. Finkel, U. Manber, "Two Algorithms for Barrier Synchronization", Int. J. Parallel Programming 17, 1988.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

from ..errors import CollectiveMismatch
from ..request import Steps
from ..transports.base import Persistent, Transport, Wire

_EXTREMES = struct.Struct("<QQ")
_TEXT_NBYTES = 512


def fingerprint(call: str) -> int:
    """64 bits that differ for calls that do not belong together. The lowest is left for `agree`."""
    return int.from_bytes(blake2b(call.encode(), digest_size=8).digest(), "little") & ~1


class Round(NamedTuple):
    """One exchange of the opening, and the memory of its messages."""

    sending: Persistent
    outgoing: memoryview
    arriving: Persistent
    incoming: memoryview


class Opening:
    """A rank's exchanges with the others: for one collective after the other, in the same order on all ranks.

    Parameters
    ----------
    transport : Transport
        Between all ranks of the communicator.
    tag : int
        Of its messages, and of no others.

    Attributes
    ----------
    anybody_busy : bool
        Whether some rank is busy, after `agree`.
    """

    __slots__ = ("anybody_busy", "rounds", "transport")

    def __init__(self, transport: Transport, tag: int) -> None:
        self.transport = transport
        self.anybody_busy = False
        self.rounds = [self._round(1 << exponent, tag) for exponent in range((transport.size - 1).bit_length())]

    def _round(self, distance: int, tag: int) -> Round:
        transport, size = self.transport, self.transport.size
        outgoing, incoming = _small_wire(_EXTREMES.size), _small_wire(_EXTREMES.size)
        return Round(
            transport.send_init(outgoing, (transport.rank + distance) % size, tag),
            outgoing.buffer,
            transport.recv_init(incoming, (transport.rank - distance) % size, tag),
            incoming.buffer,
        )


def _small_wire(nbytes: int) -> Wire:
    return Wire(memoryview(bytearray(nbytes)))


def agree(opening: Opening, call: str, own: int, busy: bool, tag: int) -> Steps:
    """Find out whether all ranks make the same call.

    Parameters
    ----------
    opening : Opening
        Not in use by another collective.
    call : str
        One line on this rank's call, for the error.
    own : int
        Its `fingerprint`.
    busy : bool
        Whether this rank must not block in MPI, since it has other collectives to advance.
    tag : int
        Of the collective, for the lines on the calls.

    Raises
    ------
    CollectiveMismatch
        On every rank, if they do not.
    """
    low = high = own | busy
    for sending, outgoing, arriving, incoming in opening.rounds:
        arriving.Start()
        _EXTREMES.pack_into(outgoing, 0, low, high)
        sending.Start()
        yield arriving
        other_low, other_high = _EXTREMES.unpack_from(incoming)
        if other_low != low or other_high != high:
            low, high = min(low, other_low), max(high, other_high)
        if not sending.Test():
            yield sending
    if low ^ high > 1:
        calls = yield from _exchange(opening.transport, tag, call)
        raise CollectiveMismatch(table(calls, opening.transport.rank))
    opening.anybody_busy = bool(high & 1)


def _exchange(transport: Transport, tag: int, text: str) -> Steps:
    """Every rank's line."""
    own = _small_wire(_TEXT_NBYTES)
    own.buffer[:] = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES)
    text = _text_of(own)
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    lines = {rank: _small_wire(_TEXT_NBYTES) for rank in others}
    arriving = [transport.irecv(lines[rank], rank, tag) for rank in others]
    sending = [transport.isend(own, rank, tag) for rank in others]
    for pending in arriving + sending:
        yield pending
    texts = {rank: _text_of(wire) for rank, wire in lines.items()}
    return [texts.get(rank, text) for rank in range(transport.size)]


def _text_of(wire: Wire) -> str:
    return bytes(wire.buffer).decode(errors="ignore").rstrip()


def table(calls: list[str], own: int) -> str:
    """The error's text: equal calls on one line, this rank's marked."""
    callers: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        callers.setdefault(call, []).append(rank)
    lines = [
        f"  rank {', '.join(map(str, ranks))}{' (this one)' if own in ranks else ''}: {call}"
        for call, ranks in callers.items()
    ]
    return "the ranks' calls do not belong together:\n" + "\n".join(lines)
