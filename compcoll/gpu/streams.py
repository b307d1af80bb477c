"""The order of kernels and copies on a device whose work is done later: each one's stream, and what it waits for.

Kernels that encode, and those that add, go to one stream: decode, add and encode again need no wait between them.
Finished chunks are decoded on several others, and what goes from GPU to GPU has one. With staging, wires are copied to
and from pinned host memory on two more streams, while kernels go on.

Nothing here knows the hardware: `Runtime` does, of which `compcoll.gpu.runtime` has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..pending import Pending

Array = Any
Stream = Any
Event = Any

_DECODE_STREAMS = 3


class Runtime(Protocol):
    """A device's streams and events. What is put on a stream is done in that order, at some later time.

    Attributes
    ----------
    launching : Stream
        Where the device's coders launch their kernels.
    """

    launching: Stream

    def stream(self) -> Stream:
        """A new stream, in no order with others, whose work comes before that of the caller's own streams."""

    def record(self, stream: Stream, event: Event | None = None) -> Event:
        """Record an event, a new one or that one again: it tells that everything put on a stream so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is put on a stream from now on be done after the event. The host goes on."""

    def pending(self, event: Event) -> Pending:
        """The event as something that the host waits for."""

    def copy(self, source: Array, target: Array, nbytes: int, stream: Stream) -> None:
        """Copy bytes, between memory of the device and pinned host memory, when the stream's turn comes."""

    def address(self, array: Array) -> int:
        """Tell where an array on the device begins."""

    def device_bytes(self, nbytes: int) -> Array:
        """Allocate memory of the device, in one piece."""

    def pinned_bytes(self, nbytes: int) -> Array:
        """Allocate host memory that the device copies from and to by itself."""


class Landing(Protocol):
    """A wire as seen from here: what `compcoll.transports.base.Wire` is.

    Attributes
    ----------
    staging : Landing or None
        The wire in pinned host memory by which this one in device memory travels.
    ready : Event or None
        After which the bytes are there; None: they are.
    """

    buffer: Array
    nbytes: int
    staging: Any
    ready: Event | None


class Streams:
    """The streams of a communicator on one device.

    Parameters
    ----------
    runtime : Runtime
        Of the device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.encode = runtime.stream()
        self.decode = [runtime.stream() for _ in range(_DECODE_STREAMS)]
        self.outward = runtime.stream()
        self.inward = runtime.stream()
        self.between = runtime.stream()


class Ending:
    """The end of a collective, after which streams of the caller's shall come.

    The stream of the call comes after it in any case, since the memory of the arrays may be used again in its order.

    Parameters
    ----------
    runtime : Runtime
        Of the device.
    caller : Stream
        Of the call.
    events : tuple of Event
        All that must have come.
    arrays : tuple of array
        What the collective reads and writes, kept until then.
    last : Event or None
        After the last messages from GPU to GPU.
    """

    def __init__(
        self, runtime: Runtime, caller: Stream, events: tuple[Event, ...], arrays: tuple[Array | None, ...]
    ) -> None:
        self._runtime = runtime
        self._caller: Stream | None = caller
        self._events = events
        self._arrays = arrays
        self.last: Event | None = None

    def order(self, *streams: Stream) -> None:
        """Let what is put from now on on the caller's stream, and on these, be done afterwards."""
        caller, self._caller = self._caller, None
        for stream in streams if caller is None or caller in streams else (caller, *streams):
            for event in self._events:
                self._runtime.wait(stream, event)
        self._arrays = ()

    def __del__(self) -> None:
        if self._caller is not None:  # nobody waited
            with contextlib.suppress(Exception):  # at the interpreter's end
                self.order()


