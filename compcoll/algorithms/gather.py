"""Gathering bytes: few of every rank, with checksums, or wires whose lengths everybody knows.

J. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS
8(11), 1997, for the former.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from ..errors import WireCorrupted
from ..layout import segments
from ..pending import Pending, Steps
from ..transports.base import Group, Wire
from .job import Inbox

_CHECKSUM_NBYTES = 4
_AHEAD = 8  # receives posted beyond the one waited for


def gather(group: Group, own: bytes) -> Steps:
    """Every rank's bytes, as many of each, in ⌈log2 p⌉ messages that double in length.

    They tell of lengths that are then believed: so they always carry checksums.

    Raises
    ------
    WireCorrupted
        If they are not what was sent.
    """
    own += zlib.crc32(own).to_bytes(_CHECKSUM_NBYTES, "little")
    p, rank, length = group.size, group.rank, len(own)
    memory = memoryview(bytearray(p * length))
    memory[:length] = own
    known = 1
    while known < p:
        count = min(known, p - known)
        arriving = group.irecv(Wire(memory[known * length : (known + count) * length]), (rank + known) % p)
        sending = group.isend(Wire(memory[: count * length]), (rank - known) % p)
        yield arriving
        yield sending
        known += count
    slots = [memory[slot * length : (slot + 1) * length] for slot in ((r - rank) % p for r in range(p))]
    return [_checked(bytes(slot), source) for source, slot in enumerate(slots)]


def _checked(told: bytes, source: int) -> bytes:
    text, checksum = told[:-_CHECKSUM_NBYTES], told[-_CHECKSUM_NBYTES:]
    if zlib.crc32(text).to_bytes(_CHECKSUM_NBYTES, "little") != checksum:
        raise WireCorrupted(f"the {len(text)} bytes that rank {source} tells everybody have changed on their way")
    return text


def ring(
    group: Group,
    wires: Sequence[Wire],
    block: int,
    arrived: Callable[[int], None],
    sending: Callable[[int, int], None],
    meanwhile: Callable[[Callable[[], None]], None],
) -> Steps:
    """Fill in the wires of all other ranks; each travels around the ring in blocks, so that a long one keeps nobody
    waiting for all of it.

    Parameters
    ----------
    group : Group
        The ranks.
    wires : sequence of Wire
        One a rank, of the length that it has; this rank's own holds its bytes.
    block : int
        Most bytes of a message.
    arrived : callable
        Called with a rank when its wire is complete.
    sending : callable
        Called with a rank and the number of bytes of its wire that leave.
    meanwhile : callable
        What else is to be done: called when the own wire is on its way, with what helps that on and is to be called now
        and then.
    """
    p, rank = group.size, group.rank
    right, left = (rank + 1) % p, (rank - 1) % p
    route = [(rank - step) % p for step in range(1, p)]
    parts = {
        r: [Wire(wires[r].buffer[begin:end]) for begin, end in segments(0, wires[r].nbytes, block)] for r in range(p)
    }
    arriving = Inbox(group, left, [part for source in route for part in parts[source]], ahead=_AHEAD)
    sends: list[Pending] = []

    def forward(source: int, part: Wire) -> None:
        sending(source, part.nbytes)
        sends.append(group.isend(part, right))

    def help_on() -> None:
        if sends and sends[0].Test():
            del sends[0]

    if p > 1:
        for part in parts[rank]:
            forward(rank, part)
    meanwhile(help_on)
    for source in route:
        for _ in parts[source]:
            arrival, part = arriving.next()
            yield arrival
            if source != right:
                forward(source, part)
        arrived(source)
    for sent in sends:
        yield sent
