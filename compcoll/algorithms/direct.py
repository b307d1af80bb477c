"""Direct: scatter-reduce, then allgather, each in one step between all pairs of ranks.

Rank r owns chunk r. All other ranks send it their encoded values at once. In one pass rank r adds them to its own
values, in rank order, and sends the encoded sum to all ranks. Each rank sends 2(p-1)/p of the buffer's wire, like the
ring. But a value is encoded twice for every p, and waits for two messages instead of 2(p-1).

Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021 (its scatter-reduce, C_LP_S).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..layout import Segment
from ..pending import Pending, Steps
from ..transports.base import Wire
from .costs import Costs, overlap
from .job import Inbox, Job, decode_all, receive_each
from .linear import ToRoot
from .record import ONE_ENCODING, Algorithm, Encodings, Growth, growth_at_root


def allreduce(job: Job) -> Steps:
    """Sum all ranks' buffers: reduce-scatter, then allgather."""
    phase = _Allgather(job)
    yield from _reduce_scatter(job, lambda segment, arrived: job.finish(segment, phase.send, arrived))
    yield from phase.collect()


def reduce_scatter(job: Job) -> Steps:
    """Sum all ranks' buffers; rank r keeps chunk r. Values of other ranks are encoded once, its own are not."""

    def finish(segment: Segment, arrived: list[Wire]) -> Steps:
        yield job.decode(segment, arrived, own=True)

    yield from _reduce_scatter(job, finish)


def reduce(job: Job) -> Steps:
    """Sum all ranks' buffers on rank 0: reduce-scatter, then all other ranks send it their encoded chunks."""
    phase = ToRoot(job, job.group.next_phase())
    yield from _reduce_scatter(job, phase.finish)
    yield from phase.collect()


def allgather(job: Job) -> Steps:
    """Gather all ranks' chunks; rank r decodes its own wire, too, so that all ranks get the same bits."""
    phase = _Allgather(job)
    for segment in job.chunks[job.group.rank]:
        yield from job.finish(segment, phase.send)
    yield from phase.collect()


def _others(job: Job) -> list[int]:
    """Return all other ranks in ascending cyclic order, so that not all ranks send to the same rank at once.

    The ranks of a node begin as far apart as possible, so that they do not all send to the same other node at once.
    """
    p, rank = job.group.size, job.group.rank
    nodes = [job.group.transport.nodes[each] for each in job.group.ranks]
    begin = nodes[:rank].count(nodes[rank]) * (p - 1) // nodes.count(nodes[rank])
    return [(rank + 1 + (begin + step) % (p - 1)) % p for step in range(p - 1)]


def _reduce_scatter(job: Job, finish: Callable[[Segment, list[Wire]], Steps]) -> Steps:
    """Send every other rank its chunk, and call ``finish`` on each own segment with the wires of all other ranks."""
    group, rank = job.group, job.group.rank
    own, others = job.chunks[rank], _others(job)
    inboxes = [Inbox(group, source, job.wires(own)) for source in sorted(others)]
    sends: list[Pending] = []
    for index in range(max(len(chunk) for chunk in job.chunks)):
        for dest in others:
            sends += yield from job.send(job.chunks[dest][index : index + 1], [dest])
    for segment in own:
        arrived = yield from receive_each(inboxes)
        yield from finish(segment, arrived)
    yield from sends


class _Allgather:
    """The allgather phase. The constructor posts its receives, before the reduce-scatter phase."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group = job.group.next_phase()
        self._others = _others(job)
        self._inboxes = {
            source: Inbox(self._group, source, job.wires(job.chunks[source])) for source in reversed(self._others)
        }
        self._sends: list[Pending] = []

    def send(self, segment: Segment, wire: Wire) -> None:
        """Send a wire of this rank's chunk to all other ranks."""
        self._sends += [self._job.isend(segment, wire, dest, self._group) for dest in self._others]

    def collect(self) -> Steps:
        """Decode the wires of all other ranks."""
        yield from decode_all(self._job, self._inboxes)
        yield from self._sends


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds of direct: p - 1 messages at once in each of two phases.

    Phase one encodes and sends all other chunks, both at the same time. Then it decodes, adds and encodes the own
    chunk's p - 1 wires segment by segment, so that only the first segment delays phase two. Phase two decodes.
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
    if collective == "reduce":
        return first + finish / m + c.at_root(chunk, c.decode, finish * (m - 1) / m)
    second = c.latency + overlap(finish * (m - 1) / m + unpack + messages / 2, wire, others * m)
    return first + finish / m + second


def _encodings(collective: str, ranks: int, nodes: int) -> Encodings:
    if collective in ("allreduce", "reduce"):
        return Encodings(2, ranks)
    return Encodings(1, ranks - 1) if collective == "reduce_scatter" else ONE_ENCODING


def _growth(collective: str, ranks: int, nodes: int, again: float) -> Growth:
    """Return ``√((2p - 1) / p)`` for an allreduce, which encodes p - 1 single terms and the whole sum."""
    p = ranks
    if collective == "reduce":
        return growth_at_root(_growth, ranks, nodes, again)
    if collective == "allreduce":
        return Growth(math.sqrt((2 * p - 1 + (p - 1) * again) / p), (p - 1) / math.sqrt(p) + 1)
    return Growth(1.0, math.sqrt(p) if collective == "reduce_scatter" else 0.0)


DIRECT = Algorithm(
    "direct",
    {
        "allreduce": allreduce,
        "reduce_scatter": reduce_scatter,
        "reduce": reduce,
        "allgather": allgather,
        "allgatherv": allgather,
    },
    _cost,
    _encodings,
    _growth,
    chunked=True,
    rounds_once=True,
    symmetry="rotation",
)
