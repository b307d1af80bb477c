"""Wires between GPUs of one machine: the receiver copies them from the sender's memory, which both processes have.

An event of another process can be waited for only once it was recorded there. So a notice on the host tells of each
wire where it lies and after which event its bytes are there; streams, not hosts, wait for that. At a collective's end
each rank tells those whose wires it has taken after which event it takes no more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import cycle
from struct import Struct
from typing import Any, Protocol

import numpy as np

from ..errors import WireCorrupted
from ..pending import Pending, Steps
from ..transports.base import Persistent, Transport, Wire
from .streams import Streams, Timeline

Array = Any
Event = Any

_NOTICE = Struct("<QQQ64s64s")
"""Bytes of the memory, the wire's place in it and its bytes; CUDA's handles of the memory and of the event."""

_HANDLE_NBYTES = 64
_PROOF_NBYTES = 64
_EVENTS, _ENDS = 32, 4
"""Events of a rank, of wires and of calls' ends, that are recorded in turn, always on the same stream: who comes late
to one waits for a later record of it, and so for more than it has to, but never for less.
"""

_END = 3
"""From a collective's tag to one of its own that algorithms among the ranks of one node do not use."""

UNIQUE_ID_NBYTES = _PROOF_NBYTES + _NOTICE.size
"""Bytes of an invitation."""

_alive: set[Links] = set()
"""Those whose memory other processes may have: it stays, whoever forgets the communicator."""


class Sharing(Protocol):
    """Memory and events of one GPU, as the processes of a machine share them.

    Attributes
    ----------
    name : str
        Of the way.
    """

    name: str

    def memory_handle(self, memory: Array) -> bytes:
        """64 bytes by which other processes open memory that was allocated in one piece."""

    def event(self) -> tuple[Event, bytes]:
        """Make an event of several processes, and 64 bytes by which others open it."""

    def open_memory(self, handle: bytes, nbytes: int) -> Array:
        """Open another process's memory."""

    def open_event(self, handle: bytes) -> Event:
        """Open another process's event."""

    def close(self) -> None:
        """Close everything that was opened."""


class Slabs(Protocol):
    """Memory for wires on a GPU: what `compcoll.host.arena.Arena` is.

    Attributes
    ----------
    slabs : sequence of array
        Each was allocated in one piece, and stays.
    """

    @property
    def slabs(self) -> Sequence[Array]: ...

    def allocate(self, nbytes: int) -> Array: ...


