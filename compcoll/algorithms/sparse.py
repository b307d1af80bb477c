"""Allreduces of sparse contributions: indices and values, whose number is different on every rank.

* ``sparse_ring``: every rank's wire goes around a ring (allgatherv), and every rank adds all wires. A rank sends p - 1
  wires, so this is for few ranks.
* ``sparse_native``: the same by MPI's allgatherv.
* ``sparse_direct``: the buffer is cut into p regions with about equally many of the sent elements. Rank r adds all
  ranks' elements of region r. All regions together keep as many sums as one rank sends; each region keeps its largest
  ones, in proportion, and these go around the ring. A rank sends about two wires for any p. The other sums are added to
  the owner's feedback.

S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022 (Ok-Topk), for the last.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..codecs.base import Array
from ..codecs.sparse.sparsifier import Chosen, SparseCoder, SparseSum
from ..errors import WireCorrupted
from ..feedback import ErrorFeedback
from ..layout import Segment, segments
from ..pending import OrderingTicket, Pending, Steps
from ..stats import DECODE, ENCODE, Stats
from ..transports.base import Group, Wire
from . import native
from .costs import Costs, overlap
from .gather import gather
from .job import Inbox, Timed
from .record import Algorithm, Encodings

SPARSE_RING = "sparse_ring"

_LENGTH = struct.Struct("<Q")
_AHEAD = 8  # receives posted beyond the one waited for

Part = tuple[Array, Array]
"""Indices and values."""


@dataclass
class SparseJob:
    """Everything that one sparse allreduce needs on one rank.

    Attributes
    ----------
    group : Group
        The ranks.
    coder : SparseCoder
        Selects, encodes and decodes elements.
    x : array
        This rank's values, flat.
    out : array
        The memory of the dense sum, flat; may be ``x``.
    scale : float
        Factor of the values.
    feedback : ErrorFeedback or None
        The caller's state.
    allocate : callable
        Takes a number of bytes and returns memory.
    stats : Stats
        Counts seconds and bytes.
    block : int
        Most bytes of a message.
    start : callable, optional
        Starts MPI's nonblocking allgatherv; takes this rank's bytes, memory for all ranks' bytes, and their lengths.
    ticket : OrderingTicket or None
        The ticket of that allgatherv.
    parts : dict
        The elements of each region of the result, or of each rank's contribution, by the rank that sent them.
    zeros : array or None
        The array to which the elements are added, if the result is dense.
    """

    group: Group
    coder: SparseCoder
    x: Array
    out: Array
    scale: float
    feedback: ErrorFeedback | None
    allocate: Callable[[int], Array]
    stats: Stats
    block: int
    start: Callable[[Array, Array, Sequence[int]], Pending] | None = None
    ticket: OrderingTicket | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    zeros: Array | None = None

    @property
    def n(self) -> int:
        """The number of elements of the buffer."""
        return int(self.x.size)

    def select(self) -> Chosen:
        """Select the elements that this rank sends."""
        with Timed(self.stats, ENCODE):
            chosen = self.coder.select(self.n, self.x, self.scale, self.feedback)
        self.stats.wire_format = chosen.formats
        return chosen

    def wire(self, chosen: Chosen) -> Wire:
        """Encode the elements that this rank sends."""
        with Timed(self.stats, ENCODE):
            wire = Wire(self.allocate(self.coder.nbytes_of(chosen)))
            self.coder.write(chosen, 0, chosen.n, wire.buffer)
        return wire

    def settle(self, sent: Part) -> None:
        """Update the feedback with the elements that this rank has sent."""
        if self.feedback is not None:
            with Timed(self.stats, ENCODE):
                self.coder.settle(self.feedback, *sent)

    def read(self, rank: int, wire: Wire, n: int, offset: int = 0) -> None:
        """Decode a rank's wire of the ``n`` elements from ``offset`` on."""
        with Timed(self.stats, DECODE):
            indices, values = self.coder.read(wire.content, n)
            self.parts[rank] = (indices + indices.dtype.type(offset) if offset else indices, values)

    def make_room(self, help_on: Callable[[], None]) -> None:
        """Clear the memory of a dense sum while messages travel, and call ``help_on`` to advance them."""
        if self.coder.sparsifier.out_format == "dense":
            with Timed(self.stats, DECODE):
                self.zeros = self.coder.zeros_for(self.out, help_on)

    def account(self, nbytes: int, elements: float) -> None:
        """Count ``nbytes`` sent bytes, which stand for ``elements`` uncompressed elements."""
        self.stats.wire_nbytes += nbytes
        self.stats.raw_sent_nbytes += int(elements * self.x.itemsize)

    def finish(self) -> list[Part]:
        """Return the contributions in the order of the ranks."""
        return [self.parts[rank] for rank in range(self.group.size)]