class Timeline:
    """The order of one collective's kernels and copies among themselves and in the caller's stream.

    Parameters
    ----------
    streams : Streams
        Of the communicator.
    caller : Stream
        The caller's, at the call.
    before : Event
        What comes before it.
    stage : callable, optional
        Gives pinned host memory, in bytes: for transports that cannot send the device's.
    """

    def __init__(self, streams: Streams, caller: Stream, before: Event, stage: Callable[[int], Array] | None) -> None:
        self.stage = stage
        self._streams = streams
        self._runtime = streams.runtime
        self._caller = caller
        self._before = before
        self._used: list[Stream] = []
        self._ticket = 0
        self._last_read: Event | None = None
        self._last_messages: Event | None = None

    def _enter(self, stream: Stream, terms: Sequence[Landing]) -> None:
        """Let the next kernel be launched on a stream, after the caller's work and the arrival of some wires."""
        if stream not in self._used:
            self._used.append(stream)
            self._runtime.wait(stream, self._before)
        for wire in terms:
            if wire.ready is not None:
                self._runtime.wait(stream, wire.ready)
        self._runtime.launching = stream

    def encoding(self, terms: Sequence[Landing], *, of_result: bool) -> None:
        """Prepare for an encode of some wires' sum; ``of_result``: and of values that may have been decoded."""
        encode = self._streams.encode
        self._enter(encode, terms)
        if of_result:
            for stream in self._used[:]:
                if stream is not encode:
                    self._runtime.wait(encode, self._runtime.record(stream))

    def encoded(self, wire: Landing) -> None:
        """End an encode: with staging, copy what it wrote to pinned memory."""
        runtime = self._runtime
        wire.ready = runtime.record(self._streams.encode)
        if wire.staging is not None:
            outward = self._streams.outward
            runtime.wait(outward, wire.ready)
            runtime.copy(wire.buffer, wire.staging.buffer, wire.nbytes, outward)
            wire.staging.nbytes, wire.staging.ready = wire.nbytes, runtime.record(outward)
            self._last_read = wire.staging.ready

    def departing(self, wire: Landing) -> Pending | None:
        """Return what the host waits for before it sends a wire; None: its bytes are there."""
        event = wire.ready if wire.staging is None else wire.staging.ready
        return None if event is None else self._runtime.pending(event)

    def decoding(self, terms: Sequence[Landing], *, adding: bool) -> None:
        """Prepare for a decode; ``adding``: to this rank's values."""
        if adding:
            self._enter(self._streams.encode, terms)
            return
        self._ticket += 1
        self._enter(self._streams.decode[self._ticket % _DECODE_STREAMS], terms)

    def arrived(self, wire: Landing) -> None:
        """Take a wire that has come to its pinned memory to the device."""
        inward = self._streams.inward
        wire.nbytes = wire.staging.nbytes
        self._runtime.copy(wire.staging.buffer, wire.buffer, wire.nbytes, inward)
        wire.ready = self._runtime.record(inward)

    def exchanging(self, leaving: Sequence[Landing] = ()) -> Stream:
        """Give the stream of what goes from GPU to GPU, for messages that come after the encoding of these wires."""
        self._enter(self._streams.between, leaving)
        return self._streams.between

    def exchanged(self, arriving: Sequence[Landing]) -> None:
        """End messages: whoever decodes these wires waits for them, and not the host."""
        event = self._last_messages = self._runtime.record(self._streams.between)
        for wire in arriving:
            wire.ready = event

    def leaving(self, wire: Landing, event: Event, copy: Array | None = None) -> None:
        """Record an event of several processes, after which others may take a wire, or a copy of it."""
        outward = self._streams.outward
        if copy is not None:
            self._enter(outward, (wire,))
            self._runtime.copy(wire.buffer, copy, wire.nbytes, outward)
        elif wire.ready is not None:
            self._runtime.wait(outward, wire.ready)
        self._runtime.record(outward, event)

    def take(self, wire: Landing, source: Array, event: Event) -> None:
        """Copy a wire from memory of another process, after that one's event."""
        inward = self._streams.inward
        self._runtime.wait(inward, event)
        wire.nbytes = source.nbytes
        self._runtime.copy(source, wire.buffer, wire.nbytes, inward)
        wire.ready = self._runtime.record(inward)

    def taken(self, event: Event) -> None:
        """Record an event of several processes, after which nothing is taken from others any more."""
        self._runtime.record(self._streams.inward, event)

    def given(self, event: Event) -> None:
        """Keep the wires' memory until another process's event, after which it takes none of them any more."""
        between = self._streams.between
        self._runtime.wait(between, event)
        self._last_read = self._runtime.record(between)

    def fetch(self, source: Array, target: Array) -> Pending:
        """Copy an array of the caller's to pinned memory."""
        stream = self._streams.encode
        self._enter(stream, ())
        self._runtime.copy(source, target, target.nbytes, stream)
        return self._runtime.pending(self._runtime.record(stream))

    def store(self, source: Array, target: Array) -> None:
        """Copy pinned memory, or another array, to an array of the caller's."""
        stream = self._streams.encode
        self._enter(stream, ())
        self._runtime.copy(source, target, source.nbytes, stream)

    def allocated(self, allocate: Callable[[Stream], Array]) -> Array:
        """Memory from the caller's stream, after what was done there with that memory before."""
        memory = allocate(self._caller)
        self._before = self._runtime.record(self._caller)
        self._used.clear()
        return memory

    def end(self, *arrays: Array) -> tuple[Ending, list[Pending]]:
        """The end of everything, on arrays of the caller's; and what must be done before the wires' memory is used
        again.
        """
        events = [self._runtime.record(stream) for stream in self._used]
        ending = Ending(self._runtime, self._caller, tuple(events), arrays)
        ending.last = self._last_messages
        if self._last_read is not None:  # of a wire that was not sent, perhaps
            events.append(self._last_read)
        return ending, [self._runtime.pending(event) for event in events]
