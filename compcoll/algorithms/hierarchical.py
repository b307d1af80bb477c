"""Hierarchical: uncompressed inside a node, compressed between nodes.

The ranks of a node send their values to the node's first rank, its leader, which adds them; the leaders run another
algorithm among themselves on the sums; each leader hands the result to its node. Between nodes travels what that
algorithm sends for as many ranks as there are nodes; a value is encoded as often as there.

ByteGrad in Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021.
"""

from __future__ import annotations

from dataclasses import replace

from ..layout import Segment, World
from ..pending import Pending, Steps
from ..transports.base import Group, Wire
from . import direct
from .costs import Costs
from .direct import DIRECT
from .job import Inbox, Job
from .record import MANY_RANKS, NEVER, Algorithm, Encodings, Growth
from .ring import RING


def _between(nodes: int) -> Algorithm[Job]:
    """The leaders' algorithm."""
    return DIRECT if nodes <= MANY_RANKS else RING


def allreduce(job: Job) -> Steps:
    """Sum all ranks' buffers. The job's coder is that of the leaders."""
    assert job.raw is not None and job.cut is not None
    nodes = job.group.transport.nodes
    own_node = nodes[job.group.rank]
    members = [rank for rank, node in enumerate(nodes) if node == own_node]
    segments = [segment for chunk in job.chunks for segment in chunk]
    inside = replace(job, coder=job.raw, residual=None)
    if job.group.rank != members[0]:
        yield from _member(inside, segments, members[0])
        return
    first: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
    leaders = list(first.values())
    # The sum of a node, scaled, is in `out` by then.
    group = Group(job.group.transport, job.group.tag + 2, leaders)
    between = _between(len(leaders))
    sums = replace(job, group=group, x=job.out, chunks=job.cut(between.parts(len(leaders))), scale=1.0)
    yield from _add_members(inside, segments, members[1:])
    if len(leaders) > 1:
        yield from between.steps["allreduce"](sums)
    yield from _tell_members(inside, segments, members[1:])


def sharded(job: Job) -> Steps:
    """Sum all ranks' buffers where nodes have equally many ranks, each of which is the leader for a part of the values:
    reduce-scatter inside the node, the part's allreduce between nodes, allgather inside.

    Of its phases each has a tag of its own, and all of its messages are known before it begins.
    """
    assert job.raw is not None and job.cut is not None
    nodes = job.group.transport.nodes
    own_node = nodes[job.group.rank]
    members = [rank for rank, node in enumerate(nodes) if node == own_node]
    place, count = members.index(job.group.rank), len(nodes) // len(members)
    peers = [rank for rank, node in enumerate(nodes) if nodes[:rank].count(node) == place]
    cut = job.cut(len(nodes))
    parts = [cut[index * count : (index + 1) * count] for index in range(len(members))]
    inside = Group(job.group.transport, job.group.tag, members)
    shards = tuple(tuple(segment for chunk in part for segment in chunk) for part in parts)
    plain = replace(job, group=inside, coder=job.raw, residual=None, chunks=shards)
    # The sum of a node, scaled, is in the own part of `out` by then.
    yield from direct.reduce_scatter(plain)
    between = Group(job.group.transport, job.group.tag + 2, peers)
    yield from direct.allreduce(replace(job, group=between, x=job.out, chunks=parts[place], scale=1.0))
    yield from direct.allgather(replace(plain, x=job.out, scale=1.0))


def _member(job: Job, segments: list[Segment], leader: int) -> Steps:
    """Hand in the own values and take the result."""
    arriving = Inbox(job.group, leader, job.wires(segments))
    sends: list[Pending] = []
    for segment, wire in zip(segments, job.wires(segments), strict=True):
        yield job.encode(segment, wire)
        sends.append(job.isend(segment, wire, leader))
    for sent in sends:
        yield sent
    for segment in segments:
        arrival, wire = arriving.next()
        yield arrival
        yield job.decode(segment, [wire])


def _add_members(job: Job, segments: list[Segment], members: list[int]) -> Steps:
    """Store the sum of the node's values in ``out``."""
    inboxes = [Inbox(job.group, member, job.wires(segments)) for member in members]
    for segment in segments:
        arrived: list[Wire] = []
        for inbox in inboxes:
            arrival, wire = inbox.next()
            yield arrival
            arrived.append(wire)
        yield job.decode(segment, arrived, own=True)


def _tell_members(job: Job, segments: list[Segment], members: list[int]) -> Steps:
    """Send the result to the node."""
    if not members:
        return
    sends: list[Pending] = []
    told = replace(job, x=job.out, scale=1.0)
    for segment, wire in zip(segments, job.wires(segments), strict=True):
        yield told.encode(segment, wire)
        sends += [job.isend(segment, wire, member) for member in members]
    for sent in sends:
        yield sent


def _cost(c: Costs, collective: str) -> float:
    """Hierarchical: uncompressed to each node's leader, the leaders' allreduce, uncompressed back.

    The leader receives and adds k - 1 whole buffers, ``(k - 1) n (β + γ)``; what it sends back all members take at
    once.
    """
    plain, members, seconds = c.uncompressed(), c.world.per_node - 1, 0.0
    if members:
        m = plain.cut(plain.n)
        seconds += plain.inside_latency + plain.encode * plain.n / m
        seconds += members * (plain.n * (plain.inside + plain.accumulate) + m * plain.message)
        seconds += plain.inside_latency + plain.n * (plain.encode + plain.inside + plain.decode)
        seconds += members * m * plain.message
    if c.world.nodes > 1:
        seconds += _between(c.world.nodes).cost(c.leaders(), collective)
    return seconds


def _encodings(collective: str, ranks: int, nodes: int) -> Encodings:
    return _between(nodes).encodings(collective, nodes, nodes) if nodes > 1 else NEVER


def _growth(collective: str, ranks: int, nodes: int, once: float) -> Growth:
    return _between(nodes).growth(collective, nodes, nodes, once)


def _unfit(world: World) -> str:
    return "one level only" if world.nodes == 1 or world.per_node == 1 else ""


HIERARCHICAL = Algorithm(
    "hierarchical",
    ("allreduce",),
    _cost,
    {"allreduce": allreduce},
    _encodings,
    _growth,
    unfit=_unfit,
    symmetry="rotation",
)