def sparse_ring(job: SparseJob) -> Steps:
    """Sum by an allgatherv around a ring."""
    return (yield from _around_whole(job, *(yield from _contribute(job, job.select()))))


def _around_whole(job: SparseJob, own: Wire, lengths: Sequence[int]) -> Steps:
    """Send all ranks' wires of the whole buffer around a ring, and decode them."""
    return _around(job, job.group.next_phase(), own, lengths, [(0, job.n)] * job.group.size)


def _around(job: SparseJob, group: Group, own: Wire, lengths: Sequence[int], regions: Sequence[Segment]) -> Steps:
    """Send all ranks' wires around a ring, and decode each as the elements of its region.

    Wires travel in blocks, so that a long wire delays no rank for its whole length.
    """
    p, rank = group.size, group.rank
    right, left = (rank + 1) % p, (rank - 1) % p
    route = [(rank - step) % p for step in range(1, p)]
    wires = [own if source == rank else Wire(job.allocate(nbytes)) for source, nbytes in enumerate(lengths)]
    parts = [[Wire(wire.buffer[begin:end]) for begin, end in segments(0, wire.nbytes, job.block)] for wire in wires]
    arriving = Inbox(group, left, [part for source in route for part in parts[source]], ahead=_AHEAD)
    sends: list[Pending] = []

    def forward(source: int, part: Wire) -> None:
        begin, end = regions[source]
        job.account(part.nbytes, (end - begin) * part.nbytes / lengths[source])
        sends.append(group.isend(part, right))

    def help_on() -> None:
        if sends and sends[0].Test():
            del sends[0]

    if p > 1:
        for part in parts[rank]:
            forward(rank, part)
    job.make_room(help_on)
    for source in route:
        for _ in parts[source]:
            part = yield from arriving.receive()
            if source != right:
                forward(source, part)
        begin, end = regions[source]
        job.read(source, wires[source], end - begin, begin)
    yield from sends
    return job.finish()


def sparse_native(job: SparseJob) -> Steps:
    """Sum by MPI's allgatherv."""
    own, lengths = yield from _contribute(job, job.select())
    start = job.start
    assert start is not None and job.ticket is not None
    if sum(lengths) > native.MOST:
        job.ticket.used, job.stats.algorithm = True, SPARSE_RING
        return (yield from _around_whole(job, own, lengths))
    everybody, begin = job.allocate(sum(lengths)), 0
    started = start(own.content, everybody, lengths)
    over = False

    def help_on() -> None:
        nonlocal over
        over = over or started.Test()

    job.make_room(help_on)
    job.ticket.used = True
    if not over:
        yield started
    # MPI does not report a rank's bytes. Every wire must reach p - 1 ranks, which is this much per rank on average.
    p = job.group.size
    job.account(round((p - 1) / p * sum(lengths)), (p - 1) * job.n)
    for rank, nbytes in enumerate(lengths):
        job.read(rank, Wire(everybody[begin : begin + nbytes]), job.n)
        begin += nbytes
    return job.finish()


def _contribute(job: SparseJob, chosen: Chosen) -> Steps:
    """Encode this rank's wire, and return it with the lengths of all ranks' wires."""
    own = job.wire(chosen)
    job.read(job.group.rank, own, job.n)
    job.settle(job.parts[job.group.rank])
    lengths = yield from _lengths(job, job.group, own.nbytes, [job.coder.longest(job.n)] * job.group.size)
    return own, lengths


