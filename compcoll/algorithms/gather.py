"""Gather bytes: a few of every rank, with checksums; or wires whose lengths all ranks know.

J. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS
8(11), 1997, for `gather`.
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
    """Return every rank's bytes, equally many from each, in ⌈log2 p⌉ messages that double in length.

    They always carry checksums, since ranks rely on the lengths that they announce.

    Raises
    ------
    WireCorrupted
        If a checksum does not match.
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
    """Receive the wires of all other ranks. Wires travel around the ring in blocks, so that a long wire delays no rank
    for its whole length.

    Parameters
    ----------
    group : Group
        The ranks.
    wires : sequence of Wire
        One wire for each rank, with its length; this rank's own wire holds its bytes.
    block : int
        Most bytes of a message.
    arrived : callable
        Called with a rank when its wire is complete.
    sending : callable
        Called with a rank and the number of bytes of its wire that are being sent.
    meanwhile : callable
        Other work to do, called once the sends of this rank's wire are posted. Its argument is a function that advances
        these sends, to be called now and then.
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
            part = yield from arriving.receive()
            if source != right:
                forward(source, part)
        arrived(source)
    yield from sends
