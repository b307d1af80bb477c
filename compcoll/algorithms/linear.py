"""Linear: the root exchanges one stream of messages with every other rank.

A block travels to or from the root directly, so it is encoded once. The root encodes and decodes its own block, too, so
that all values have the codec's error alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Segment
from ..pending import Pending, Steps
from ..transports.base import Group, Wire
from .costs import Costs
from .job import Inbox, Job, decode_all
from .record import ONE_ENCODING, Algorithm


class ToRoot:
    """The phase in which rank 0 of a group, the root, receives the chunks of all ranks.

    The constructor posts the root's receives, before an earlier phase begins.
    """

    def __init__(self, job: Job, group: Group) -> None:
        self._job, self._group = job, group
        sources = range(1, group.size) if group.rank == 0 else ()
        self._inboxes = {source: Inbox(group, source, job.wires(job.chunks[source])) for source in sources}
        self._sends: list[Pending] = []

    def send(self, segment: Segment, terms: Sequence[Wire] = ()) -> Steps:
        """Encode a segment of this rank's chunk, ``x`` plus ``terms``, and send it to the root."""
        wire = self._job.wire(segment)
        yield self._job.encode(segment, wire, terms)
        self._sends.append(self._job.isend(segment, wire, 0, self._group))

    def finish(self, segment: Segment, terms: Sequence[Wire]) -> Steps:
        """Finish a segment of this rank's sum, ``x`` plus ``terms``: the root keeps it, the others send it."""
        if self._group.rank == 0:
            yield self._job.decode(segment, terms, own=True)
        else:
            yield from self.send(segment, terms)

    def collect(self) -> Steps:
        """Decode the wires of all other ranks at the root."""
        yield from decode_all(self._job, self._inboxes)
        yield from self._sends


def gather(job: Job) -> Steps:
    """Gather the chunks of all ranks on rank 0."""
    phase = ToRoot(job, job.group)
    for segment in job.chunks[job.group.rank]:
        if job.group.rank == 0:
            yield job.encode(segment, job.wire(segment), final=True)
        else:
            yield from phase.send(segment)
    yield from phase.collect()


def scatter(job: Job) -> Steps:
    """Send chunk r of rank 0's ``x`` to rank r."""
    group, own = job.group, job.chunks[job.group.rank]
    wires, sends = job.wires(own), list[Pending]()
    if group.rank:
        inbox = Inbox(group, 0, wires)
        for segment in own:
            wire = yield from inbox.receive()
            yield job.decode(segment, [wire])
        return
    for index in range(max(len(chunk) for chunk in job.chunks)):
        for dest in range(1, group.size):
            sends += yield from job.send(job.chunks[dest][index : index + 1], [dest])
    for segment, wire in zip(own, wires, strict=True):
        yield job.encode(segment, wire, final=True)
    yield from sends


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds of p - 1 blocks to or from the root at once.

    At the other end, only the first segment of a gather, or the last one of a scatter, is not overlapped.
    """
    gathers = collective == "gather"
    block = c.n if gathers else c.n / c.world.size
    root, other = (c.decode, c.encode) if gathers else (c.encode, c.decode)
    return other * block / c.cut(block) + c.at_root(block, root, (c.encode + c.decode) * block)


LINEAR = Algorithm("linear", {"gather": gather, "scatter": scatter}, _cost, lambda *_: ONE_ENCODING)
