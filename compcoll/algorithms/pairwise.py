"""Pairwise exchange: every rank sends every other rank its chunk, to the nearest ranks first."""

from __future__ import annotations

from dataclasses import replace

from ..layout import Chunk
from ..pending import Pending, Steps
from .costs import Costs, overlap
from .job import Inbox, Job, Window
from .record import ONE_ENCODING, Algorithm


def alltoall(job: Job) -> Steps:
    """Send chunk k of ``x`` to rank k; chunk r of ``out`` comes from rank r. The own chunk is encoded, too.

    In an alltoallv, chunks have different lengths; empty ones send nothing.
    """
    group, p, rank = job.group, job.group.size, job.group.rank
    arriving = job.chunks if job.arriving is None else job.arriving
    sources = [(rank - distance) % p for distance in range(1, p)]
    dests = [(rank + distance) % p for distance in range(1, p)]
    inboxes = {source: Inbox(group, source, job.wires(arriving[source])) for source in sources}
    yield from _own(job, job.chunks[rank], arriving[rank])
    sends: list[Pending] = []
    for dest in dests:
        sends += yield from job.send(job.chunks[dest], [dest])
    for source in sources:
        for segment in arriving[source]:
            wire = yield from inboxes[source].receive()
            yield job.decode(segment, [wire])
    yield from sends


def _own(job: Job, chunk: Chunk, arriving: Chunk) -> Steps:
    """Encode the own chunk, and decode it to its place in the result."""
    if not chunk:
        return
    out = job.operands.out
    there = Window(out.array, out.offset + chunk[0][0] - arriving[0][0])
    own = replace(job, operands=replace(job.operands, out=there))
    for segment, wire in zip(chunk, job.wires(chunk), strict=True):
        yield own.encode(segment, wire, final=True)


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds of a pairwise exchange: p - 1 chunks out and in at once."""
    p = c.world.size
    chunk = c.n / p
    m = c.cut(chunk) * (p - 1)
    copy, wire = c.everybody(chunk)
    return c.latency + overlap((c.encode + c.decode) * c.n + 2 * copy + m * c.message, wire, m)


PAIRWISE = Algorithm("pairwise", {"alltoall": alltoall, "alltoallv": alltoall}, _cost, lambda *_: ONE_ENCODING)
