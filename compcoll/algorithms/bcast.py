"""Binomial tree broadcast: log2 p levels; the root encodes once, and the other ranks forward the wire unchanged.

Ranks are counted from the root. Rank d receives from the rank whose number is d without its lowest set bit, and sends
to the ranks d plus one lower bit. The root decodes its own wire, too, so that all ranks get the same bits.
"""

from __future__ import annotations

from ..pending import Pending, Steps
from .costs import Costs, overlap
from .job import Inbox, Job
from .record import ONE_ENCODING, Algorithm


def bcast(job: Job) -> Steps:
    """Send the buffer of the group's rank 0 to all ranks."""
    p, rank = job.group.size, job.group.rank
    lowest = rank & -rank if rank else 1 << p.bit_length()
    children = [rank + step for step in _lower_powers(lowest) if rank + step < p]
    segments = [segment for chunk in job.chunks for segment in chunk]
    wires = job.wires(segments)
    arriving = Inbox(job.group, rank - lowest, wires) if rank else None
    sends: list[Pending] = []
    for segment, wire in zip(segments, wires, strict=True):
        if arriving is None:
            yield job.encode(segment, wire, final=True)
        else:
            wire = yield from arriving.receive()
        sends += [job.isend(segment, wire, child) for child in children]
        if arriving is not None:
            yield job.decode(segment, [wire])
    yield from sends


def _lower_powers(bit: int) -> list[int]:
    """Return the powers of two below ``bit``, largest first."""
    return [1 << exponent for exponent in reversed(range(bit.bit_length() - 1))]


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds of a binomial tree.

    The root encodes once and sends the buffer log2 p times. A segment takes log2 p hops to the last rank.
    """
    levels = (c.world.size - 1).bit_length()
    m = c.cut(c.n)
    copy, wire = c.neighbours(c.n)
    root = overlap(c.encode * c.n + levels * (copy + m * c.message), levels * wire, m)
    return root + levels * (c.latency + (copy + wire + c.decode * c.n) / m)


BINOMIAL = Algorithm("binomial", {"bcast": bcast}, _cost, lambda *_: ONE_ENCODING)
