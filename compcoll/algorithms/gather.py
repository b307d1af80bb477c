"""Gather a few bytes of every rank, with checksums.

J. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS
8(11), 1997.
"""

from __future__ import annotations

import zlib

from ..errors import WireCorrupted
from ..pending import Steps
from ..transports.base import Group, Wire

_CHECKSUM_NBYTES = 4


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


def _checked(slot: bytes, source: int) -> bytes:
    text, checksum = slot[:-_CHECKSUM_NBYTES], slot[-_CHECKSUM_NBYTES:]
    if zlib.crc32(text).to_bytes(_CHECKSUM_NBYTES, "little") != checksum:
        raise WireCorrupted(f"the {len(text)} bytes that rank {source} sends everybody have changed on their way")
    return text
