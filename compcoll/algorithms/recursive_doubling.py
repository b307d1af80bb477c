"""Recursive doubling: log2 p exchanges of the whole buffer with partners at distance 1, 2, 4 …

Between exchanges a rank keeps only its wire. Both partners decode the two wires, add them in the same order, and encode
the sum again, in one pass. After the last exchange the sum is stored without encoding, so a value is encoded log2 p
times. Each rank sends log2 p wires of the buffer.

If p is not a power of two, let r = p - 2^⌊log2 p⌋. The r even ranks below 2r first send their wire to the odd rank
above. That rank takes part for both and sends the last two wires back, from which the even rank computes the same sum.

R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19, 2005.
"""

from __future__ import annotations

import math

from ..layout import Segment
from ..pending import Pending, Steps
from .costs import Costs, overlap
from .job import Inbox, Job, receive_each
from .record import Algorithm, Encodings, Growth


def allreduce(job: Job) -> Steps:
    """Sum all ranks' buffers."""
    segments = [segment for chunk in job.chunks for segment in chunk]
    power = 1 << (job.group.size.bit_length() - 1)
    folded = job.group.size - power
    rank = job.group.rank
    if rank < 2 * folded and rank % 2 == 0:
        yield from _outside(job, segments, rank + 1)
    else:
        inside = rank // 2 if rank < 2 * folded else rank - folded
        yield from _inside(job, segments, inside, power, folded)


def _outside(job: Job, segments: list[Segment], partner: int) -> Steps:
    """Send this rank's values to the partner, and receive and sum the two wires of the last exchange."""
    results = [(job.wire(segment), job.wire(segment)) for segment in segments]
    arriving = Inbox(job.group, partner, [wire for pair in results for wire in pair])
    sends = yield from job.send(segments, [partner])
    for segment, pair in zip(segments, results, strict=True):
        for _ in pair:
            yield from arriving.receive()
        yield job.decode(segment, pair)
    yield from sends


def _inside(job: Job, segments: list[Segment], inside: int, power: int, folded: int) -> Steps:
    """Take part in all exchanges as rank ``inside`` of ``power`` ranks."""
    group = job.group
    partners = [inside ^ distance for distance in _distances(power)]
    ranks = [2 * partner + 1 if partner < folded else partner + folded for partner in partners]
    outsider = group.rank - 1 if inside < folded else None
    # Post every receive before the first encode, since partners may be ahead.
    inboxes = [Inbox(group, rank, job.wires(segments)) for rank in ranks]
    handed = None if outsider is None else Inbox(group, outsider, job.wires(segments))
    wires = job.wires(segments)
    sends: list[Pending] = []
    for segment, wire in zip(segments, wires, strict=True):
        terms = yield from receive_each([] if handed is None else [handed])
        yield job.encode(segment, wire, terms)
        sends.append(job.isend(segment, wire, ranks[0]))
    for exchange, distance in enumerate(_distances(power)):
        # Both partners add in the order of `inside`, so that they get the same bits.
        own_first = inside < partners[exchange]
        last = 2 * distance == power
        sums = [] if last else job.wires(segments)
        for index, segment in enumerate(segments):
            other = yield from inboxes[exchange].receive()
            pair = (wires[index], other) if own_first else (other, wires[index])
            if not last:
                share, team = 2 * distance, inside // (2 * distance)
                yield job.encode(segment, sums[index], pair, own=False, share=share, team=team)
                sends.append(job.isend(segment, sums[index], ranks[exchange + 1]))
                continue
            yield job.decode(segment, pair)
            if outsider is not None:
                sends += [job.isend(segment, wire, outsider) for wire in pair]
        wires = sums
    yield from sends


def _distances(power: int) -> list[int]:
    return [1 << exponent for exponent in range(power.bit_length() - 1)]


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds of recursive doubling: log2 p exchanges of the whole buffer, among p ranks, k on each node.

    The host needs h seconds for an exchange and the network w. Together they take ``α + max(h, w)``, and one segment's
    part of the shorter. Exchanges over a distance below k stay inside nodes; in the others all k ranks of a node share
    its link. If p is not a power of two, the buffer goes
    to a partner before, and two wires come back after.

    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    p, k = c.world.size, c.world.per_node
    m = c.cut(c.n)
    levels = p.bit_length() - 1
    seconds = 0.0
    host = c.encode * c.n
    for level in range(levels):
        far = c.world.nodes > 1 and 1 << level >= k
        wire = c.between * c.n * c.shrink * k if far else 0.0
        copy = 0.0 if far else c.inside * c.n * c.shrink
        seconds += (c.latency if far else c.inside_latency) + overlap(host + copy + m * c.message, wire, m)
        host = c.recode * c.n
    seconds += c.accumulate * c.n
    if p != 1 << levels:
        copy, wire = c.neighbours(c.n)
        seconds += 2 * c.latency + overlap(c.encode * c.n + copy + m * c.message, wire, m)
        seconds += overlap(2 * (copy + m * c.message), 2 * wire, m)
    return seconds


def encodings(collective: str, ranks: int, nodes: int) -> Encodings:
    """Return the numbers of encodings: one on each level by each team of ranks that has the same partial sum."""
    power = 1 << (ranks.bit_length() - 1)
    return Encodings((ranks - 1).bit_length(), 2 * power - 2 + ranks - power)


def growth(collective: str, ranks: int, nodes: int, again: float) -> Growth:
    """Return the growth of the error, ``√(log2 p)``: each of log2 p levels encodes all terms once."""
    levels = (ranks - 1).bit_length()
    return Growth(
        math.sqrt(sum((1 + again) ** level for level in range(levels))),
        math.sqrt(ranks) * sum(2 ** (-level / 2) for level in range(levels)),
    )


RECURSIVE_DOUBLING = Algorithm(
    "recursive_doubling",
    {"allreduce": allreduce},
    _cost,
    encodings,
    growth,
    symmetry="exclusive",
)
