"""One collective on one rank: the buffers, codec and communication that its algorithm uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

from ..codecs.base import Array, Coder
from ..gpu.streams import Timeline
from ..host.encode_options import EncodeOptions
from ..layout import Chunk, Segment
from ..pending import Pending, Steps
from ..stats import Stats
from ..transports.base import Group, Wire


@dataclass
class Window:
    """A part of a longer buffer: ``array[0]`` is element ``offset``."""

    array: Array
    offset: int = 0

    def __getitem__(self, segment: Segment) -> Array:
        begin, end = segment
        return self.array[begin - self.offset : end - self.offset]


@dataclass
class Job:
    """Everything that an algorithm needs to run one collective on one rank.

    Attributes
    ----------
    group : Group
        The ranks that take part.
    coder : Coder
        Encodes and decodes.
    x, out : Window
        This rank's values and the memory of the result.
    chunks : sequence of Chunk
        The chunks of the whole buffer, one for each rank, each cut into segments.
    scale : float
        Factor of this rank's values. It is 1/p for a mean, so that partial sums of 16-bit floats cannot overflow.
    residual : Window or None
        The residual of error feedback.
    allocate : callable
        Takes a number of bytes and returns memory for wires.
    stats : Stats
        Counts seconds and bytes.
    itemsize : float
        Bytes of an element, uncompressed.
    rng_counter : int
        For codecs that round at random: the collective's number in the upper 32 bits, this rank in the lower ones.
    timeline : Timeline or None
        For a device that runs kernels asynchronously: orders kernels and messages.
    root : int
        The root of a broadcast.
    raw : Coder or None
        The coder for uncompressed values, for algorithms that send a part of them uncompressed.
    cut : callable or None
        Cuts the buffer into a number of chunks, for an algorithm that needs another number of chunks than
        ``chunks`` has. Every allreduce has it.
    """

    group: Group
    coder: Coder
    x: Window
    out: Window
    chunks: Sequence[Chunk]
    allocate: Callable[[int], Array]
    stats: Stats
    itemsize: float
    scale: float = 1.0
    residual: Window | None = None
    rng_counter: int = 0
    timeline: Timeline | None = None
    root: int = 0
    raw: Coder | None = None
    cut: Callable[[int], tuple[Chunk, ...]] | None = None

    def wire(self, segment: Segment) -> Wire:
        """Allocate the wire of one segment."""
        nbytes, exact = self.coder.wire_nbytes(segment[1] - segment[0]), self.coder.fixed_size
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

        ``final`` also stores the decoded wire in ``out``. ``share`` is the number of ranks, the ``team``, that make
        this same encoding of a partial sum. Each of them keeps 1/``share`` of the residual, and all use the same
        random numbers.
        """
        rng_counter = self.rng_counter if share == 1 else self.rng_counter >> 32 << 32 | share.bit_length() << 26 | team
        started = perf_counter()
        if self.timeline is not None:
            self.timeline.encoding(terms, of_result=self.x.array is self.out.array)
        wire.nbytes = self.coder.encode(
            segment[1] - segment[0],
            self.x[segment] if own else None,
            [term.content for term in terms],
            wire.buffer,
            EncodeOptions(
                residual=self.residual[segment] if self.residual else None,
                feed=own,
                residual_scale=1.0 / share,
                decoded=self.out[segment] if final else None,
                scale=self.scale,
                rng_counter=rng_counter,
                position=segment[0],
            ),
        )
        if self.timeline is not None:
            self.timeline.encoded(wire)
        self.stats.encode_seconds += perf_counter() - started
        return None

    def finish(
        self, segment: Segment, wire: Wire, send: Callable[[Segment, Wire], None], terms: Sequence[Wire] = ()
    ) -> Steps:
        """Encode a segment of the result, ``x`` plus ``terms``, send it, and store the decoded wire in ``out``.

        The segment is decoded after its send has started. It is decoded while encoding if the coder computes the
        decoded values anyway, if there is a residual, on an asynchronous device, or if there is only one segment.
        """
        known = self.coder.knows_decoded or self.residual is not None
        in_one = known or self.timeline is not None or len(self.chunks[self.group.rank]) == 1
        yield self.encode(segment, wire, terms, final=in_one)
        send(segment, wire)
        if not in_one:
            yield self.decode(segment, [wire])

    def finish_own(self, send: Callable[[Segment, Wire], None]) -> Steps:
        """Call `finish` without terms on each segment of this rank's chunk, for an allgather."""
        own = self.chunks[self.group.rank]
        for segment, wire in zip(own, self.wires(own), strict=True):
            yield from self.finish(segment, wire, send)

    def decode(self, segment: Segment, terms: Sequence[Wire], *, own: bool = False) -> Pending | None:
        """Store the sum of the decoded ``terms``, plus ``x`` if ``own``, in ``out``.

        A device does so asynchronously, before the collective ends.
        """
        started = perf_counter()
        if self.timeline is not None:
            self.timeline.decoding(terms, adding=own)
        self.coder.decode(
            segment[1] - segment[0],
            self.x[segment] if own else None,
            [term.content for term in terms],
            self.out[segment],
            scale=self.scale,
        )
        self.stats.decode_seconds += perf_counter() - started
        return None

    def isend(self, segment: Segment, wire: Wire, dest: int, group: Group | None = None) -> Pending:
        """Start sending the wire of a segment, in the job's group unless ``group`` is given."""
        self.stats.wire_nbytes += wire.nbytes
        self.stats.raw_sent_nbytes += int((segment[1] - segment[0]) * self.itemsize)
        return (group or self.group).isend(wire, dest)


class Inbox:
    """Wires that arrive from one rank, in order. Receives are posted ahead of their use.

    Parameters
    ----------
    group : Group
        The group that receives.
    source : int
        The rank that sends.
    wires : sequence of Wire
        Memory for each message, in the order of arrival.
    ahead : int, optional
        The number of receives to post ahead; by default all are posted at once.
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

    def next(self) -> tuple[Pending, Wire]:
        """Return the next message's receive, to wait for, and its wire."""
        index = self._next
        self._next += 1
        self._post()
        return self._posted[index], self._wires[index]
