"""One collective on one rank: what its algorithm has to work with."""

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
    """The means of one collective on one rank.

    Attributes
    ----------
    group : Group
        The ranks that take part.
    coder : Coder
        Encodes and decodes.
    x, out : Window
        This rank's values and where the result goes.
    chunks : sequence of Chunk
        The cut of the whole buffer: one chunk a rank, each in segments.
    scale : float
        Factor of this rank's values: 1/p for a mean, which a half then holds wherever it holds the values.
    residual : Window or None
        What encodings lose, for error feedback.
    allocate : callable
        Gives memory for wires, in bytes.
    stats : Stats
        Where seconds and bytes are added up.
    itemsize : float
        Bytes of an element, uncompressed.
    rng_counter : int
        For codecs that round at random: the collective's number, in the upper 32 bits, and this rank's.
    timeline : Timeline or None
        Of a device whose kernels are done later.
    root : int
        Of a broadcast.
    raw : Coder or None
        Moves values as they are, for the parts of an algorithm that do.
    cut : callable or None
        Cuts the buffer into that many chunks, for an algorithm among fewer ranks.
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
        """Memory for the wire of one segment."""
        nbytes, exact = self.coder.wire_nbytes(segment[1] - segment[0]), self.coder.fixed_size
        wire = Wire(self.allocate(nbytes), exact=exact)
        if self.timeline is not None and self.timeline.stage is not None:
            wire.staging = Wire(self.timeline.stage(nbytes), exact=exact)
        return wire

    def wires(self, chunk: Iterable[Segment]) -> list[Wire]:
        """Memory for the wires of some segments."""
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
        """Encode a segment: ``x`` (if ``own``) plus the decoded ``terms``; on a device, before the wire leaves.

        ``final`` stores the decoded wire in ``out`` as well. ``share`` tells how many ranks make this same encoding
        of values that are no longer their own: each then feeds back its share of the loss, and all of the ``team``
        take the same random numbers.
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
        """Encode a segment of the result, ``x`` plus ``terms``, send it off, and store in ``out`` what others decode.

        Decoding waits until the wire has left, unless encoding knows or must know what that gives, a device has still
        to do it, or there is no other segment to work on meanwhile.
        """
        known = self.coder.knows_decoded or self.residual is not None
        in_one = known or self.timeline is not None or len(self.chunks[self.group.rank]) == 1
        yield self.encode(segment, wire, terms, final=in_one)
        send(segment, wire)
        if not in_one:
            yield self.decode(segment, [wire])

    def finish_own(self, send: Callable[[Segment, Wire], None]) -> Steps:
        """`finish` this rank's chunk of an allgather, which has no terms."""
        own = self.chunks[self.group.rank]
        for segment, wire in zip(own, self.wires(own), strict=True):
            yield from self.finish(segment, wire, send)

    def decode(self, segment: Segment, terms: Sequence[Wire], *, own: bool = False) -> Pending | None:
        """Store the sum of the decoded ``terms``, plus ``x`` if ``own``, in ``out``: on a device some time before the
        collective's end.
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
        """Start sending the wire of a segment, in ``group`` if the job's is not the one."""
        self.stats.wire_nbytes += wire.nbytes
        self.stats.raw_sent_nbytes += int((segment[1] - segment[0]) * self.itemsize)
        return (group or self.group).isend(wire, dest)


class Inbox:
    """Wires expected from one rank, in order; receives are posted a window ahead of their use.

    Parameters
    ----------
    group : Group
        Receives.
    source : int
        The rank that sends.
    wires : sequence of Wire
        Where each message goes, in the order of arrival.
    ahead : int, optional
        How many receives are posted beyond the one waited for; all at once by default.
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
        """The next message: what to wait for, and its wire."""
        index = self._next
        self._next += 1
        self._post()
        return self._posted[index], self._wires[index]
