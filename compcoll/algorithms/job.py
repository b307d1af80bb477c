"""One collective on one rank: the buffers, codec and communication that its algorithm uses."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from ..codecs.base import Array, Coders
from ..gpu.streams import Timeline
from ..host.encode_options import EncodeOptions
from ..layout import Chunk, Segment
from ..pending import Pending, Steps
from ..stats import DECODE, ENCODE, Stats
from ..transports.base import Group, Wire


class Timed:
    """A context that adds the seconds of its block to an attribute of statistics, and a span if they have spans.

    Parameters
    ----------
    stats : Stats
        The statistics.
    kind : {"encode", "decode"}
        The kind of the block. The attribute is ``kind_seconds``.
    nbytes : int
        Uncompressed bytes that the block encodes or decodes; 0 if they are not known.
    """

    def __init__(self, stats: Stats, kind: str, nbytes: int = 0) -> None:
        self._stats, self._kind, self._nbytes = stats, kind, nbytes

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(self, *error: object) -> None:
        ended, attribute = perf_counter(), f"{self._kind}_seconds"
        setattr(self._stats, attribute, getattr(self._stats, attribute) + ended - self._started)
        if self._stats.spans is not None:
            self._stats.spans.append((self._kind, self._started, ended, self._nbytes, ""))


@dataclass
class Window:
    """A part of a longer buffer: ``array[0]`` is element ``offset``."""

    array: Array
    offset: int = 0

    def __getitem__(self, segment: Segment) -> Array:
        begin, end = segment
        return self.array[begin - self.offset : end - self.offset]


@dataclass
class Operands:
    """The values of a collective on this rank.

    Attributes
    ----------
    x, out : Window
        This rank's values and the memory of the result.
    itemsize : float
        Bytes of an element, uncompressed.
    scale : float
        Factor of this rank's values. It is 1/p for a mean, so that partial sums of 16-bit floats cannot overflow.
    residual : Window or None
        The residual of error feedback.
    rng_counter : int
        For codecs that round at random: the collective's number in the upper 32 bits, this rank in the lower ones.
    """

    x: Window
    out: Window
    itemsize: float
    scale: float = 1.0
    residual: Window | None = None
    rng_counter: int = 0


@dataclass
class Job:
    """Everything that an algorithm needs to run one collective on one rank.

    Attributes
    ----------
    group : Group
        The ranks that take part, and a tag. If there is a root, it is rank 0 of the group. The collective may use
        four tags: this one, the next (`Group.next_phase`), and ``tag + 2`` and ``tag + 3`` by groups of its own.
    coders : Coders
        Encode and decode.
    operands : Operands
        This rank's values and the result.
    chunks : sequence of Chunk
        The chunks of the whole buffer, each a tuple of segments, ``(begin, end)`` in elements. A chunk may be empty.
        Chunk r belongs to rank r of the group. An allreduce of an algorithm that is not ``chunked``, and a broadcast,
        have a single chunk.
    allocate : callable
        Takes a number of bytes and returns memory for wires.
    stats : Stats
        Counts seconds and bytes.
    timeline : Timeline or None
        For a device that runs kernels asynchronously: orders kernels and messages.
    cut : callable or None
        Takes a number and cuts the buffer into that many chunks, for an algorithm that needs more or fewer than
        ``chunks`` has. Every allreduce has it, other collectives do not. Chunks begin at multiples of the codec's
        block, so boundaries of different cuts need not coincide.
    arriving : sequence of Chunk or None
        In an alltoallv, the chunks of the result: chunk r comes from rank r, and ``chunks`` are those of ``x``.
    homomorphic : bool
        As of the codec.
    """

    group: Group
    coders: Coders
    operands: Operands
    chunks: Sequence[Chunk]
    allocate: Callable[[int], Array]
    stats: Stats
    timeline: Timeline | None = None
    cut: Callable[[int], tuple[Chunk, ...]] | None = None
    arriving: Sequence[Chunk] | None = None
    homomorphic: bool = False

    def uncompressed(self) -> Job:
        """Return the same job without compression, and so without a residual."""
        return replace(self, coders=self.coders.uncompressed(), operands=replace(self.operands, residual=None))

    def in_place(self, **changes: Any) -> Job:
        """Return a job for a later phase: its values are those in ``out``, which are already scaled."""
        return replace(self, operands=replace(self.operands, x=self.operands.out, scale=1.0), **changes)

    def wire(self, segment: Segment) -> Wire:
        """Allocate the wire of one segment."""
        coder = self.coders.coder
        nbytes, exact = coder.wire_nbytes(segment[1] - segment[0]), coder.fixed_size
        wire = Wire(self.allocate(nbytes), exact=exact)
        if self.timeline is not None and self.timeline.stage is not None:
            wire.staging = Wire(self.timeline.stage(nbytes), exact=exact)
        return wire

    def wires(self, chunk: Iterable[Segment]) -> list[Wire]:
        """Allocate the wires of some segments."""
        return list(map(self.wire, chunk))

    def encode(
        self,
        segment: Segment,
        wire: Wire,
        terms: Sequence[Wire] = (),
        *,
        own: bool = True,
        final: bool = False,
        share: int = 1,
        team: int = 0,
    ) -> Pending | None:
        """Encode a segment: ``x`` (if ``own``) plus the decoded ``terms``. A device does so before the send starts.

        ``final`` also stores the decoded wire in ``out``. ``share`` is 1 if no other rank encodes the same partial sum.
        Otherwise it is the number of ranks, the ``team``, that do. Each of them keeps 1/``share`` of the residual, and
        all use the same random numbers.
        """
        operands = self.operands
        of_team = operands.rng_counter >> 32 << 32 | share.bit_length() << 26 | team
        how = EncodeOptions(
            residual=operands.residual[segment] if operands.residual else None,
            feed=own,
            residual_scale=1.0 / share,
            decoded=operands.out[segment] if final else None,
            scale=operands.scale,
            rng_counter=operands.rng_counter if share == 1 else of_team,
            position=segment[0],
        )
        with Timed(self.stats, ENCODE, self._nbytes(segment)):
            if self.timeline is not None:
                self.timeline.encoding(terms, of_result=operands.x.array is operands.out.array)
            x, contents = operands.x[segment] if own else None, [term.content for term in terms]
            wire.nbytes = self.coders.coder.encode(segment[1] - segment[0], x, contents, wire.buffer, how)
            if self.timeline is not None:
                self.timeline.encoded(wire)
        return None

    def decode(self, segment: Segment, terms: Sequence[Wire], *, own: bool = False) -> Pending | None:
        """Store the sum of the decoded ``terms``, plus ``x`` if ``own``, in ``out``.

        A device does so asynchronously, before the collective ends.
        """
        operands = self.operands
        if own and self.homomorphic and operands.residual is not None:
            # Adding ``x`` rounds it, and only encoding keeps what that loses.
            return self.encode(segment, self.wire(segment), terms, final=True)
        with Timed(self.stats, DECODE, self._nbytes(segment)):
            if self.timeline is not None:
                self.timeline.decoding(terms, adding=own)
            x, contents = operands.x[segment] if own else None, [term.content for term in terms]
            self.coders.coder.decode(segment[1] - segment[0], x, contents, operands.out[segment], scale=operands.scale)
        return None

    def isend(self, segment: Segment, wire: Wire, dest: int, group: Group | None = None) -> Pending:
        """Start sending the wire of a segment, in the job's group unless ``group`` is given."""
        self.stats.wire_nbytes += wire.nbytes
        self.stats.raw_sent_nbytes += self._nbytes(segment)
        return (group or self.group).isend(wire, dest)

    def _nbytes(self, segment: Segment) -> int:
        """Return the uncompressed bytes of a segment."""
        return int((segment[1] - segment[0]) * self.operands.itemsize)

    def send(self, segments: Sequence[Segment], dests: Sequence[int]) -> Steps:
        """Encode segments of ``x`` and start sending each to some ranks. Return the sends."""
        sends: list[Pending] = []
        for segment, wire in zip(segments, self.wires(segments), strict=True):
            yield self.encode(segment, wire)
            sends += [self.isend(segment, wire, dest) for dest in dests]
        return sends

    def finish(self, segment: Segment, send: Callable[[Segment, Wire], None], terms: Sequence[Wire] = ()) -> Steps:
        """Encode a segment of the result, ``x`` plus ``terms``, send it, and store the decoded wire in ``out``.

        The segment must be one of this rank's own chunk, ``chunks[group.rank]``; for other segments use `encode` with
        ``final=True``. It is decoded after its send
        has started, or while encoding if the coder computes the decoded values anyway, if there is a residual, on an
        asynchronous device, or if it is the chunk's only segment.
        """
        known = self.coders.coder.knows_decoded or self.operands.residual is not None
        in_one = known or self.timeline is not None or len(self.chunks[self.group.rank]) == 1
        wire = self.wire(segment)
        yield self.encode(segment, wire, terms, final=in_one)
        send(segment, wire)
        if not in_one:
            yield self.decode(segment, [wire])


