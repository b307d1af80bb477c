"""Pairwise exchange: every rank sends every other rank its chunk, to the nearest ranks first."""

from __future__ import annotations

from ..pending import Pending, Steps
from .costs import Costs, overlap
from .job import Inbox, Job
from .record import ONE_ENCODING, Algorithm


def alltoall(job: Job) -> Steps:
    """Send chunk k of ``x`` to rank k; chunk r of ``out`` comes from rank r. The own chunk is encoded, too."""
    group, p, rank = job.group, job.group.size, job.group.rank
    sources = [(rank - distance) % p for distance in range(1, p)]
    dests = [(rank + distance) % p for distance in range(1, p)]
    inboxes = {source: Inbox(group, source, job.wires(job.chunks[source])) for source in sources}
    for segment, wire in zip(job.chunks[rank], job.wires(job.chunks[rank]), strict=True):
        yield job.encode(segment, wire, final=True)
    sends: list[Pending] = []
    for dest in dests:
        sends += yield from job.send(job.chunks[dest], [dest])
    for source in sources:
        for segment in job.chunks[source]:
            wire = yield from inboxes[source].receive()
            yield job.decode(segment, [wire])
    yield from sends


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds of a pairwise exchange: p - 1 chunks out and in at once."""
    p = c.world.size
    chunk = c.n / p
    m = c.cut(chunk) * (p - 1)
    copy, wire = c.everybody(chunk)
    return c.latency + overlap((c.encode + c.decode) * c.n + 2 * copy + m * c.message, wire, m)


PAIRWISE = Algorithm("pairwise", {"alltoall": alltoall}, _cost, lambda *_: ONE_ENCODING)
