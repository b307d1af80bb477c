"""The placement of ranks on nodes, and the division of a buffer into chunks, one per rank, and segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, repeat
from typing import NamedTuple

from .errors import InvalidArgument

Segment = tuple[int, int]
"""Begin and end of a range of elements."""

Chunk = tuple[Segment, ...]


class Lengths(NamedTuple):
    """Numbers of elements of a codec's block and of a segment. Buffers are cut into these."""

    block: int
    segment: int


def segments(begin: int, end: int, length: int) -> Chunk:
    """Cut ``[begin, end)`` into segments of ``length`` elements; none for an empty range."""
    return tuple(pairwise((*range(begin, end, length), end)))


def rounded(length: int, block: int) -> int:
    """Return the largest multiple of ``block`` that is at most ``length``, but at least one block."""
    return max(length // block, 1) * block


@lru_cache(maxsize=256)
def balanced_chunks(n: int, parts: int, lengths: Lengths) -> tuple[Chunk, ...]:
    """Cut ``n`` elements into ``parts`` chunks of nearly equal size, which begin at multiples of the codec's block.

    Parameters
    ----------
    n : int
        Number of elements.
    parts : int
        Number of chunks; some are empty when there are fewer blocks than parts.
    lengths : Lengths
        The codec's block and the longest segment. Large buffers are cut at multiples of 64 blocks, so that kernels
        start on whole vectors.
    """
    block, segment = lengths
    unit = block * 64 if n >= parts * block * 1024 else block
    units = -(-n // unit)
    bounds = [min(units * i // parts * unit, n) for i in range(parts + 1)]
    return tuple(map(segments, bounds, bounds[1:], repeat(rounded(segment, unit))))


def consecutive_chunks(counts: Sequence[int], lengths: Lengths) -> tuple[Chunk, ...]:
    """Return consecutive chunks of ``counts[i]`` elements, each cut into segments of whole blocks."""
    result, begin = [], 0
    for count in counts:
        result.append(segments(begin, begin + count, rounded(lengths.segment, lengths.block)))
        begin += count
    return tuple(result)


@dataclass(frozen=True)
class World:
    """The number of ranks and their placement on nodes.

    Parameters
    ----------
    size : int
        Number of ranks.
    per_node : int
        Ranks on the fullest node.
    crossing : int
        The most ranks r of one node for which rank r + 1 is on another node: 1 if all nodes have consecutive ranks.
    """

    size: int
    per_node: int = 1
    crossing: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidArgument(f"{self.size} ranks: at least 1 is needed")
        if not 1 <= self.per_node <= self.size:
            raise InvalidArgument(f"{self.per_node} ranks per node: 1 to {self.size} of {self.size} ranks are possible")

    @cached_property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)

    @classmethod
    def of(cls, nodes: Sequence[int]) -> World:
        """Return the world for a sequence with each rank's node."""
        leaving = Counter(node for node, above in zip(nodes, [*nodes[1:], nodes[0]], strict=True) if node != above)
        return cls(len(nodes), max(Counter(nodes).values()), max(leaving.values(), default=1))


def in_pairs(ranks: int) -> bool:
    """Return whether ranks exchange handshake messages in pairs: their number must be a power of two."""
    return ranks & ranks - 1 == 0


def shares(ranks: int) -> list[int]:
    """Return how many small arrays a rank sends in each round of a handshake: see `compcoll.execute.handshake`."""
    distances = [1 << number for number in range((ranks - 1).bit_length())]
    return [1 if in_pairs(ranks) else min(distance, ranks - distance) for distance in distances]


SIGNATURE_NBYTES = 16
"""Bytes of the signature at the start of every handshake message."""

_LONGEST = 16384
_LONGEST_IN_PAIRS = 1 << 17 | SIGNATURE_NBYTES
_MOST_RANKS = 16


def longest_message(ranks: int) -> int:
    """Return the bytes of the longest handshake message, including the arrays that it carries."""
    if not 1 < ranks <= _MOST_RANKS:
        return SIGNATURE_NBYTES
    return _LONGEST_IN_PAIRS if in_pairs(ranks) else _LONGEST


def amount(nbytes: float) -> str:
    """Format bytes with a fitting unit, a power of 1024."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes:.4g} B"
