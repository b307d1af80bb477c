"""The order of kernels and copies on an asynchronous device: the stream of each, and the events it waits for.

Kernels that encode or add share one stream, so that decoding, adding and encoding again need no wait between them.
Finished chunks are decoded on several other streams. Messages from GPU to GPU have their own stream. With staging, two
more streams copy wires to and from pinned host memory while kernels run.

This module is independent of the hardware, which `compcoll.gpu.runtime` hides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..pending import Pending
from ..transports.base import Wire

if TYPE_CHECKING:
    from .runtime import CudaRuntime

Array = Any
Stream = Any
Event = Any

_DECODE_STREAMS = 3


class Streams:
    """The streams of a communicator on one device.

    Parameters
    ----------
    runtime : CudaRuntime
        The device's runtime.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self.encode = runtime.stream()
        self.decode = [runtime.stream() for _ in range(_DECODE_STREAMS)]
        self.outward = runtime.stream()
        self.inward = runtime.stream()
        self.between = runtime.stream()


class Ending:
    """The end of a collective, for which the caller's streams wait.

    The stream of the call waits even if the request is dropped, since its later work may reuse the arrays' memory.

    Parameters
    ----------
    runtime : CudaRuntime
        The device's runtime.
    caller : Stream
        The stream of the call.
    events : tuple of Event
        The events that end the collective.
    arrays : tuple of array
        The arrays that the collective reads and writes, kept alive until then.
    last : Event or None
        The event after the last messages from GPU to GPU.
    """

    def __init__(
        self, runtime: CudaRuntime, caller: Stream, events: tuple[Event, ...], arrays: tuple[Array | None, ...]
    ) -> None:
        self._runtime = runtime
        self._caller: Stream | None = caller
        self._events = events
        self._arrays = arrays
        self.last: Event | None = None

    def order(self, *streams: Stream) -> None:
        """Make later work on the caller's stream, and on these streams, wait for the end."""
        caller, self._caller = self._caller, None
        for stream in streams if caller is None or caller in streams else (caller, *streams):
            for event in self._events:
                self._runtime.wait(stream, event)
        self._arrays = ()

    def __del__(self) -> None:
        if self._caller is not None:  # the request was dropped without a wait
            with contextlib.suppress(Exception):  # at interpreter shutdown
                self.order()


