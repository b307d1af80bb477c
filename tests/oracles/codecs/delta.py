"""delta in plain Python: the number of changed elements, these elements, and the gaps before them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from oracles.codecs import Reference


def wire_of(old: Sequence[bytes], new: Sequence[bytes]) -> bytes:
    """Return the wire of elements' bytes that were others before."""
    elements, gaps, gap = [], bytearray(), 0
    for before, now in zip(old, new, strict=True):
        if before == now:
            gap += 1
            continue
        while gap >= 255:
            gaps.append(255)
            gap -= 255
        gaps.append(gap)
        elements.append(now)
        gap = 0
    values = b"".join(elements)
    if len(values) + len(gaps) >= len(whole := b"".join(new)):
        return struct.pack("<Q", len(new)) + whole
    return struct.pack("<Q", len(elements)) + values + gaps


REFERENCE = Reference(options={}, formula=None, bounds={}, estimates={})