class Links:
    """The memory and events that a rank has in common with others of its machine.

    What another rank says of its memory is not believed: a wire must lie within the memory, and memory that was opened
    has the size with which it was.

    Parameters
    ----------
    sharing : Sharing
        Of this rank's GPU.
    streams : Streams
        Of the communicator on it.

    Attributes
    ----------
    name : str
        Of the way.
    """

    def __init__(self, sharing: Sharing, streams: Streams) -> None:
        self.name = sharing.name
        self._sharing = sharing
        self._streams = streams
        self._runtime = streams.runtime
        self._leaving = cycle([sharing.event() for _ in range(_EVENTS)])
        self._ends = cycle([sharing.event() for _ in range(_ENDS)])
        self._shared: dict[int, tuple[Array, bytes]] = {}  # by address
        self._memory: dict[tuple[int, bytes], Array] = {}
        self._events: dict[tuple[int, bytes], Event] = {}
        self._proof = self._runtime.pinned_bytes(_PROOF_NBYTES)
        self._proof[:] = np.frombuffer(os.urandom(_PROOF_NBYTES), np.uint8)
        self._probe = Wire(self._runtime.device_bytes(1 << 21))
        self._probe.nbytes = _PROOF_NBYTES
        self._seen: dict[int, Wire] = {}
        _alive.add(self)

    def leaving(self) -> tuple[Event, bytes]:
        """An event for a wire that leaves, and its handle."""
        return next(self._leaving)

    def end(self) -> tuple[Event, bytes]:
        """An event for the end of what this rank takes, and its handle."""
        return next(self._ends)

    def notice(self, array: Array, slabs: Sequence[Array], event: bytes) -> bytes | None:
        """Tell where bytes lie, and after which event; None if it is not in memory that can be shared."""
        begin = self._runtime.address(array)
        for slab in slabs:
            first = self._runtime.address(slab)
            if first <= begin and begin + array.nbytes <= first + slab.nbytes:
                if first not in self._shared:
                    self._shared[first] = slab, self._sharing.memory_handle(slab)
                return _NOTICE.pack(slab.nbytes, begin - first, array.nbytes, self._shared[first][1], event)
        return None

    def source(self, notice: bytes, rank: int, wire: Wire) -> tuple[Array, Event]:
        """The bytes of another rank that a notice tells of, for that wire, and the event after which they are there.

        Raises
        ------
        WireCorrupted
            If they cannot be what is expected.
        """
        size, offset, nbytes, handle, event = _NOTICE.unpack(notice)
        most = wire.buffer.nbytes
        if nbytes > most or (wire.exact and nbytes != most):
            expected = most if wire.exact else f"at most {most}"
            raise WireCorrupted(f"rank {rank} tells of a wire of {nbytes} bytes, where {expected} are expected")
        memory = self._memory.get((rank, handle))
        known = size if memory is None else memory.nbytes
        if size != known or offset + nbytes > size:
            raise WireCorrupted(
                f"rank {rank} tells of a wire in bytes {offset} to {offset + nbytes} of {size}, in memory of {known}"
            )
        if memory is None:
            memory = self._memory[rank, handle] = self._sharing.open_memory(handle, size)
        return memory[offset : offset + nbytes], self.event(event, rank)

    def event(self, handle: bytes, rank: int) -> Event:
        """An event of another rank's."""
        if (rank, handle) not in self._events:
            self._events[rank, handle] = self._sharing.open_event(handle)
        return self._events[rank, handle]

    def unique_id(self) -> bytes:
        """Bytes that this rank's GPU will write to shared memory, and the notice of these."""
        streams, (event, handle) = self._streams, self.leaving()
        self._runtime.copy(self._proof, self._probe.buffer, _PROOF_NBYTES, streams.encode)
        self._probe.ready = self._runtime.record(streams.encode)
        self._timeline().leaving(self._probe, event)
        notice = self.notice(self._probe.content, [self._probe.buffer], handle)
        assert notice is not None
        return bytes(self._proof) + notice

    def accept(self, unique_ids: Sequence[bytes], own: int) -> list[Pending]:
        """Take what the other ranks' GPUs write, to host memory; return what must be waited for."""
        timeline = self._timeline()
        for rank, unique_id in enumerate(unique_ids):
            if rank != own:
                wire = self._seen[rank] = Wire(self._runtime.pinned_bytes(_PROOF_NBYTES))
                timeline.take(wire, *self.source(unique_id[_PROOF_NBYTES:], rank, wire))
        return [self._runtime.pending(wire.ready) for wire in self._seen.values()]

    def check(self, unique_ids: Sequence[bytes]) -> None:
        """Compare what was taken with what the others say that they write.

        Raises
        ------
        WireCorrupted
            If it is something else.
        """
        for rank, wire in self._seen.items():
            if wire.buffer.tobytes() != unique_ids[rank][:_PROOF_NBYTES]:
                raise WireCorrupted(f"the memory of rank {rank}'s GPU reads other bytes here than it writes")

    def _timeline(self) -> Timeline:
        stream = self._streams.encode
        return Timeline(self._streams, stream, self._runtime.record(stream), None)

    def idle(self) -> Pending:
        """What must be waited for before others' memory is closed."""
        return self._runtime.pending(self._runtime.record(self._streams.inward))

    def close(self) -> None:
        """Close what others share. They may free it once all ranks have done so."""
        self._memory.clear()
        self._events.clear()
        self._sharing.close()

    def forget(self) -> None:
        """Let this rank's memory go: the others have closed it."""
        self._shared.clear()
        _alive.discard(self)


