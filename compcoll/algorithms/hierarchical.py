"""Hierarchical: sums inside each node first, then compressed sums between nodes.

The ranks of a node send their values uncompressed to the node's first rank, its leader, which adds them. The leaders
sum these sums by direct. Each leader then sends the result to its node. Bytes between nodes and encodings of a value
are those of direct with as many ranks as there are nodes.

With a homomorphic codec, values travel to the leader encoded, and their sums stay encoded up to the result.

ByteGrad in Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..layout import Segment
from ..pending import Pending, Steps
from ..transports.base import Group, Wire
from . import direct
from .costs import Costs
from .direct import DIRECT
from .job import Inbox, Job, receive_each
from .record import NEVER, Algorithm, Encodings, Growth


def allreduce(job: Job) -> Steps:
    """Sum all ranks' buffers. The leaders use the job's coder."""
    assert job.cut is not None
    members = _members(job)
    leader, others = members[0], members[1:]
    first: dict[int, int] = {}
    for rank, node in enumerate(job.group.transport.nodes):
        first.setdefault(node, rank)
    leaders = list(first.values())
    encoded, inside = job.homomorphic, job.uncompressed()
    between = job.cut(len(leaders))
    segments = [segment for chunk in (between if encoded else job.chunks) for segment in chunk]
    arriving = job if encoded else inside
    if job.group.rank != leader:
        yield from _member(arriving, inside, segments, leader)
        return
    inboxes = [Inbox(job.group, member, arriving.wires(segments)) for member in others]
    sums: dict[Segment, Wire] = {}
    for segment in segments:
        arrived = yield from receive_each(inboxes)
        if encoded:
            sums[segment] = job.wire(segment)
            yield job.encode(segment, sums[segment], arrived)
        else:
            yield inside.decode(segment, arrived, own=True)
    if len(leaders) > 1:
        group = Group(job.group.transport, job.group.tag + 2, leaders)
        changes: dict[str, Any] = {"group": group, "chunks": between}
        yield from direct.allreduce(
            _EncodedJob(**vars(job) | changes, encoded=sums) if encoded else job.in_place(**changes)
        )
    elif encoded:
        for segment, wire in sums.items():
            yield job.decode(segment, [wire])
    if others:
        sends = yield from inside.in_place().send(segments, others)
        yield from sends


@dataclass
class _EncodedJob(Job):
    """A job of direct whose values are wires.

    Attributes
    ----------
    encoded : mapping of Segment to Wire
        This rank's values.
    """

    encoded: Mapping[Segment, Wire] = field(default_factory=dict)

    def encode(
        self, segment: Segment, wire: Wire, terms: Sequence[Wire] = (), *, own: bool = True, **how: Any
    ) -> Pending | None:
        """Encode a segment: this rank's wire (if ``own``) plus the ``terms``."""
        values = (self.encoded[segment],) if own else ()
        return super().encode(segment, wire, (*values, *terms), own=False, **how)


def sharded(job: Job) -> Steps:
    """Sum all ranks' buffers if all nodes have equally many ranks; each rank of a node leads for a part of the values.

    The phases are a reduce-scatter inside the node, an allreduce of each part between nodes, and an allgather inside
    the node. Each phase has its own tag, and all messages are known before the collective begins.
    """
    assert job.cut is not None
    nodes = job.group.transport.nodes
    members = _members(job)
    place, count = members.index(job.group.rank), len(nodes) // len(members)
    peers = [rank for rank, node in enumerate(nodes) if nodes[:rank].count(node) == place]
    cut = job.cut(len(nodes))
    parts = [cut[index * count : (index + 1) * count] for index in range(len(members))]
    inside = Group(job.group.transport, job.group.tag, members)
    shards = tuple(tuple(segment for chunk in part for segment in chunk) for part in parts)
    plain = replace(job.uncompressed(), group=inside, chunks=shards)
    # After this the rank's own part of `out` holds the node's sum, already scaled.
    yield from direct.reduce_scatter(plain)
    between = Group(job.group.transport, job.group.tag + 2, peers)
    yield from direct.allreduce(job.in_place(group=between, chunks=parts[place]))
    yield from direct.allgather(plain.in_place())


def _members(job: Job) -> list[int]:
    """Return the ranks of this rank's node."""
    nodes = job.group.transport.nodes
    return [rank for rank, node in enumerate(nodes) if node == nodes[job.group.rank]]


def _member(job: Job, result: Job, segments: list[Segment], leader: int) -> Steps:
    """Send this rank's values to the leader, and receive the result as another job encodes it."""
    arriving = Inbox(job.group, leader, result.wires(segments))
    sends = yield from job.send(segments, [leader])
    yield from sends
    for segment in segments:
        wire = yield from arriving.receive()
        yield result.decode(segment, [wire])


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds of sends to each node's leader, the leaders' allreduce, and sends back.

    The leader receives and adds k - 1 whole buffers, ``(k - 1) n (β + γ)``. All members receive the result at the same
    time.
    """
    plain, members, seconds = c.uncompressed(), c.world.per_node - 1, 0.0
    if members:
        m = plain.cut(plain.n)
        seconds += plain.inside_latency + plain.encode * plain.n / m
        seconds += members * (plain.n * (plain.inside + plain.accumulate) + m * plain.message)
        seconds += plain.inside_latency + plain.n * (plain.encode + plain.inside + plain.decode)
        seconds += members * m * plain.message
    if c.world.nodes > 1:
        seconds += DIRECT.cost(c.leaders(), collective)
    return seconds


def _encodings(collective: str, ranks: int, nodes: int) -> Encodings:
    return DIRECT.encodings(collective, nodes, nodes) if nodes > 1 else NEVER


def _growth(collective: str, ranks: int, nodes: int, again: float) -> Growth:
    return DIRECT.growth(collective, nodes, nodes, again)


HIERARCHICAL = Algorithm(
    "hierarchical",
    {"allreduce": allreduce},
    _cost,
    _encodings,
    _growth,
    unfit=lambda world: "one level only" if world.nodes == 1 or world.per_node == 1 else "",
    symmetry="rotation",
)
