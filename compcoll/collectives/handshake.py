"""The opening of every collective: do all ranks make the same call?

In round i a rank tells another the smallest and largest fingerprint that it knows of, and learns what a third one
knows; after ceil(log2 p) rounds every rank knows the extremes of all. When they differ, the ranks send each other one
line on their calls, so that everybody can tell who asked for what.

Where the number of ranks is a power of two, both others are the rank whose number differs in bit i (recursive doubling:
with one partner a round, answers take messages' acknowledgements along); else it sends to the rank 2^i below and
receives from the one 2^i above (dissemination).

Meanwhile a rank may send others what they will need first if they do make the same call. If they do not, or some rank
has other collectives to advance and goes about this one another way, the ranks also tell each other how much that was,
and receive it, so that nothing is under way any more.

Small arrays travel along, so that a small allreduce needs no further messages: in pairs their sum so far; by
dissemination those that the rank has, 2^i of them (fewer in the last round), and all are summed in the end.

D. Hensgen, R. Finkel, U. Manber, "Two Algorithms for Barrier Synchronization", Int. J. Parallel Programming 17, 1988;
J. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS
8(11), 1997, for the arrays.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, Protocol

from ..algorithms.dissemination import largest
from ..errors import CompcollError, WireCorrupted
from ..kernels._host import Along, Exchange, SharedMessage
from ..layout import SIGNATURE_NBYTES, in_pairs, longest_message, shares
from ..progress import Patience, Pending, Steps
from ..transports.base import Persistent, Transport, Wire
from ..transports.shared import Mail
from .signature import BUSY, FREE, LEVELS, NBYTES, TEXT_NBYTES, Signature, told_apart

_BEGIN = SIGNATURE_NBYTES  # of what travels along
_MOST_KEPT = 256


class Places(NamedTuple):
    """The places of small arrays in an opening's memory.

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


class SentAhead(NamedTuple):
    """A message that is sent before all ranks are known to make the same call.

    Attributes
    ----------
    message : Pending
        It has left when this tests true.
    dest, tag, nbytes : int
        As it is sent.
    """

    message: Pending
    dest: int
    tag: int
    nbytes: int