class _Arriving:
    """A wire that this rank takes from another's memory when it is told where it is."""

    __slots__ = ("_notice", "_take", "_told")

    def __init__(self, told: Pending, notice: Wire, allocate: Callable[[bytes], None]) -> None:
        self._told = told
        self._notice = notice
        self._take = allocate

    def Test(self) -> bool:
        """Tell whether the notice has come. Kernels, not the host, wait for the copy."""
        if not self._told.Test():
            return False
        self._take(self._notice.buffer.tobytes())
        return True

    def __repr__(self) -> str:
        return repr(self._told)


class IPCTransport:
    """One collective's messages between GPUs of one machine, without a wait of the host's for any of them.

    A wire that was sent must not be written again in the same collective, as algorithms do not. Those that are not in
    memory for wires are copied there.

    Parameters
    ----------
    links : Links
        With the other ranks.
    host : Transport
        Carries notices.
    timeline : Timeline
        Of the collective.
    memory : Slabs
        Its memory for wires on the GPU.
    pinned : callable
        Gives it host memory, in bytes, that stays until the next use of the same memory.
    """

    def __init__(
        self, links: Links, host: Transport, timeline: Timeline, memory: Slabs, pinned: Callable[[int], Array]
    ) -> None:
        self._links = links
        self._host = host
        self._timeline = timeline
        self._memory = memory
        self._pinned = pinned
        self._latest: Wire | None = None
        self._notice = b""
        self._dests: set[int] = set()
        self._sources: set[int] = set()
        self.rank: int = host.rank
        self.size: int = host.size
        self.nodes: Sequence[int] = host.nodes

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        if wire is not self._latest:  # of what goes to several ranks all are told the same
            self._latest, self._notice = wire, self._noted(wire)
        self._dests.add(dest)
        return self._tell(self._notice, dest, tag)

    def _noted(self, wire: Wire) -> bytes:
        """Let others take a wire, and return the notice of it."""
        event, handle = self._links.leaving()
        copy = None
        notice = self._links.notice(wire.content, self._memory.slabs, handle)
        if notice is None:
            copy = self._memory.allocate(wire.nbytes)
            notice = self._links.notice(copy, self._memory.slabs, handle)
            assert notice is not None
        self._timeline.leaving(wire, event, copy)
        return notice

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        def allocate(notice: bytes) -> None:
            self._timeline.take(wire, *self._links.source(notice, source, wire))

        notice = Wire(self._pinned(_NOTICE.size))
        self._sources.add(source)
        return _Arriving(self._host.irecv(notice, source, tag), notice, allocate)

    def _tell(self, what: bytes, dest: int, tag: int) -> Pending:
        message = Wire(self._pinned(len(what)))
        message.buffer[:] = np.frombuffer(what, np.uint8)
        return self._host.isend(message, dest, tag)

    def finish(self, tag: int) -> Steps:
        """End the collective that has this tag: tell whose wires are taken, and hear who has taken this rank's, whose
        memory is used again after that only.
        """
        tag += _END
        event, handle = self._links.end()
        self._timeline.taken(event)
        ends = [(dest, Wire(self._pinned(_HANDLE_NBYTES))) for dest in sorted(self._dests)]
        arriving = [self._host.irecv(end, dest, tag) for dest, end in ends]
        sends = [self._tell(handle, source, tag) for source in sorted(self._sources)]
        for (dest, end), arrival in zip(ends, arriving, strict=True):
            yield arrival
            self._timeline.given(self._links.event(end.buffer.tobytes(), dest))
        for sent in sends:
            yield sent

    def send_init(self, wire: Wire, dest: int, tag: int) -> Persistent:
        raise NotImplementedError("wires in shared memory are not sent again")

    recv_init = send_init

    def forget(self, message: Persistent) -> None:
        """Give nothing back."""

    def free(self) -> None:
        """The host's transport and the links belong to somebody else."""
