"""The constants from which an algorithm's cost is put together; `compcoll.plan.cost` says what the letters mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..layout import World


@dataclass(frozen=True)
class Costs:
    """The constants of one situation: seconds per byte of the caller's values, unless said otherwise.

    Attributes
    ----------
    n : float
        Bytes of a rank's buffer.
    world : World
        The ranks.
    segment : int
        Bytes of a segment.
    coded : bool
        Whether a codec runs.
    shrink : float
        Bytes on the wire for a byte of values.
    encode, decode, accumulate, recode : float
        The codec's.
    add : float
        Of adding uncompressed values.
    message, latency, inside_latency : float
        Seconds: host time of a message, α of the slowest link that the ranks use, and of that inside a node.
    inside, between : float
        β inside a node, and between nodes for one rank alone.
    among : callable
        Gives the constants among other ranks of the same nodes, of the codec or of values as they are.
    """

    n: float
    world: World
    segment: int
    coded: bool
    shrink: float
    encode: float
    decode: float
    accumulate: float
    recode: float
    add: float
    message: float
    latency: float
    inside_latency: float
    inside: float
    between: float
    among: Callable[[World, bool], Costs]

    def uncompressed(self) -> Costs:
        """The constants of values as they are."""
        return self.among(self.world, False)

    def leaders(self) -> Costs:
        """The constants among one rank of each node."""
        return self.among(World(self.world.nodes), True)

    def cut(self, nbytes: float) -> int:
        """Segments of a chunk."""
        return max(math.ceil(nbytes / self.segment), 1)

    def neighbours(self, nbytes: float) -> tuple[float, float]:
        """Host and wire seconds of that many bytes of values to the next rank."""
        host = self.inside * nbytes * self.shrink if self.world.per_node > 1 else 0.0
        return host, self.between * nbytes * self.shrink * self.world.crossing

    def everybody(self, nbytes: float) -> tuple[float, float]:
        """Host and wire seconds of that many bytes of values to each other rank, all ranks of a node at once."""
        near, far = self.world.per_node - 1, self.world.size - self.world.per_node
        host = self.inside * near * nbytes * self.shrink
        return host, self.between * far * self.world.per_node * nbytes * self.shrink


def overlap(host: float, wire: float, parts: float) -> float:
    """Overlap two things, in that many parts: the longer one, and one part of the shorter to fill the pipeline."""
    return max(host, wire) + min(host, wire) / max(parts, 1.0)
