"""The constants of the algorithms' cost formulas; `compcoll.plan.cost` explains their letters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..layout import World


@dataclass(frozen=True)
class Costs:
    """The constants for one buffer, codec and set of at least two ranks.

    Times are in seconds per byte of the caller's values. α is the latency of a message, β the seconds per byte of one.

    Attributes
    ----------
    n : float
        Bytes of a rank's buffer.
    world : World
        The ranks.
    segment : int
        Bytes of a segment.
    shrink : float
        Bytes on the wire per byte of values.
    encode, decode, accumulate, recode : float
        Times of the codec: values to a wire; a wire to values; a wire added to values; a wire and values added, and
        their sum encoded.
    add : float
        Time to add uncompressed values.
    message, latency, inside_latency : float
        In seconds: host time of a message, both ends together; α of the slowest link that the ranks use; α inside a
        node.
    inside, between : float
        β inside a node, and between nodes for a single rank.
    among : callable
        Returns the constants for another set of ranks on the same nodes, with the codec or without.
    """

    n: float
    world: World
    segment: int
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
        """Return the constants for uncompressed values."""
        return self.among(self.world, False)

    def leaders(self) -> Costs:
        """Return the constants for one rank of each node."""
        return self.among(World(self.world.nodes), True)

    def cut(self, nbytes: float) -> int:
        """Return the number of segments of a chunk of ``nbytes`` bytes."""
        return max(math.ceil(nbytes / self.segment), 1)

    def neighbours(self, nbytes: float) -> tuple[float, float]:
        """Return the host and wire seconds to send ``nbytes`` bytes of values to the next rank."""
        host = self.inside * nbytes * self.shrink if self.world.per_node > 1 else 0.0
        return host, self.between * nbytes * self.shrink * self.world.crossing

    def everybody(self, nbytes: float) -> tuple[float, float]:
        """Return the host and wire seconds if all ranks of a node send ``nbytes`` bytes of values to every rank."""
        near, far = self.world.per_node - 1, self.world.size - self.world.per_node
        host = self.inside * near * nbytes * self.shrink
        return host, self.between * far * self.world.per_node * nbytes * self.shrink

    def at_root(self, nbytes: float, per_byte: float, host: float = 0.0) -> float:
        """Return the seconds in which one rank sends ``nbytes`` bytes of values to every other rank, or receives them.

        Parameters
        ----------
        nbytes : float
            Bytes of values for each other rank.
        per_byte : float
            Seconds of this rank to encode or decode a byte of them.
        host : float
            Seconds of other work of this rank meanwhile.
        """
        near, far = self.world.per_node - 1, self.world.size - self.world.per_node
        messages = (near + far) * self.cut(nbytes)
        copy, wire = (rate * nbytes * self.shrink for rate in (self.inside * near, self.between * far))
        host += per_byte * (near + far) * nbytes + messages * self.message / 2 + copy
        return self.latency + overlap(host, wire, messages)


def overlap(host: float, wire: float, parts: float) -> float:
    """Return the seconds of host and wire work that overlap: the longer, plus one part of the shorter."""
    return max(host, wire) + min(host, wire) / max(parts, 1.0)
