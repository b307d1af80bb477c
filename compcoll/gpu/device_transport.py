"""Send wires in device memory when their kernels are done, through pinned host memory if needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..errors import WireCorrupted
from ..host.device import HostDevice
from ..pending import Pending
from ..transports.base import Transport, Wire
from .streams import Timeline


class _Departure:
    """The request of a send that starts when the wire's bytes are valid."""

    __slots__ = ("_before", "_dest", "_message", "_tag", "_transport", "_wire")

    def __init__(self, transport: DeviceTransport, wire: Wire, dest: int, tag: int, before: Pending | None) -> None:
        self._transport = transport
        self._wire = wire
        self._dest = dest
        self._tag = tag
        self._before = before
        self._message: Pending | None = None

    def leave(self, host: Transport) -> bool:
        """Send the wire if its bytes are valid; return whether it was sent."""
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


class Arriving:
    """The request of a receive.

    Parameters
    ----------
    arrival : Pending
        The request of the message.
    land : callable
        Called when the message has arrived. Kernels, not the host, wait for the copies that it launches.
    depart : callable, optional
        Called at each test, to send wires that are ready.
    """

    __slots__ = ("_arrival", "_depart", "_land")

    def __init__(self, arrival: Pending, land: Callable[[], None], depart: Callable[[], None] = lambda: None) -> None:
        self._arrival = arrival
        self._land = land
        self._depart = depart

    def Test(self) -> bool:
        self._depart()
        if not self._arrival.Test():
            return False
        self._land()
        return True

    def __repr__(self) -> str:
        return repr(self._arrival)


class DeviceTransport:
    """One collective's messages from and to device memory.

    A wire is sent when the event after its encoding, or after its copy to pinned memory, has completed. Until then the
    collective goes on, so that a segment is encoded while the previous one is copied and sent. Every test of a request
    also sends the wires that are ready, in the order of their `isend`. A forwarded wire is sent from the memory that
    received it.

    Parameters
    ----------
    host : Transport
        Carries host memory, and device memory if the timeline does not stage.
    timeline : Timeline
        The collective's timeline.
    sealing : HostDevice, optional
        Stores and checks the wires' checksums; None if wires have none. All wires must then be staged. The checksum is
        stored after the copy from the device, and checked before the copy to the device. Forwarded wires keep theirs.
    """

    def __init__(self, host: Transport, timeline: Timeline, sealing: HostDevice | None = None) -> None:
        self.rank, self.size, self.nodes = host.rank, host.size, host.nodes
        self._host = host
        self._timeline = timeline
        self._sealing = sealing
        self._departures: deque[_Departure] = deque()
        if (leaving := getattr(host, "leaving", None)) is not None:
            leaving.add(self)

    def depart(self) -> None:
        """Send the wires that are ready, in order."""
        while self._departures and self._departures[0].leave(self._host):
            self._departures.popleft()

    def depart_all(self) -> None:
        """Send all wires. This waits for kernels and copies, but for no other rank."""
        while self._departures:
            self.depart()

    def seal(self, wire: Wire) -> None:
        """Store the checksum of a wire that was copied from the device, once for all its sends."""
        if self._sealing is not None and wire.ready is not None:
            self._sealing.seal(wire.content)
            wire.ready = None

    def land(self, wire: Wire) -> None:
        """Check a wire that has arrived in pinned memory, and copy it to the device."""
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
        return Arriving(self._host.irecv(wire.staging or wire, source, tag), lambda: self.land(wire), self.depart)
