"""Ring: each rank exchanges messages only with its two neighbours.

Reduce-scatter, p-1 steps: the partial sum of a chunk travels to the right and each rank adds its own values. One pass
decodes, adds and encodes, without storing the partial sum. Allgather, p-1 steps: the owner encodes its finished chunk
once, and the other ranks forward the wire unchanged. Each rank sends 2(p-1)/p of the buffer's wire; a value is encoded
p times on its way.

P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009;
Q. Zhou et al., "Accelerating MPI AllReduce Communication with Efficient GPU-Based Compression Schemes on Modern GPU
Clusters", ISC 2024, for compression within the collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain

from ..layout import Segment
from ..pending import Pending, Steps
from ..transports.base import Wire
from .costs import Costs
from .job import Inbox, Job
from .linear import ToRoot
from .record import KEPT, ONE_ENCODING, REDUCTIONS, Algorithm, Encodings, Growth, growth_at_root


def allreduce(job: Job) -> Steps:
    """Sum all ranks' buffers: reduce-scatter, then allgather."""
    phase = _Allgather(job)
    yield from _reduce_scatter(job, lambda segment, arrived: job.finish(segment, phase.send, [arrived]))
    yield from phase.forward()


def reduce_scatter(job: Job) -> Steps:
    """Sum all ranks' buffers; rank r keeps chunk r. The last sum is not encoded."""

    def finish(segment: Segment, arrived: Wire) -> Steps:
        yield job.decode(segment, [arrived], own=True)

    yield from _reduce_scatter(job, finish)


def reduce(job: Job) -> Steps:
    """Sum all ranks' buffers on rank 0: reduce-scatter, then all other ranks send it their encoded chunks."""
    phase = ToRoot(job, job.group.next_phase())
    yield from _reduce_scatter(job, lambda segment, arrived: phase.finish(segment, [arrived]))
    yield from phase.collect()


def allgather(job: Job) -> Steps:
    """Gather all ranks' chunks; rank r decodes its own wire, too, so that all ranks get the same bits."""
    phase = _Allgather(job)
    for segment in job.chunks[job.group.rank]:
        yield from job.finish(segment, phase.send)
    yield from phase.forward()


def _reduce_scatter(job: Job, finish: Callable[[Segment, Wire], Steps]) -> Steps:
    """Sum each chunk: chunk k starts at rank k+1 and travels right to its owner, rank k.

    The owner calls ``finish`` on each segment.
    """
    group, p, rank = job.group, job.group.size, job.group.rank
    right, left = (rank + 1) % p, (rank - 1) % p
    route = [job.chunks[(rank - 2 - step) % p] for step in range(p - 1)]
    arriving = Inbox(group, left, job.wires(chain(*route)), ahead=2 * max(map(len, job.chunks)))
    sends = yield from job.send(job.chunks[left], [right])
    for chunk in route[:-1]:
        for segment, wire in zip(chunk, job.wires(chunk), strict=True):
            arrived = yield from arriving.receive()
            yield job.encode(segment, wire, [arrived])
            sends.append(job.isend(segment, wire, right))
    for segment in route[-1]:
        arrived = yield from arriving.receive()
        yield from finish(segment, arrived)
    yield from sends


class _Allgather:
    """The allgather phase: rank r receives chunk r-1 from the left, then chunk r-2 and so on.

    The constructor posts the receives, before the reduce-scatter phase: the left neighbour may be one phase ahead.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group = job.group.next_phase()
        p, rank = self._group.size, self._group.rank
        self._right = (rank + 1) % p
        self._route = [job.chunks[(rank - step) % p] for step in range(1, p)]
        wires = job.wires(chain(*self._route))
        self._arriving = Inbox(self._group, (rank - 1) % p, wires, ahead=max(map(len, job.chunks)))
        self._sends: list[Pending] = []

    def send(self, segment: Segment, wire: Wire) -> None:
        """Send a wire to the right."""
        self._sends.append(self._job.isend(segment, wire, self._right, self._group))

    def forward(self) -> Steps:
        """Forward each wire unchanged, except to its owner, and decode it while it is sent."""
        for step, chunk in enumerate(self._route):
            for segment in chunk:
                wire = yield from self._arriving.receive()
                if step < len(self._route) - 1:
                    self.send(segment, wire)
                yield self._job.decode(segment, [wire])
        yield from self._sends


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds of the ring: p - 1 steps in each phase.

    A step takes the time of m segments on the slower of host and wire, ``m max(h, w)``, but at least the time in which
    one segment is processed and reaches the next rank, ``h + w + α``. Reduce-scatter: h is the time to recode, and the
    first segment is encoded before. Allgather: a rank forwards a segment before it decodes it. So a segment passes a
    rank in ``w + α`` and its decoding counts once; the last segment is decoded at the end.

    P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
    """
    p = c.world.size
    chunk = c.n if collective in ("allgather", "allgatherv") else c.n / p
    m = c.cut(chunk)
    part = chunk / m
    copy, wire = c.neighbours(part)
    seconds = 0.0
    if collective in REDUCTIONS:
        host = c.recode * part + c.message + copy
        step = max(m * max(host, wire), host + wire + c.latency)
        seconds += c.encode * part + (p - 1) * step
    if collective == "reduce":
        return seconds + c.at_root(chunk, c.decode)
    if collective != "reduce_scatter":
        host = c.decode * part + c.message + copy
        step = max(m * max(host, wire), c.message + copy + wire + c.latency)
        seconds += (p - 1) * step + c.decode * part + (0 if collective == "allreduce" else c.encode * part)
    return seconds


def _encodings(collective: str, ranks: int, nodes: int) -> Encodings:
    if collective in ("allreduce", "reduce"):
        return Encodings(ranks, ranks)
    return Encodings(ranks - 1, ranks - 1) if collective == "reduce_scatter" else ONE_ENCODING


def _growth(collective: str, ranks: int, nodes: int, again: float) -> Growth:
    """Return ``√((p + 1) / 2)``: partial sums of 1 … p terms are encoded (1 … p - 1 for a reduce_scatter)."""
    if collective not in REDUCTIONS:
        return KEPT
    if collective == "reduce":
        return growth_at_root(_growth, ranks, nodes, again)
    encodings = _encodings(collective, ranks, nodes).levels
    return Growth(_along(encodings, ranks, again), 2 / 3 * ranks, recoded=True)


def _along(encodings: int, terms: int, again: float) -> float:
    """Return the factor of the error when partial sums of 1, 2, 3 … terms are encoded one after the other.

    Parameters
    ----------
    encodings, terms : int
        The number of encodings, and the number of terms of the result.
    again : float
        As in `Algorithm.growth`.
    """
    variance = 0.0  # in units of ε²
    for j in range(1, encodings + 1):
        variance += j + again * variance
    return math.sqrt(variance / terms)


RING = Algorithm(
    "ring",
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
    symmetry="rotation",
)
