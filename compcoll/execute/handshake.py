"""The handshake of every collective, which checks that all ranks make the same call.

In round i a rank sends the smallest and largest fingerprint that it knows to one rank, and receives another rank's.
After ceil(log2 p) rounds every rank knows the extremes of all ranks. If they differ, the ranks exchange one line that
describes their calls, so that every rank's error says which rank called what.

If the number of ranks is a power of two, a rank exchanges messages with the rank whose number differs in bit i
(recursive doubling; with one partner per round, replies carry the acknowledgements). Otherwise it sends to the rank 2^i
below and receives from the rank 2^i above (dissemination).

Small arrays travel with these messages, so that a small allreduce needs no others. Recursive doubling sends their sum
so far. Dissemination sends the 2^i arrays that the rank has (fewer in the last round), and sums all in the end.

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
from ..kernels._host import Collective, Exchange, Operation, PiggybackReduction, SharedMessage
from ..layout import SIGNATURE_NBYTES, in_pairs, longest_message, shares
from ..pending import Pending, Steps
from ..plan.signature import TEXT_NBYTES, Signature, mismatch
from ..transports.base import Connection, Persistent, Wire
from ..transports.shared import Mail

_BEGIN = SIGNATURE_NBYTES  # where the small arrays begin in a message
_MOST_KEPT = 256


class Places(NamedTuple):
    """The places of small arrays in a handshake's memory.

    Attributes
    ----------
    rows : int
        Number of arrays that fit: 1, to which received arrays are added, or the number of ranks. Then row 0 is this
        rank's array, and the other ranks' follow in cyclic rank order.
    first : int
        Row of rank 0.
    """

    rows: int
    first: int


def places(rank: int, ranks: int) -> Places:
    """Return the places of small arrays on a rank."""
    return Places(1, 0) if in_pairs(ranks) else Places(ranks, -rank % ranks)


class _Round(NamedTuple):
    """One round's messages: a receive of any length, and a send for each length that is needed.

    Attributes
    ----------
    arriving : Persistent or SharedMessage
        The receive.
    incoming, outgoing : Wire, bytearray
        Memory of the messages; empty if a message has its own.
    sending : callable
        Returns the send of a given number of bytes.
    share, new : int
        Number of arrays that are sent, from row 0 on, and also received; and the first row for received arrays.
    before : bool
        Whether the received arrays come from lower ranks than this one.
    """

    arriving: Persistent | SharedMessage
    incoming: Wire
    sending: Callable[[int], Persistent | SharedMessage]
    outgoing: bytearray
    share: int
    new: int
    before: bool


class _Exchanges(dict[int, Exchange]):
    """The exchanges of a handshake by the size of the arrays in bytes, created on first use.

    Parameters
    ----------
    transport : Connection
        Transport between all ranks.
    tag : int
        Tag of the messages.
    mail : Mail or None
        Carries the messages inside a node.
    arrays : bytearray
        Memory of small arrays.
    """

    def __init__(self, transport: Connection, tag: int, mail: Mail | None, arrays: bytearray) -> None:
        self._arrays = arrays
        self._longest = longest_message(transport.size)
        self._rounds = [_round(transport, number, tag, mail) for number in range(len(shares(transport.size)))]

    def __missing__(self, nbytes: int) -> Exchange:
        if len(self) >= _MOST_KEPT:
            for old in [each for each in self if each]:  # keep the exchange without arrays, which is always needed
                del self[old]
        rounds = []
        for arriving, incoming, sending, outgoing, share, new, before in self._rounds:
            length = min(_padded(_BEGIN + share * nbytes), self._longest)
            messages = (arriving, sending(length), incoming, outgoing, length)
            rounds.append((*messages, share * nbytes, new * nbytes, before))
        exchange = self[nbytes] = Exchange(self._arrays, rounds)
        return exchange


def partners(rank: int, size: int, number: int) -> tuple[int, int]:
    """Return the ranks that a rank sends to and receives from in a round."""
    distance = 1 << number
    if in_pairs(size):
        return rank ^ distance, rank ^ distance
    return (rank - distance) % size, (rank + distance) % size


def _round(transport: Connection, number: int, tag: int, mail: Mail | None) -> _Round:
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
    """Return a length rounded up by at most a sixteenth, to limit the number of persistent messages."""
    step = max(1 << length.bit_length() - 5, _BEGIN)
    return -(-length // step) * step


class Handshake:
    """The handshakes of one rank: one for each collective, in the same order on all ranks.

    Parameters
    ----------
    transport : Connection
        Transport between all ranks of the communicator.
    tag : int
        Tag of the handshakes' messages. The next tag is for the lines that describe calls that differ.
    mail : Mail, optional
        Carries the handshakes' messages inside a node.

    Attributes
    ----------
    arrays : bytearray
        Memory of small arrays.
    messages : list of Pending
        Messages under way with lines that describe calls.
    mismatch : CompcollError or None
        The last error that was raised because the ranks' calls differed. No message is under way after it.
    """

    __slots__ = ("_exchanges", "arrays", "messages", "mismatch", "plain", "tag", "transport")

    def __init__(self, transport: Connection, tag: int, mail: Mail | None = None) -> None:
        self.transport = transport
        self.tag = tag
        self.arrays = bytearray(places(transport.rank, transport.size).rows * largest(transport.size))
        self._exchanges = _Exchanges(transport, tag, mail, self.arrays)
        self.plain = self._exchanges[0]
        self.messages: list[Pending] = []
        self.mismatch: CompcollError | None = None

    def collective(
        self,
        own: Signature,
        level: int,
        piggyback: PiggybackReduction | None = None,
        operation: Operation | None = None,
        *,
        traced: bool = False,
    ) -> Collective:
        """Return an object that runs calls: a handshake, then an operation.

        Parameters
        ----------
        own : Signature
            This rank's call.
        level : int
            This rank's level: see `compcoll.plan.signature`. The operation starts at once if no rank has a higher one.
        piggyback : PiggybackReduction or None
            The reduction whose small arrays travel with the handshake.
        operation : Operation or None
            The operation that follows.
        traced : bool
            Whether to record the times of each call.
        """
        exchange = self.plain if piggyback is None else self._exchanges[piggyback.nbytes]
        return Collective(exchange, own.extremes[level], level, piggyback, operation, traced)

    def agree(self, own: Signature, level: int) -> Steps:
        """Check that all ranks make the same call, without an operation afterwards.

        Parameters
        ----------
        own : Signature
            This rank's call.
        level : int
            This rank's level.

        Raises
        ------
        CollectiveMismatch, CollectiveFailed
            On every rank, if the calls differ; `CollectiveFailed` if a rank failed to make its call, for example for
            lack of memory.
        """
        call = self.collective(own, level)
        call.begin(None, None, None, 0, 1, 0)
        while not call.ended:
            yield call
        if call.level is None:
            yield from self.compare(own)

    def compare(self, own: Signature) -> Steps:
        """Exchange the lines that describe the differing calls, and raise the error that shows them."""
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
        self.mismatch = mismatch(lines, self.transport.rank)
        raise self.mismatch


def _wire(memory: bytearray, length: int | None = None, *, exact: bool = True) -> Wire:
    """Return a wire on the first bytes of some memory, or on all of it."""
    return Wire(memoryview(memory)[:length], exact=exact)


def _checksum(line: bytes) -> bytes:
    return zlib.crc32(line).to_bytes(4, "little")


def _read(wire: Wire, rank: int) -> str:
    """Return the line that a rank has sent."""
    line = bytes(wire.buffer)[:TEXT_NBYTES]
    if _checksum(line) != bytes(wire.buffer)[TEXT_NBYTES:]:
        raise WireCorrupted(f"rank {rank}'s description of its call has changed on its way: its checksum is wrong")
    return line.decode(errors="ignore").rstrip()
