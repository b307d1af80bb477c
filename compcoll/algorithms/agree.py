"""The opening of every collective: do all ranks make the same call?

Dissemination: in round i a rank sends the smallest and largest fingerprint that it knows of to the rank 2^i below and
learns those of the rank 2^i above; after ceil(log2 p) rounds every rank knows the extremes of all. When they differ,
the ranks send each other one line on their calls, so that everybody can tell who asked for what.

Small arrays travel along: in round i a rank sends those of the 2^i ranks from itself upwards (fewer in the last round),
and has all of them in the end. A small allreduce then needs no further messages.

D. Hensgen, R. Finkel, U. Manber, "Two Algorithms for Barrier Synchronization", Int. J. Parallel Programming 17, 1988;
J. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS
8(11), 1997, for the arrays.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from hashlib import blake2b
from typing import NamedTuple

from ..errors import CollectiveMismatch
from ..request import Steps
from ..transports.base import Persistent, Transport, Wire

_NBYTES = 8  # of a fingerprint, the most significant byte first
_TWICE = 1 << 8 * _NBYTES | 1
_BEGIN = 2 * _NBYTES  # of what travels along
# Of messages with arrays: what they carry is at least two thirds of it, for slow links.
_LENGTHS = (_BEGIN, 64, *(length for power in range(6, 14) for length in (3 << power - 1, 2 << power)))
_MOST_RANKS = 16
_MOST_KEPT = 256
_TEXT_NBYTES = 512
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def fingerprint(call: str) -> int:
    """64 bits that differ for calls that do not belong together. The lowest tells who is busy."""
    return int.from_bytes(blake2b(call.encode(), digest_size=_NBYTES).digest(), "little") & ~1


def _distances(ranks: int) -> list[int]:
    return [1 << exponent for exponent in range((ranks - 1).bit_length())]


def largest(ranks: int) -> int:
    """Bytes of the largest array of each rank that can travel along; 0 if none can."""
    if not 1 < ranks <= _MOST_RANKS:
        return 0
    return (_LENGTHS[-1] - _BEGIN) // max(min(distance, ranks - distance) for distance in _distances(ranks))


class Signature:
    """What a rank tells the others of its call.

    Parameters
    ----------
    call : str
        One line on it: equal on all ranks when the calls belong together.
    salt : str
        Not told, but makes the fingerprint another.

    Attributes
    ----------
    extremes : tuple of bytes
        Smallest and largest fingerprint that a rank knows of at first: one that may block in MPI, and one that must
        not, since it has other collectives to advance.
    """

    __slots__ = ("call", "extremes")

    def __init__(self, call: str, salt: str = "") -> None:
        self.call = call
        own = fingerprint(call + salt)
        self.extremes = tuple((bits * _TWICE).to_bytes(2 * _NBYTES, "big") for bits in (own, own | 1))

    def here(self) -> Signature:
        """The same call, with the line of the program that makes it."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        located = object.__new__(Signature)
        located.call = f"{self.call[: _TEXT_NBYTES // 2]} at {frame.f_code.co_filename}:{frame.f_lineno}"
        located.extremes = self.extremes
        return located


class Round(NamedTuple):
    """One exchange of the opening, with arrays of some length travelling along.

    Attributes
    ----------
    arriving, sending : Persistent
        The other's message, and this rank's.
    incoming, outgoing : bytearray
        Their memory.
    known, sent : memoryview
        The arrays that this rank has before and sends, and their place in the message.
    come, new : memoryview
        Those that the other sends, in its message, and their place after the known ones.
    """

    arriving: Persistent
    sending: Persistent
    incoming: bytearray
    outgoing: bytearray
    known: memoryview
    sent: memoryview
    come: memoryview
    new: memoryview


class _Messages(NamedTuple):
    """Of one round: the other's, of any length, and this rank's in each of the lengths that it may have."""

    distance: int
    arriving: Persistent
    incoming: bytearray
    sending: tuple[Persistent, ...]
    outgoing: bytearray


