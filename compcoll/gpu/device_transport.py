"""Wires in device memory: sent when the kernels that write them are done, by way of pinned host memory if need be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import WireCorrupted
from ..pending import Pending
from ..transports.base import Persistent, Transport, Wire
from .streams import Timeline


class Sealing(Protocol):
    """The host as checksums need it."""

    def seal(self, wire: Any) -> None:
        """Store in the last 4 bytes the CRC-32C of those before."""

    def sealed(self, wire: Any) -> bool:
        """Tell whether the last 4 bytes still are the CRC-32C of those before."""


class _Departure:
    """A wire that leaves when its bytes are there."""

    __slots__ = ("_before", "_dest", "_message", "_tag", "_transport", "_wire")

    def __init__(self, transport: DeviceTransport, wire: Wire, dest: int, tag: int, before: Pending | None) -> None:
        self._transport = transport
        self._wire = wire
        self._dest = dest
        self._tag = tag
        self._before = before
        self._message: Pending | None = None

    def leave(self, host: Transport) -> bool:
        """Send the wire, if it can be; tell whether it was."""
        if self._before is not None:
            if not self._before.Test():
                return False
            self._before = None
            self._transport.seal(self._wire)
        self._message = host.isend(self._wire, self._dest, self._tag)
        return True

    def Test(self) -> bool:
        self._transport.depart()
        return self._message is not None and self._message.Test()


class _Arriving:
    """A wire on its way to this rank."""

    __slots__ = ("_arrival", "_transport", "_wire")

    def __init__(self, transport: DeviceTransport, wire: Wire, arrival: Pending) -> None:
        self._transport = transport
        self._wire = wire
        self._arrival = arrival

    def Test(self) -> bool:
        """Tell whether it has come to this process. Kernels, not the host, wait for the copy to the device."""
        self._transport.depart()
        if not self._arrival.Test():
            return False
        self._transport.land(self._wire)
        return True

    def __repr__(self) -> str:
        return repr(self._arrival)


class DeviceTransport:
    """One collective's messages from and to device memory.

    A wire is sent when the event behind its encoding has come, or behind its copy to pinned memory; until then the
    collective goes on, so that a segment is encoded while the one before it is copied and sent. Whatever the collective
    waits for lets wires leave that can. They leave in the order in which they were sent. A wire that is passed on goes
    out from where it came in.

    Parameters
    ----------
    host : Transport
        Carries host memory; device memory too, if the timeline stages nothing.
    timeline : Timeline
        Of the collective.
    sealing : Sealing, optional
        For wires that end with a checksum, all of which must be staged: it is stored when a wire has come from the
        device, and looked at before one is taken there. What is passed on keeps its own.
    """

    def __init__(self, host: Transport, timeline: Timeline, sealing: Sealing | None = None) -> None:
        self._host = host
        self._timeline = timeline
        self._sealing = sealing
        self._departures: deque[_Departure] = deque()
        if (leaving := getattr(host, "leaving", None)) is not None:
            leaving.add(self)
        self.rank: int = host.rank
        self.size: int = host.size
        self.nodes: Sequence[int] = host.nodes

    def depart(self) -> None:
        """Send the wires that can leave."""
        while self._departures and self._departures[0].leave(self._host):
            self._departures.popleft()

    def depart_all(self) -> None:
        """Send all wires: each waits for kernels and a copy, but for no other rank."""
        while self._departures:
            self.depart()

    def seal(self, wire: Wire) -> None:
        """Complete a wire that has come from the device: once, however often it leaves."""
        if self._sealing is not None and wire.ready is not None:
            self._sealing.seal(wire.content)
            wire.ready = None

    def land(self, wire: Wire) -> None:
        """Take a wire that has come to its pinned memory to the device."""
        if wire.staging is None:
            return
        if self._sealing is not None and not self._sealing.sealed(wire.staging.content):
            raise WireCorrupted(f"a wire of {wire.staging.nbytes} bytes has changed on its way: its checksum is wrong")
        self._timeline.arrived(wire)

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        departure = _Departure(self, wire.staging or wire, dest, tag, self._timeline.departing(wire))
        self._departures.append(departure)
        self.depart()
        return departure

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        return _Arriving(self, wire, self._host.irecv(wire.staging or wire, source, tag))

    def send_init(self, wire: Wire, dest: int, tag: int) -> Persistent:
        return self._host.send_init(wire, dest, tag)

    def forget(self, message: Persistent) -> None:
        """Give nothing back."""

    def recv_init(self, wire: Wire, source: int, tag: int) -> Persistent:
        return self._host.recv_init(wire, source, tag)

    def free(self) -> None:
        """The host's transport belongs to somebody else."""
