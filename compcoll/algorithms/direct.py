"""Direct: scatter-reduce, then allgather, each in one step between all pairs of ranks.

Rank r owns chunk r: the others send it their encoded values at once, it adds them in rank order after its own in one
pass, and sends the encoded sum to everybody. Each rank sends 2(p-1)/p of the buffer's wire, like the ring, but a value
is encoded twice whatever p is, and waits for two messages instead of 2(p-1).

Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021 (its scatter-reduce, C_LP_S).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..layout import Segment, World
from ..pending import Pending, Steps
from ..transports.base import Wire
from .costs import Costs, overlap
from .job import Inbox, Job
from .record import MANY_RANKS, ONE_ENCODING, Algorithm, Encodings, Growth


def allreduce(job: Job) -> Steps:
    """Sum all ranks' buffers: reduce-scatter, then allgather."""
    allgather_phase = _Allgather(job)
    own = job.wires(job.chunks[job.group.rank])

    def finish(index: int, segment: Segment, arrived: list[Wire]) -> Steps:
        yield from job.finish(segment, own[index], allgather_phase.send, arrived)

    yield from _reduce_scatter(job, finish)
    yield from allgather_phase.collect()


def reduce_scatter(job: Job) -> Steps:
    """Sum all ranks' buffers; rank r keeps chunk r. Only the others' values are encoded, once."""

    def finish(index: int, segment: Segment, arrived: list[Wire]) -> Steps:
        yield job.decode(segment, arrived, own=True)

    yield from _reduce_scatter(job, finish)


def allgather(job: Job) -> Steps:
    """Give every rank all chunks; rank r has chunk r, and decodes its own wire like everybody else."""
    phase = _Allgather(job)
    yield from job.finish_own(phase.send)
    yield from phase.collect()


def _others(job: Job) -> list[int]:
    """All other ranks, from nearest above on, so that not everybody sends to the same one at once.

    Ranks of one node begin as far apart as they can, so that they do not all send to the same other node at once.
    """
    p, rank = job.group.size, job.group.rank
    nodes = [job.group.transport.nodes[each] for each in job.group.ranks]
    begin = nodes[:rank].count(nodes[rank]) * (p - 1) // nodes.count(nodes[rank])
    return [(rank + 1 + (begin + step) % (p - 1)) % p for step in range(p - 1)]


def _reduce_scatter(job: Job, finish: Callable[[int, Segment, list[Wire]], Steps]) -> Steps:
    """Send every other rank its chunk, and call ``finish`` on each own segment with everybody's wires for it."""
    group, rank = job.group, job.group.rank
    own, others = job.chunks[rank], _others(job)
    inboxes = [Inbox(group, source, job.wires(own)) for source in sorted(others)]
    sends: list[Pending] = []
    for index in range(max(len(chunk) for chunk in job.chunks)):
        for dest in others:
            for segment in job.chunks[dest][index : index + 1]:
                wire = job.wire(segment)
                yield job.encode(segment, wire)
                sends.append(job.isend(segment, wire, dest))
    for index, segment in enumerate(own):
        arrived = []
        for inbox in inboxes:
            arrival, wire = inbox.next()
            yield arrival
            arrived.append(wire)
        yield from finish(index, segment, arrived)
    for sent in sends:
        yield sent


class _Allgather:
    """The allgather phase. Its receives are posted when it is made, before the phase that leads to it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group = job.group.next_phase()
        self._others = _others(job)
        self._inboxes = {
            source: Inbox(self._group, source, job.wires(job.chunks[source])) for source in reversed(self._others)
        }
        self._sends: list[Pending] = []

    def send(self, segment: Segment, wire: Wire) -> None:
        """Send an own wire to everybody."""
        self._sends += [self._job.isend(segment, wire, dest, self._group) for dest in self._others]

    def collect(self) -> Steps:
        """Decode everybody's wires."""
        for index in range(max(len(chunk) for chunk in self._job.chunks)):
            for source, inbox in self._inboxes.items():
                for segment in self._job.chunks[source][index : index + 1]:
                    arrival, wire = inbox.next()
                    yield arrival
                    yield self._job.decode(segment, [wire])
        for sent in self._sends:
            yield sent


def _cost(c: Costs, collective: str) -> float:
    """Direct: p - 1 messages at once in each of two phases.

    Phase one encodes all other chunks while they leave; the own chunk's p - 1 wires are decoded, added and encoded,
    segment by segment, so that only the first one delays phase two, which decodes what arrives.
    """
    p = c.world.size
    others = p - 1
    chunk = c.n if collective in ("allgather", "allgatherv") else c.n / p
    m = c.cut(chunk)
    copy, wire = c.everybody(chunk)
    messages = others * m * c.message
    unpack = c.decode * others * chunk + messages / 2 + copy
    if collective in ("allgather", "allgatherv"):
        return c.latency + c.encode * chunk / m + overlap(unpack + messages / 2, wire, others * m)
    pack = c.encode * others * chunk + messages + copy
    finish = c.accumulate * max(others - 1, 0) * chunk
    if collective == "reduce_scatter":
        return c.latency + overlap(pack, wire, others * m) + finish + c.accumulate * chunk
    finish += c.recode * chunk
    first = c.latency + overlap(pack, wire, others * m)
    second = c.latency + overlap(finish * (m - 1) / m + unpack + messages / 2, wire, others * m)
    return first + finish / m + second


def _encodings(collective: str, ranks: int, nodes: int) -> Encodings:
    if collective == "allreduce":
        return Encodings(2, ranks)
    return Encodings(1, ranks - 1) if collective == "reduce_scatter" else ONE_ENCODING


def _growth(collective: str, ranks: int, nodes: int, once: float) -> Growth:
    """P - 1 single terms are encoded, and of an allreduce the whole sum: ``√((2p - 1) / p)``."""
    p = ranks
    if collective == "allreduce":
        return Growth(math.sqrt((2 * p - 1 + (p - 1) * once**2) / p), (p - 1) / math.sqrt(p) + 1)
    return Growth(1.0, math.sqrt(p) if collective == "reduce_scatter" else 0.0)


def _unfit(world: World) -> str:
    return f"above {MANY_RANKS} ranks" if world.size > MANY_RANKS else ""


DIRECT = Algorithm(
    "direct",
    ("allreduce", "reduce_scatter", "allgather", "allgatherv"),
    _cost,
    {"allreduce": allreduce, "reduce_scatter": reduce_scatter, "allgather": allgather, "allgatherv": allgather},
    _encodings,
    _growth,
    chunked=True,
    rounds_once=True,
    unfit=_unfit,
    symmetry="rotation",
)
