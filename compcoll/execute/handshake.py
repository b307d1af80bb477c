"""The handshake of every collective: do all ranks make the same call?

In round i a rank sends another the smallest and largest fingerprint that it knows of, and receives those of a third;
after ceil(log2 p) rounds every rank knows the extremes of all. When they differ, the ranks send each other one line on
their calls, so that every rank's error says which rank asked for what.

Where the number of ranks is a power of two, both others are the rank whose number differs in bit i (recursive doubling:
with one partner a round, answers take messages' acknowledgements along); else it sends to the rank 2^i below and
receives from the one 2^i above (dissemination).

Small arrays travel with the messages, so that a small allreduce needs no others: in pairs their sum so far; by
dissemination those that the rank has, 2^i of them (fewer in the last round), and all are summed in the end.

D. Hensgen, R. Finkel, U. Manber, "Two Algorithms for Barrier Synchronization", Int. J. Parallel Programming 17, 1988;
J. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS
8(11), 1997, for the arrays.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ..algorithms.dissemination import largest
from ..errors import CompcollError, WireCorrupted
from ..kernels._host import Collective, Exchange, PiggybackReduction, SharedMessage
from ..layout import SIGNATURE_NBYTES, in_pairs, longest_message, shares
from ..pending import Pending, Steps
from ..plan.signature import TEXT_NBYTES, Signature, told_apart
from ..transports.base import Persistent, Transport, Wire
from ..transports.shared import Mail

_BEGIN = SIGNATURE_NBYTES  # of what travels along
_MOST_KEPT = 256


class Places(NamedTuple):
    """The places of small arrays in a handshake's memory.

    Attributes
    ----------
    rows : int
        How many arrays it has room for: one, to which what comes is added; or all ranks', from this one's on, in their
        order, around its end.
    first : int
        The row of rank 0.
    """

    rows: int
    first: int


def places(rank: int, ranks: int) -> Places:
    """The places of small arrays on a rank."""
    return Places(1, 0) if in_pairs(ranks) else Places(ranks, -rank % ranks)


class _Round(NamedTuple):
    """One round's messages: the other's, of any length, and this rank's, one of each length that is needed.

    Attributes
    ----------
    incoming, outgoing : Wire, bytearray
        Their memory; empty if they have their own.
    share, new : int
        How many arrays are sent, from the first on, and where as many that come will stand.
    before : bool
        Whether those that come are of ranks before those that are sent.
    """

    arriving: Persistent | SharedMessage
    incoming: Wire
    sending: Callable[[int], Persistent | SharedMessage]
    outgoing: bytearray
    share: int
    new: int
    before: bool


class _Exchanges(dict[int, Exchange]):
    """The exchanges of a handshake by the length of the arrays, in bytes; made when they are needed first.

    Parameters
    ----------
    transport : Transport
        Between all ranks.
    tag : int
        Of the messages.
    mail : Mail or None
        Carries those inside a node.
    arrays : bytearray
        Memory of small arrays.
    """

    def __init__(self, transport: Transport, tag: int, mail: Mail | None, arrays: bytearray) -> None:
        self._arrays = arrays
        self._longest = longest_message(transport.size)
        self._rounds = [_round(transport, number, tag, mail) for number in range(len(shares(transport.size)))]

    def __missing__(self, nbytes: int) -> Exchange:
        if len(self) >= _MOST_KEPT:
            for old in [each for each in self if each]:  # the one without arrays is always needed
                del self[old]
        rounds = []
        for arriving, incoming, sending, outgoing, share, new, before in self._rounds:
            length = min(_padded(_BEGIN + share * nbytes), self._longest)
            messages = (arriving, sending(length), incoming, outgoing, length)
            rounds.append((*messages, share * nbytes, new * nbytes, before))
        exchange = self[nbytes] = Exchange(self._arrays, rounds)
        return exchange


def partners(rank: int, size: int, number: int) -> tuple[int, int]:
    """The ranks that a rank sends to and receives from in a round."""
    distance = 1 << number
    if in_pairs(size):
        return rank ^ distance, rank ^ distance
    return (rank - distance) % size, (rank + distance) % size


def _round(transport: Transport, number: int, tag: int, mail: Mail | None) -> _Round:
    rank, size = transport.rank, transport.size
    dest, source = partners(rank, size, number)
    arriving: Persistent | SharedMessage | None
    arriving = None if mail is None else mail.message(source, rank, number, sending=False)
    sent = None if mail is None else mail.message(rank, dest, number, sending=True)
    into, outgoing = (bytearray(0 if in_memory else longest_message(size)) for in_memory in (arriving, sent))
    incoming = Wire(memoryview(into), exact=False)
    if arriving is None:
        arriving = transport.recv_init(incoming, source, tag)
    return _Round(
        arriving,
        incoming,
        cache(lambda length: sent or transport.send_init(_wire(outgoing, length, exact=False), dest, tag)),
        outgoing,
        share=shares(size)[number],
        new=0 if in_pairs(size) else 1 << number,
        before=source < rank,
    )


def _padded(length: int) -> int:
    """A message's length, at most a sixteenth more: they are kept, and shall not be too many."""
    step = max(1 << length.bit_length() - 5, _BEGIN)
    return -(-length // step) * step


class Handshake:
    """A rank's handshakes with the others: for one collective after the other, in the same order on all ranks.

    Parameters
    ----------
    transport : Transport
        Between all ranks of the communicator.
    tag : int
        Of its messages, and of no others; the next is that of the lines on the calls.
    mail : Mail, optional
        Carries its messages inside a node.

    Attributes
    ----------
    arrays : bytearray
        Memory of small arrays.
    messages : list of Pending
        Those with lines on the calls that are under way.
    mismatch : CompcollError or None
        What was raised when ranks last did not make the same call: nothing is under way after it.
    """

    __slots__ = ("_exchanges", "arrays", "messages", "mismatch", "plain", "tag", "transport")

    def __init__(self, transport: Transport, tag: int, mail: Mail | None = None) -> None:
        self.transport = transport
        self.tag = tag
        self.arrays = bytearray(places(transport.rank, transport.size).rows * largest(transport.size))
        self._exchanges = _Exchanges(transport, tag, mail, self.arrays)
        self.plain = self._exchanges[0]
        self.messages: list[Pending] = []
        self.mismatch: CompcollError | None = None

    def exchange(self, piggyback: PiggybackReduction | None) -> Exchange:
        """The rounds of one handshake, with room for what travels with it."""
        return self.plain if piggyback is None else self._exchanges[piggyback.nbytes]

    def agree(self, own: Signature, level: int) -> Steps:
        """Find out whether all ranks make the same call, at which no operation follows.

        Parameters
        ----------
        own : Signature
            This rank's call.
        level : int
            This rank's.

        Raises
        ------
        CollectiveMismatch, CollectiveFailed
            On every rank, if they do not: the latter, if the system or memory failed some rank.
        """
        call = Collective(self.plain, own.extremes[level], level, None, None, None, None, None, 0, 1, 0)
        while not call.ended:
            yield call
        if call.level is None:
            yield from self.compare(own)

    def compare(self, own: Signature) -> Steps:
        """Exchange one line on the calls, which differ, and raise the error that shows them."""
        line = own.call.encode()[:TEXT_NBYTES].ljust(TEXT_NBYTES)
        sent = _wire(bytearray(line + _checksum(line)))
        others = [rank for rank in range(self.transport.size) if rank != self.transport.rank]
        received = {rank: _wire(bytearray(sent.nbytes)) for rank in others}
        self.messages = [self.transport.irecv(wire, rank, self.tag + 1) for rank, wire in received.items()]
        self.messages += [self.transport.isend(sent, rank, self.tag + 1) for rank in others]
        yield from self.messages
        self.messages = []
        received[self.transport.rank] = sent
        lines = [_read(received[rank], rank) for rank in range(self.transport.size)]
        self.mismatch = told_apart(lines, self.transport.rank)
        raise self.mismatch


def _wire(memory: bytearray, length: int | None = None, *, exact: bool = True) -> Wire:
    """The beginning of some memory, or all of it."""
    return Wire(memoryview(memory)[:length], exact=exact)


def _checksum(line: bytes) -> bytes:
    return zlib.crc32(line).to_bytes(4, "little")


def _read(wire: Wire, rank: int) -> str:
    """The line that a rank has sent."""
    line = bytes(wire.buffer)[:TEXT_NBYTES]
    if _checksum(line) != bytes(wire.buffer)[TEXT_NBYTES:]:
        raise WireCorrupted(f"the line of rank {rank} on its call has changed on its way: its checksum is wrong")
    return line.decode(errors="ignore").rstrip()
