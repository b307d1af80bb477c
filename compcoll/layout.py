"""How a buffer is cut: into chunks (one a rank) and chunks into segments (the unit of overlap)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

Segment = tuple[int, int]
"""Begin and end of a run of elements."""

Chunk = tuple[Segment, ...]


def segments(begin: int, end: int, length: int) -> Chunk:
    """Cut ``[begin, end)`` into runs of ``length`` elements; none for an empty range."""
    return tuple((first, min(first + length, end)) for first in range(begin, end, length))


def rounded(length: int, block: int) -> int:
    """Largest multiple of ``block`` that is at most ``length``, but at least one block."""
    return max(length // block, 1) * block


@lru_cache(maxsize=256)
def balanced_chunks(n: int, parts: int, block: int, segment: int) -> tuple[Chunk, ...]:
    """Cut ``n`` elements into ``parts`` chunks whose bounds are multiples of ``block``, as equal as that allows.

    Parameters
    ----------
    n : int
        Number of elements.
    parts : int
        Number of chunks; some are empty when there are fewer blocks than parts.
    block : int
        The codec's block, in elements. Large buffers are cut at multiples of 64 blocks, so that kernels start on whole
        vectors.
    segment : int
        Longest segment wanted, in elements.
    """
    unit = block * 64 if n >= parts * block * 1024 else block
    units = -(-n // unit)
    bounds = [min(units * i // parts * unit, n) for i in range(parts + 1)]
    return tuple(segments(begin, end, rounded(segment, unit)) for begin, end in pairwise(bounds))


def consecutive_chunks(counts: Sequence[int], block: int, segment: int) -> tuple[Chunk, ...]:
    """One chunk of ``counts[i]`` elements after the other, each cut into segments of whole blocks."""
    result, begin = [], 0
    for count in counts:
        result.append(segments(begin, begin + count, rounded(segment, block)))
        begin += count
    return tuple(result)
