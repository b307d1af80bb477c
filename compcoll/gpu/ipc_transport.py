"""Messages between GPUs of one machine: the receiver copies wires from the sender's memory, by CUDA IPC.

A process can wait for another process's event only after that event was recorded. So the sender's host sends a notice
for each wire: the wire's place in memory, and the event after which its bytes are valid. Streams, not hosts, wait for
the event. At the end of a collective, each rank sends an event to every rank whose wires it read: after this event it
no longer reads that rank's memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import cycle
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import WireCorrupted
from ..host.arena import Arena
from ..pending import Pending, Steps
from ..transports.base import Transport, Wire
from .device_transport import Arriving
from .streams import Streams, Timeline

if TYPE_CHECKING:
    from .ipc import CudaIPC

Array = Any
Event = Any

_NOTICE = Struct("<QQQ64s64s")
"""A notice: the length of the memory, the wire's offset and length in bytes, and the handles of memory and event."""

_HANDLE_NBYTES = 64
_PROOF_NBYTES = 64
_EVENTS, _ENDS = 32, 4
"""Numbers of a rank's events: for wires, and for ends of collectives. They are reused in turn, always on the same
stream. If an event is recorded again before another rank waits for it, that rank waits longer than needed, never less.
"""

_END = 3
"""Offset from a collective's first tag to the tag of the final events. Algorithms inside a node do not use this tag."""

UNIQUE_ID_NBYTES = _PROOF_NBYTES + _NOTICE.size
"""Bytes of a unique id: proof bytes and their notice."""

_alive: set[Links] = set()
"""Links whose memory other processes may have open. They keep the memory even if the communicator is dropped."""


class Links:
    """The memory and events that a rank shares with other ranks of its machine.

    Each notice of another rank is checked: the wire must lie within the memory, and open memory must keep its size.

    Parameters
    ----------
    sharing : CudaIPC
        The interprocess memory and events of this rank's GPU.
    streams : Streams
        The communicator's streams on this GPU.

    Attributes
    ----------
    name : str
        The mechanism's name.
    leaving, ends : iterator
        Endless (event, handle) pairs: for wires to send, and for the ends of this rank's reads.
    """

    def __init__(self, sharing: CudaIPC, streams: Streams) -> None:
        self.name = sharing.name
        self._sharing = sharing
        self._streams = streams
        self._runtime = streams.runtime
        self.leaving = cycle([sharing.event() for _ in range(_EVENTS)])
        self.ends = cycle([sharing.event() for _ in range(_ENDS)])
        self._shared: dict[int, tuple[Array, bytes]] = {}  # slabs and their handles, by address
        self._memory: dict[tuple[int, bytes], Array] = {}
        self._events: dict[tuple[int, bytes], Event] = {}
        self._proof = self._runtime.pinned_bytes(_PROOF_NBYTES)
        self._proof[:] = np.frombuffer(os.urandom(_PROOF_NBYTES), np.uint8)
        self._probe = Wire(self._runtime.device_bytes(1 << 21))
        self._probe.nbytes = _PROOF_NBYTES
        self._seen: dict[int, Wire] = {}
        _alive.add(self)

    def notice(self, array: Array, slabs: Sequence[Array], event: bytes) -> bytes | None:
        """Return the notice of an array and an event; None if the array is not in memory that can be shared."""
        begin = self._runtime.address(array)
        for slab in slabs:
            first = self._runtime.address(slab)
            if first <= begin and begin + array.nbytes <= first + slab.nbytes:
                if first not in self._shared:
                    self._shared[first] = slab, self._sharing.memory_handle(slab)
                return _NOTICE.pack(slab.nbytes, begin - first, array.nbytes, self._shared[first][1], event)
        return None

    def source(self, notice: bytes, rank: int, wire: Wire) -> tuple[Array, Event]:
        """Return the bytes that another rank's notice refers to, and the event after which they are valid.

        Raises
        ------
        WireCorrupted
            If the notice does not match the wire or the memory.
        """
        size, offset, nbytes, handle, event = _NOTICE.unpack(notice)
        most = wire.buffer.nbytes
        if nbytes > most or (wire.exact and nbytes != most):
            expected = most if wire.exact else f"at most {most}"
            raise WireCorrupted(f"rank {rank} announced a message of {nbytes} bytes, where {expected} are expected")
        memory = self._memory.get((rank, handle))
        known = size if memory is None else memory.nbytes
        if size != known or offset + nbytes > size:
            raise WireCorrupted(
                f"rank {rank} announced a message in bytes {offset} to {offset + nbytes} of {size}, "
                f"in memory of {known}"
            )
        if memory is None:
            memory = self._memory[rank, handle] = self._sharing.open_memory(handle, size)
        return memory[offset : offset + nbytes], self.event(event, rank)

    def event(self, handle: bytes, rank: int) -> Event:
        """Return another rank's event. A handle is opened only once."""
        if (rank, handle) not in self._events:
            self._events[rank, handle] = self._sharing.open_event(handle)
        return self._events[rank, handle]

    def unique_id(self) -> bytes:
        """Write proof bytes to this GPU's shared memory; return them with their notice."""
        streams, (event, handle) = self._streams, next(self.leaving)
        self._runtime.copy(self._proof, self._probe.buffer, _PROOF_NBYTES, streams.encode)
        self._probe.ready = self._runtime.record(streams.encode)
        self._timeline().leaving(self._probe, event)
        notice = self.notice(self._probe.content, [self._probe.buffer], handle)
        assert notice is not None
        return bytes(self._proof) + notice

    def accept(self, unique_ids: Sequence[bytes], own: int) -> list[Pending]:
        """Start copies of the other ranks' proof bytes to host memory; return the requests to wait for."""
        timeline = self._timeline()
        for rank, unique_id in enumerate(unique_ids):
            if rank != own:
                wire = self._seen[rank] = Wire(self._runtime.pinned_bytes(_PROOF_NBYTES))
                timeline.take(wire, *self.source(unique_id[_PROOF_NBYTES:], rank, wire))
        return [self._runtime.pending(wire.ready) for wire in self._seen.values()]

    def check(self, unique_ids: Sequence[bytes]) -> None:
        """Compare the copied proof bytes with those in the unique ids.

        Raises
        ------
        WireCorrupted
            If they differ.
        """
        for rank, wire in self._seen.items():
            if wire.buffer.tobytes() != unique_ids[rank][:_PROOF_NBYTES]:
                raise WireCorrupted(
                    f"this rank reads other bytes from the GPU memory of rank {rank} than that rank wrote"
                )

    def _timeline(self) -> Timeline:
        stream = self._streams.encode
        return Timeline(self._streams, stream, self._runtime.record(stream), None)

    def idle(self) -> Pending:
        """Return a request to wait for before `close`: it completes when other ranks' memory is no longer read."""
        return self._runtime.pending(self._runtime.record(self._streams.inward))

    def close(self) -> None:
        """Close other ranks' memory and events. Their owners may free them once all ranks have closed them."""
        self._memory.clear()
        self._events.clear()
        self._sharing.close()

    def forget(self) -> None:
        """Release this rank's memory. All other ranks must have closed it."""
        self._shared.clear()
        _alive.discard(self)