class Timeline:
    """The order of one collective's kernels and copies, among themselves and with the caller's stream.

    Parameters
    ----------
    streams : Streams
        The communicator's streams.
    caller : Stream
        The caller's stream.
    before : Event
        The event after the caller's preceding work.
    stage : callable, optional
        Returns pinned host memory of the given bytes; for transports that cannot send device memory.
    """

    def __init__(self, streams: Streams, caller: Stream, before: Event, stage: Callable[[int], Array] | None) -> None:
        self.stage = stage
        self._streams = streams
        self._runtime = streams.runtime
        self._caller = caller
        self._before = before
        self._used: list[Stream] = []
        self._decoded = 0
        self._last_read: Event | None = None
        self._last_messages: Event | None = None

    def _enter(self, stream: Stream, terms: Sequence[Wire]) -> None:
        """Select the stream of the next kernels. It waits for the caller's work and for the wires in ``terms``."""
        if stream not in self._used:
            self._used.append(stream)
            self._runtime.wait(stream, self._before)
        for wire in terms:
            if wire.ready is not None:
                self._runtime.wait(stream, wire.ready)
        self._runtime.launching = stream

    def encoding(self, terms: Sequence[Wire], *, of_result: bool) -> None:
        """Prepare to encode the sum of some wires; with ``of_result``, after all decoding on other streams."""
        encode = self._streams.encode
        self._enter(encode, terms)
        if of_result:
            for stream in self._used[:]:
                if stream is not encode:
                    self._runtime.wait(encode, self._runtime.record(stream))

    def encoded(self, wire: Wire) -> None:
        """Mark the end of an encode; with staging, copy its wire to pinned memory."""
        runtime = self._runtime
        wire.ready = runtime.record(self._streams.encode)
        if wire.staging is not None:
            outward = self._streams.outward
            runtime.wait(outward, wire.ready)
            runtime.copy(wire.buffer, wire.staging.buffer, wire.nbytes, outward)
            wire.staging.nbytes, wire.staging.ready = wire.nbytes, runtime.record(outward)
            self._last_read = wire.staging.ready

    def departing(self, wire: Wire) -> Pending | None:
        """Return the event on which the host waits before it sends a wire; None if the bytes are already there."""
        event = wire.ready if wire.staging is None else wire.staging.ready
        return None if event is None else self._runtime.pending(event)

    def decoding(self, terms: Sequence[Wire], *, adding: bool) -> None:
        """Prepare to decode some wires and, with ``adding``, to add them to this rank's values."""
        if adding:
            self._enter(self._streams.encode, terms)
            return
        self._decoded += 1
        self._enter(self._streams.decode[self._decoded % _DECODE_STREAMS], terms)

    def arrived(self, wire: Wire) -> None:
        """Copy a wire that has arrived in its pinned memory to the device."""
        inward, staging = self._streams.inward, wire.staging
        assert staging is not None
        wire.nbytes = staging.nbytes
        self._runtime.copy(staging.buffer, wire.buffer, wire.nbytes, inward)
        wire.ready = self._runtime.record(inward)

    def exchanging(self, leaving: Sequence[Wire] = ()) -> Stream:
        """Return the stream of messages from GPU to GPU, ordered after the encoding of these wires."""
        self._enter(self._streams.between, leaving)
        return self._streams.between

    def exchanged(self, arriving: Sequence[Wire]) -> None:
        """Mark the end of messages. Kernels that decode these wires wait for them; the host does not."""
        event = self._last_messages = self._runtime.record(self._streams.between)
        for wire in arriving:
            wire.ready = event

    def leaving(self, wire: Wire, event: Event, copy: Array | None = None) -> None:
        """Record an interprocess event, after which other ranks may read a wire, or its copy."""
        outward = self._streams.outward
        if copy is not None:
            self._enter(outward, (wire,))
            self._runtime.copy(wire.buffer, copy, wire.nbytes, outward)
        elif wire.ready is not None:
            self._runtime.wait(outward, wire.ready)
        self._runtime.record(outward, event)

    def take(self, wire: Wire, source: Array, event: Event) -> None:
        """Copy a wire from another process's memory, after that process's event."""
        inward = self._streams.inward
        self._runtime.wait(inward, event)
        wire.nbytes = source.nbytes
        self._runtime.copy(source, wire.buffer, wire.nbytes, inward)
        wire.ready = self._runtime.record(inward)

    def taken(self, event: Event) -> None:
        """Record an interprocess event, after which this rank no longer reads other ranks' memory."""
        self._runtime.record(self._streams.inward, event)

    def given(self, event: Event) -> None:
        """Keep the wires' memory until another process's event, after which that process no longer reads it."""
        between = self._streams.between
        self._runtime.wait(between, event)
        self._last_read = self._runtime.record(between)

    def fetch(self, source: Array, target: Array) -> Pending:
        """Copy one of the caller's arrays to pinned memory."""
        stream = self._streams.encode
        self._enter(stream, ())
        self._runtime.copy(source, target, target.nbytes, stream)
        return self._runtime.pending(self._runtime.record(stream))

    def store(self, source: Array, target: Array) -> None:
        """Copy pinned memory, or another array, to one of the caller's arrays."""
        stream = self._streams.encode
        self._enter(stream, ())
        self._runtime.copy(source, target, source.nbytes, stream)

    def allocated(self, allocate: Callable[[Stream], Array]) -> Array:
        """Allocate memory on the caller's stream, and order later work after earlier uses of that memory."""
        memory = allocate(self._caller)
        self._before = self._runtime.record(self._caller)
        self._used.clear()
        return memory

    def end(self, *arrays: Array) -> tuple[Ending, list[Pending]]:
        """Return the collective's `Ending`, and the requests to wait for before the wires' memory is used again."""
        events = [self._runtime.record(stream) for stream in self._used]
        ending = Ending(self._runtime, self._caller, tuple(events), arrays)
        ending.last = self._last_messages
        if self._last_read is not None:  # if the wire was not sent, nothing else has waited for this copy
            events.append(self._last_read)
        return ending, [self._runtime.pending(event) for event in events]