class Ahead(Protocol):
    """The work that a rank did ahead for its call. It writes to no buffer of the caller's."""

    @property
    def sent(self) -> Sequence[SentAhead]:
        """The messages that were sent, and are still to be used; all under one tag."""

    def withdraw(self) -> None:
        """Forget what was sent ahead: it is not used."""


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
    """The exchanges of an opening by the length of the arrays, in bytes; made when they are needed first.

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
            for old in [each for each in self if each]:  # the one without arrays is the executor's, too
                del self[old]
        rounds = []
        for arriving, incoming, sending, outgoing, share, new, before in self._rounds:
            length = min(_padded(_BEGIN + share * nbytes), self._longest)
            messages = (arriving, sending(length), incoming, outgoing, length)
            rounds.append((*messages, share * nbytes, new * nbytes, before))
        exchange = self[nbytes] = Exchange(self._arrays, rounds)
        return exchange


def _round(transport: Transport, number: int, tag: int, mail: Mail | None) -> _Round:
    rank, size, distance = transport.rank, transport.size, 1 << number
    if in_pairs(size):
        dest = source = rank ^ distance
        new = 0
    else:
        dest, source = (rank - distance) % size, (rank + distance) % size
        new = distance
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
        new=new,
        before=source < rank,
    )


def _padded(length: int) -> int:
    """A message's length, at most a sixteenth more: they are kept, and shall not be too many."""
    step = max(1 << length.bit_length() - 5, _BEGIN)
    return -(-length // step) * step


class Opening:
    """A rank's exchanges with the others: for one collective after the other, in the same order on all ranks.

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
    level : int
        The highest of all ranks, after `settle`.
    arrays : bytearray
        Memory of small arrays.
    exchanges : dict
        The exchange with arrays of so many bytes.
    messages : list of Pending
        Others that are under way.
    apart : CompcollError or None
        What was raised when ranks last did not make the same call: nothing is under way after it.
    """

    __slots__ = ("apart", "arrays", "exchanges", "level", "messages", "tag", "transport")

    def __init__(self, transport: Transport, tag: int, mail: Mail | None = None) -> None:
        self.transport = transport
        self.tag = tag
        self.level = FREE
        self.arrays = bytearray(places(transport.rank, transport.size).rows * largest(transport.size))
        self.exchanges = _Exchanges(transport, tag, mail, self.arrays)
        self.messages: list[Pending] = []
        self.apart: CompcollError | None = None


def _wire(memory: bytearray, length: int | None = None, *, exact: bool = True) -> Wire:
    """The beginning of some memory, or all of it."""
    return Wire(memoryview(memory)[:length], exact=exact)


def agree(opening: Opening, own: Signature, level: int, along: Along | None = None) -> Steps:
    """Find out whether all ranks make the same call.

    Parameters
    ----------
    opening : Opening
        Not in use by another collective.
    own : Signature
        This rank's call.
    level : int
        This rank's: `BUSY` if it has other collectives to advance.
    along : Along, optional
        An array that travels along; all ranks'.

    Raises
    ------
    CollectiveMismatch, CollectiveFailed
        On every rank, if they do not, since some rank could not: then the latter, if its system or memory failed it.
    """
    if not agreed(opening, own, level, along, (1, 0)):
        yield from settle(opening, own, level, along)


def agreed(opening: Opening, own: Signature, level: int, along: Along | None, patience: Patience) -> bool:
    """Begin to `agree`; tell whether that is all, since the other ranks' messages came while each was waited for so
    long. If not, `settle`.
    """
    exchange = opening.exchanges[0 if along is None else along.nbytes]
    return exchange.run(own.extremes[level], along, *patience)


def settle(opening: Opening, own: Signature, level: int, along: Along | None, ahead: Ahead | None = None) -> Steps:
    """Finish an agreement that has begun; ``ahead`` is what this rank may have begun meanwhile."""
    opening.level = level
    exchange = opening.exchanges[0 if along is None else along.nbytes]
    pending = exchange.waiting
    while pending is not None:
        yield pending
        pending = exchange.advance()
    extremes = exchange.extremes
    if extremes != own.extremes[level]:
        low, high = int.from_bytes(extremes[:NBYTES], "big"), int.from_bytes(extremes[NBYTES:], "big")
        mismatch = low ^ high > LEVELS
        opening.level = min(high & LEVELS, BUSY)  # on GPUs are not all: the lowest would be that, too
        # Where some rank is busy, others have sent something ahead that nobody will use.
        if mismatch or (own.ahead and opening.level == BUSY):
            calls = yield from _withdraw(opening, own.call, ahead)
        if mismatch:
            opening.apart = told_apart(calls, opening.transport.rank)
            raise opening.apart


_SENT = struct.Struct("<qqq")  # ahead: how many messages, under which tag, and the bytes of the longest
_CHECKSUM_NBYTES = 4
_MOST_SENT, _LAST_TAG, _MOST_NBYTES = 1 << 15, 32767, (1 << 31) - 1  # of messages; what MPI promises


def _withdraw(opening: Opening, text: str, ahead: Ahead | None) -> Steps:
    """Receive what was sent ahead, and return every rank's line."""
    transport, tag = opening.transport, opening.tag + 1
    sent = () if ahead is None else ahead.sent
    line = text.encode()[:TEXT_NBYTES].ljust(TEXT_NBYTES)
    told = {rank: _wire(_told([each for each in sent if each.dest == rank], line)) for rank in range(transport.size)}
    heard = {rank: _wire(bytearray(wire.nbytes)) for rank, wire in told.items() if rank != transport.rank}
    opening.messages = [transport.irecv(wire, rank, tag) for rank, wire in heard.items()]
    opening.messages += [transport.isend(told[rank], rank, tag) for rank in heard]
    yield from opening.messages
    for rank, (count, under, longest) in {rank: _believed(wire, rank, tag) for rank, wire in heard.items()}.items():
        unused = Wire(memoryview(bytearray(longest)), exact=False)
        unused.discarded = True
        for _ in range(count):
            opening.messages.append(transport.irecv(unused, rank, under))
            yield opening.messages[-1]
    if ahead is not None:
        yield from [each.message for each in sent]
        ahead.withdraw()
    opening.messages = []
    lines = {**told, **heard}
    return [
        bytes(lines[rank].buffer[_SENT.size : -_CHECKSUM_NBYTES]).decode(errors="ignore").rstrip()
        for rank in range(transport.size)
    ]


def _told(sent: Sequence[SentAhead], line: bytes) -> bytearray:
    """Write what a rank tells another, to which it sent this ahead. It is believed: so it ends with a checksum."""
    longest = max((each.nbytes for each in sent), default=0)
    told = _SENT.pack(len(sent), sent[0].tag if sent else 0, longest) + line
    return bytearray(told + zlib.crc32(told).to_bytes(_CHECKSUM_NBYTES, "little"))


def _believed(wire: Wire, rank: int, tag: int) -> tuple[int, int, int]:
    """Read how many messages a rank has sent ahead, their tag, and the bytes of the longest."""
    told = bytes(wire.buffer)
    count, under, longest = _SENT.unpack_from(told)
    if zlib.crc32(told[:-_CHECKSUM_NBYTES]).to_bytes(_CHECKSUM_NBYTES, "little") != told[-_CHECKSUM_NBYTES:]:
        raise WireCorrupted(f"what rank {rank} told of its call has changed on its way: its checksum is wrong")
    if count and not (0 < count <= _MOST_SENT and tag < under <= _LAST_TAG and 0 <= longest <= _MOST_NBYTES):
        raise WireCorrupted(
            f"rank {rank} says that it has sent {count} messages of up to {longest} bytes ahead, under tag {under}: at "
            f"most {_MOST_SENT} of {_MOST_NBYTES} bytes under tags {tag + 1} to {_LAST_TAG} are possible"
        )
    return (count, under, longest) if count else (0, 0, 0)