class IPCTransport:
    """One collective's messages between GPUs of one machine. The host does not wait for the wires' bytes.

    An algorithm must not overwrite a wire after sending it. A wire outside ``memory`` is first copied there.

    Parameters
    ----------
    links : Links
        The memory and events shared with the other ranks.
    host : Transport
        Carries the notices.
    timeline : Timeline
        The collective's timeline.
    memory : Arena
        The collective's memory for wires on the GPU.
    pinned : callable
        Takes a number of bytes; returns pinned host memory, valid until the collective's memory is used again.
    """

    def __init__(
        self, links: Links, host: Transport, timeline: Timeline, memory: Arena, pinned: Callable[[int], Array]
    ) -> None:
        self.rank, self.size, self.nodes = host.rank, host.size, host.nodes
        self._links = links
        self._host = host
        self._timeline = timeline
        self._memory = memory
        self._pinned = pinned
        self._latest: Wire | None = None
        self._notice = b""
        self._dests: set[int] = set()
        self._sources: set[int] = set()

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        if wire is not self._latest:  # a wire sent to several ranks needs one notice
            self._latest, self._notice = wire, self._noted(wire)
        self._dests.add(dest)
        return self._tell(self._notice, dest, tag)

    def _noted(self, wire: Wire) -> bytes:
        """Make a wire readable by other ranks, and return its notice."""
        event, handle = next(self._links.leaving)
        copy = None
        notice = self._links.notice(wire.content, self._memory.slabs, handle)
        if notice is None:
            copy = self._memory.allocate(wire.nbytes)
            notice = self._links.notice(copy, self._memory.slabs, handle)
            assert notice is not None
        self._timeline.leaving(wire, event, copy)
        return notice

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        def take() -> None:
            self._timeline.take(wire, *self._links.source(notice.buffer.tobytes(), source, wire))

        notice = Wire(self._pinned(_NOTICE.size))
        self._sources.add(source)
        return Arriving(self._host.irecv(notice, source, tag), take)

    def _tell(self, what: bytes, dest: int, tag: int) -> Pending:
        message = Wire(self._pinned(len(what)))
        message.buffer[:] = np.frombuffer(what, np.uint8)
        return self._host.isend(message, dest, tag)

    def finish(self, tag: int) -> Steps:
        """End the collective: exchange the events after which ranks no longer read each other's memory.

        This rank's memory for wires is used again only after the other ranks' events. ``tag`` is the collective's.
        """
        tag += _END
        event, handle = next(self._links.ends)
        self._timeline.taken(event)
        ends = [(dest, Wire(self._pinned(_HANDLE_NBYTES))) for dest in sorted(self._dests)]
        arriving = [self._host.irecv(end, dest, tag) for dest, end in ends]
        sends = [self._tell(handle, source, tag) for source in sorted(self._sources)]
        for (dest, end), arrival in zip(ends, arriving, strict=True):
            yield arrival
            self._timeline.given(self._links.event(end.buffer.tobytes(), dest))
        yield from sends