class _Rounds(dict[int, tuple[Round, ...]]):
    """The exchanges of an opening by the length of the arrays, in bytes; made when they are needed first.

    Parameters
    ----------
    transport : Transport
        Between all ranks.
    tag : int
        Of the messages.
    arrays : bytearray
        Memory of all ranks' small arrays.
    """

    def __init__(self, transport: Transport, tag: int, arrays: bytearray) -> None:
        self._size = transport.size
        self._arrays = memoryview(arrays)
        self._messages = [self._of_round(transport, distance, tag) for distance in _distances(transport.size)]

    @staticmethod
    def _of_round(transport: Transport, distance: int, tag: int) -> _Messages:
        outgoing, incoming = bytearray(_LENGTHS[-1]), bytearray(_LENGTHS[-1])
        dest, source = (transport.rank - distance) % transport.size, (transport.rank + distance) % transport.size
        return _Messages(
            distance,
            transport.recv_init(Wire(memoryview(incoming), exact=False), source, tag),
            incoming,
            tuple(transport.send_init(_wire(outgoing, length), dest, tag) for length in _LENGTHS),
            outgoing,
        )

    def __missing__(self, nbytes: int) -> tuple[Round, ...]:
        if len(self) >= _MOST_KEPT:
            self.clear()
        rounds = self[nbytes] = tuple(self._round(messages, nbytes) for messages in self._messages)
        return rounds

    def _round(self, messages: _Messages, nbytes: int) -> Round:
        known, arriving, incoming, sending, outgoing = messages
        length = min(known, self._size - known) * nbytes
        end, begin = _BEGIN + length, known * nbytes
        return Round(
            arriving,
            sending[bisect_left(_LENGTHS, end)],
            incoming,
            outgoing,
            self._arrays[:length],
            memoryview(outgoing)[_BEGIN:end],
            memoryview(incoming)[_BEGIN:end],
            self._arrays[begin : begin + length],
        )


class Opening:
    """A rank's exchanges with the others: for one collective after the other, in the same order on all ranks.

    Parameters
    ----------
    transport : Transport
        Between all ranks of the communicator.
    tag : int
        Of its messages, and of no others; the next is that of the lines on the calls.

    Attributes
    ----------
    anybody_busy : bool
        Whether some rank is busy, after `agree`.
    arrays : bytearray
        Memory of all ranks' small arrays.
    """

    __slots__ = ("anybody_busy", "arrays", "rounds", "tag", "transport")

    def __init__(self, transport: Transport, tag: int) -> None:
        self.transport = transport
        self.tag = tag
        self.anybody_busy = False
        self.arrays = bytearray(transport.size * largest(transport.size))
        self.rounds = _Rounds(transport, tag, self.arrays)


def _wire(memory: bytearray, length: int | None = None) -> Wire:
    """The beginning of some memory, or all of it."""
    return Wire(memoryview(memory)[:length])


def agree(opening: Opening, own: Signature, busy: bool, nbytes: int = 0) -> Steps:
    """Find out whether all ranks make the same call.

    Parameters
    ----------
    opening : Opening
        Not in use by another collective.
    own : Signature
        This rank's call.
    busy : bool
        Whether this rank must not block in MPI, since it has other collectives to advance.
    nbytes : int
        Of each rank's array that travels along. This rank's stands at the beginning of the opening's ``arrays``; those
        of the ranks above it, and then of those below it, will come after it.

    Raises
    ------
    CollectiveMismatch
        On every rank, if they do not.
    """
    first = extremes = own.extremes[busy]
    for arriving, sending, incoming, outgoing, known, sent, come, new in opening.rounds[nbytes]:
        arriving.Start()
        outgoing[:_BEGIN] = extremes
        if nbytes:
            sent[:] = known
        sending.Start()
        yield arriving
        if not incoming.startswith(extremes):
            extremes = _wider(extremes, bytes(incoming[:_BEGIN]))
        if nbytes:
            new[:] = come
        if not sending.Test():
            yield sending
    opening.anybody_busy = busy
    if extremes is not first:
        low, high = int.from_bytes(extremes[:_NBYTES], "big"), int.from_bytes(extremes[_NBYTES:], "big")
        if low ^ high > 1:
            calls = yield from _exchange(opening.transport, opening.tag + 1, own.call)
            raise CollectiveMismatch(table(calls, opening.transport.rank))
        opening.anybody_busy = bool(high & 1)


def _wider(extremes: bytes, others: bytes) -> bytes:
    """The extremes of both, which bytes order as the numbers do."""
    return min(extremes[:_NBYTES], others[:_NBYTES]) + max(extremes[_NBYTES:], others[_NBYTES:])


def _exchange(transport: Transport, tag: int, text: str) -> Steps:
    """Every rank's line."""
    own = _wire(bytearray(text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES)))
    text = _text_of(own)
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    lines = {rank: _wire(bytearray(_TEXT_NBYTES)) for rank in others}
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