class Inbox:
    """Wires that arrive from one rank in the order of its sends. Receives are posted ahead of their use.

    Parameters
    ----------
    group : Group
        The group that receives.
    source : int
        The rank that sends.
    wires : sequence of Wire
        Memory for each message, in the order of arrival.
    ahead : int, optional
        The number of receives to post ahead, to limit the messages in flight; by default all are posted at once.
    """

    def __init__(self, group: Group, source: int, wires: Sequence[Wire], ahead: int | None = None) -> None:
        self._group = group
        self._source = source
        self._wires = wires
        self._ahead = len(wires) if ahead is None else ahead
        self._posted: list[Pending] = []
        self._next = 0
        self._post()

    def _post(self) -> None:
        for wire in self._wires[len(self._posted) : self._next + self._ahead]:
            self._posted.append(self._group.irecv(wire, self._source))

    def receive(self) -> Generator[Pending, None, Wire]:
        """Wait for the next message and return its wire."""
        index = self._next
        self._next += 1
        self._post()
        yield self._posted[index]
        return self._wires[index]


def receive_each(inboxes: Iterable[Inbox]) -> Generator[Pending, None, list[Wire]]:
    """Wait for the next message of each inbox and return the wires."""
    arrived = []
    for inbox in inboxes:
        wire = yield from inbox.receive()
        arrived.append(wire)
    return arrived


def decode_all(job: Job, inboxes: Mapping[int, Inbox]) -> Steps:
    """Decode the chunks that arrive from some ranks, by rank: first the first segment of each, then the second ones."""
    for index in range(max(len(chunk) for chunk in job.chunks)):
        for source, inbox in inboxes.items():
            for segment in job.chunks[source][index : index + 1]:
                wire = yield from inbox.receive()
                yield job.decode(segment, [wire])