def _lengths(job: SparseJob, group: Group, own: int, most: Sequence[int]) -> Steps:
    """Gather the lengths of all ranks' wires, and refuse lengths that no encoder writes before memory is allocated."""
    packed = yield from gather(group, _LENGTH.pack(own))
    lengths = [_LENGTH.unpack(text)[0] for text in packed]
    for rank, (nbytes, longest) in enumerate(zip(lengths, most, strict=True)):
        if nbytes > longest:
            raise WireCorrupted(f"rank {rank} announced a sparse wire of {nbytes} bytes: it cannot exceed {longest}")
    return lengths


def sparse_direct(job: SparseJob) -> Steps:
    """Sum by regions that are spread over the ranks, then gather the regions' sums."""
    group, coder, rank, p = job.group, job.coder, job.group.rank, job.group.size
    chosen = job.select()
    count = int(chosen.indices.size)
    bounds, counts = yield from _regions(job, chosen)
    lengths = [end - begin for begin, end in bounds]
    if max(coder.longest(length, max(counts)) for length in lengths) > native.MOST:  # too long for one message
        job.stats.algorithm = SPARSE_RING
        return (yield from _around_whole(job, *(yield from _contribute(job, chosen))))

    # Send the elements of each region to its owner.
    parts_group = group.next_phase()
    others = [(rank + distance) % p for distance in range(1, p)]
    arriving = {}
    for source in reversed(others):
        wire = Wire(job.allocate(coder.longest(lengths[rank], counts[source])), exact=False)
        arriving[source] = (parts_group.irecv(wire, source), wire)
    sends: list[Pending] = []
    for dest in [*others, rank]:
        with Timed(job.stats, ENCODE):
            wire = Wire(job.allocate(coder.longest(lengths[dest], count)), exact=False)
            wire.nbytes = coder.write(chosen, bounds[dest][0], bounds[dest][1], wire.buffer)
        if dest == rank:
            job.read(rank, wire, lengths[rank])
        else:
            job.account(wire.nbytes, lengths[dest])
            sends.append(parts_group.isend(wire, dest))
    job.settle(coder.sent(chosen))
    for source, (arrival, wire) in arriving.items():
        yield arrival
        job.read(source, wire, lengths[rank])

    # Sum the own region. All regions together keep as many elements as one rank sends, each region in proportion.
    with Timed(job.stats, DECODE):
        merged = coder.kernels.merged(job.finish())
    sums_group = parts_group.next_phase()
    packed = yield from gather(sums_group, _LENGTH.pack(merged[0].size))
    everything, most = sum(_LENGTH.unpack(text)[0] for text in packed), max(counts)
    with Timed(job.stats, ENCODE):
        region, left = coder.reduced(merged, lengths[rank], -(-merged[0].size * most // max(everything, most, 1)))
        if job.feedback is not None and left is not None:
            indices, values = left
            job.feedback.returned(coder.kernels, indices + indices.dtype.type(bounds[rank][0]), values)
    own = job.wire(region)
    nbytes = yield from _lengths(job, sums_group, own.nbytes, [coder.longest(length) for length in lengths])
    job.read(rank, own, lengths[rank], bounds[rank][0])
    parts = yield from _around(job, sums_group.next_phase(), own, nbytes, bounds)
    yield from sends
    return parts


def _regions(job: SparseJob, chosen: Chosen) -> Steps:
    """Return regions with about equally many elements, the same on all ranks, and the number of elements of each rank.

    For one rank alone the regions would begin at the quantiles of its indices. All ranks use the mean of these.
    """
    p, n = job.group.size, job.n
    shape = struct.Struct(f"<{p}Q")
    packed = yield from gather(job.group, shape.pack(*job.coder.quantiles(chosen, p), chosen.indices.size))
    known = [shape.unpack(text) for text in packed]
    counts = [line[-1] for line in known]
    if any(number > n for line in known for number in line):
        raise WireCorrupted(f"some rank announced elements beyond the {n} of the buffer: {known}")
    inner = [sum(line[cut] for line in known) // p for cut in range(p - 1)]
    edges = [0, *inner, n]
    if any(begin > end for begin, end in pairwise(edges)):
        raise WireCorrupted(f"some rank announced regions out of order: {known}")
    return list(pairwise(edges)), counts


def _ring_cost(c: Costs, collective: str) -> float:
    """Predict the seconds of all ranks' sparse wires around a ring, in blocks, and their sum.

    These are the selection, the lengths in log2 p small messages, ``(p - 1) α + p W β`` for the wires, which all pass
    every link, and the addition of p wires to zeros. If bytes dominate, wires of W = n / c bytes are ``2 (p - 1) c /
    p²`` times as fast as the uncompressed ring, which takes ``2 (p - 1) / p · n β``.

    Y. Tsuzuku et al., "Variance-based Gradient Compression for Efficient Distributed Deep Learning", ICLR 2018
    workshop, section 5.
    """
    p = c.world.size
    copy, wire = c.neighbours(c.n)
    return _ends(c, p * c.n) + (p - 1) * c.latency + max((p - 1) * c.message + p * copy, p * wire)


def _native_cost(c: Costs, collective: str) -> float:
    """Predict the seconds of the same wires with MPI's allgatherv."""
    p = c.world.size
    copy, wire = c.neighbours(c.n)
    return _ends(c, p * c.n) + min(p - 1, 2 * (p - 1).bit_length()) * c.latency + (p - 1) * max(copy, wire)


def _direct_cost(c: Costs, collective: str) -> float:
    """Predict the seconds of regions: ``2 (p - 1) / p · W β`` in all for the wires.

    A p-th of the wire goes to each owner, which merges p - 1 of them; then a p-th of a wire from each rank goes around
    a ring.

    S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.
    """
    p = c.world.size
    copy, wire = c.everybody(c.n / p)
    scatter = c.latency + overlap(2 * (p - 1) * c.message + copy, wire, p - 1)
    copy, wire = c.neighbours(c.n / p)
    lengths = (p - 1).bit_length() * (c.latency + c.message)
    merged = _MERGED * c.n * c.shrink * c.add + c.encode * c.n / p
    return _ends(c, 2 * c.n) + lengths + scatter + merged + (p - 1) * (c.latency + max(copy + c.message, wire))


_MERGED = 20.0  # time to merge sorted lists, relative to adding as many bytes of a dense buffer


def _ends(c: Costs, added: float) -> float:
    """Return the seconds of selection, lengths, zeros, and sums of wires of ``added`` bytes of values."""
    return (
        c.encode * c.n
        + (c.world.size - 1).bit_length() * (c.latency + c.message)
        + c.decode * c.n
        + (4 * added * c.shrink * c.add)
    )


def _once(collective: str, ranks: int, nodes: int) -> Encodings:
    return Encodings(1, ranks)


def _twice(collective: str, ranks: int, nodes: int) -> Encodings:
    return Encodings(2, ranks + 1)


ALL = (
    Algorithm(SPARSE_RING, {"allreduce": sparse_ring}, _ring_cost, _once),
    Algorithm("sparse_native", {"allreduce": sparse_native}, _native_cost, _once, by_mpi=True),
    Algorithm("sparse_direct", {"allreduce": sparse_direct}, _direct_cost, _twice),
)

_STEPS = {record.name: record.steps["allreduce"] for record in ALL}


def allreduce(algorithm: str, job: SparseJob, result: Any) -> Steps:
    """Run one of the sparse allreduces. Return its `SparseSum`, or None if the sum is dense.

    Parameters
    ----------
    algorithm : str
        The name of an algorithm in `ALL`.
    job : SparseJob
        Buffers, coder and communication.
    result : array
        The dense result, in the caller's shape and element type.
    """
    parts = yield from _STEPS[algorithm](job)
    with Timed(job.stats, DECODE):
        if job.zeros is not None:
            job.coder.store(parts, job.zeros, job.out)
            return None
        indices, values = job.coder.kernels.merged(parts)
        return SparseSum(indices, job.coder.stored(values), result.shape)
