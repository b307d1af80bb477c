"""Simulated networks: thousands of ranks on a virtual clock, in one process. Messages take time but have no content.

The network has two levels: ranks on nodes, and links between nodes. A message takes ``α + nbytes β``. It passes
servers, each of which serves one message after the other: a rank's port inside its node, a node's NICs, and the node's
uplink, which is slower than all its NICs if the network is oversubscribed. Each direction has its own servers. Bytes of
a message pass to the next server as soon as they leave the previous one (cut-through). A message that
arrives before it is received waits at its receiver, and keeps no server busy.

Each rank has its own clock, which its kernels and messages advance. A rank runs ahead until it waits for a message
whose time is not yet known. Events at servers are handled in the order of time, since ranks share servers.

If all nodes do the same at the same time, one node is enough: with a `Symmetry`, the first node's ranks stand for all
others. A message to another node is then replaced by the corresponding message that the first node receives.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..algorithms.record import Symmetry
from ..errors import CompcollError, InvalidArgument
from ..pending import Pending, Steps
from ..plan.cost import Link
from ..transports.base import Wire


@dataclass(frozen=True)
class Network:
    """Nodes, and the links inside and between them.

    Parameters
    ----------
    inside, between : Link
        The link of a rank's port inside its node, and that of a NIC between nodes.
    ranks_per_node : int
        Number of consecutive ranks that share a node.
    nics : int
        NICs of a node, assigned to its ranks round-robin.
    oversubscription : float
        Bandwidth of a node's NICs together over that of its uplink.
    message : float
        Host seconds of a message, half of them at each end.
    copied : bool
        Whether the receiver's host copies the bytes inside a node, as with shared memory, instead of ports.
    """

    inside: Link
    between: Link
    ranks_per_node: int = 1
    nics: int = 1
    oversubscription: float = 1.0
    message: float = 0.0
    copied: bool = False

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.nics < 1:
            raise InvalidArgument(
                f"{self.ranks_per_node} ranks per node with {self.nics} NICs: at least 1 of each is needed"
            )
        if not 1 <= self.oversubscription < math.inf:
            raise InvalidArgument(f"oversubscription={self.oversubscription!r} must be a number of at least 1")
        if not 0 <= self.message < math.inf:
            raise InvalidArgument(f"message={self.message!r} s must be finite and not negative")


def has_symmetry(symmetry: Symmetry, ranks: int, per_node: int) -> bool:
    """Return whether nodes can stand for each other: they have equal sizes, powers of two for ``"exclusive"``."""
    if symmetry == "exclusive":
        return ranks & ranks - 1 == 0 and per_node & per_node - 1 == 0
    return symmetry == "rotation" and ranks % per_node == 0


@dataclass(slots=True, eq=False)
class Server:
    """A port, NIC or uplink, which passes one message after the other."""

    per_byte: float
    latency: float = 0.0
    free: float = 0.0


class Node:
    """The servers of a node."""

    def __init__(self, network: Network) -> None:
        near, far = network.inside, network.between
        uplink = far.per_byte * network.oversubscription / network.nics
        ranks, nics = range(network.ranks_per_node), range(network.nics)
        port = 0.0 if network.copied else near.per_byte
        self.ports_out = [Server(port, near.latency) for _ in ranks]
        self.ports_in = [Server(port) for _ in ranks]
        # The latency belongs to the last server of the sending node.
        shared = network.oversubscription > 1
        self.nics_out = [Server(far.per_byte, 0.0 if shared else far.latency) for _ in nics]
        self.nics_in = [Server(far.per_byte) for _ in nics]
        self.up = [Server(uplink, far.latency)] if shared else []
        self.down = [Server(uplink)] if shared else []


@dataclass(slots=True, eq=False)
class _Waited:
    """The request of one end of a message. ``done`` is the time of its completion, infinite while unknown."""

    rank: SimulatedTransport
    wire: Wire
    receives: bool
    posted: float
    near: bool = False
    done: float = math.inf
    waiting: bool = False

    def Test(self) -> bool:
        return self.done <= self.rank.now


@dataclass(slots=True, eq=False)
class _Message:
    """A message. ``tail`` is the time when its last byte leaves the current server."""

    sending: _Waited
    nbytes: int
    path: Sequence[Server]
    tail: float = 0.0
    arrived: float = math.inf
    receiving: _Waited | None = None


class Account(NamedTuple):
    """Times and messages of a run.

    Attributes
    ----------
    seconds : tuple of float
        The time when each simulated rank ended.
    messages : int
        Messages that the simulated ranks sent.
    """

    seconds: tuple[float, ...]
    messages: int


class Simulated:
    """A world of ranks on a virtual clock.

    Parameters
    ----------
    size : int
        Number of ranks.
    network : Network
        The network between them.
    symmetry : {"none", "rotation", "exclusive"}
        Unless "none", the first node's ranks stand for all. The caller must ensure that all nodes do the same.
    progress : callable, optional
        Called regularly with the number of events since the last call.

    Attributes
    ----------
    transports : list of SimulatedTransport
        The transports of the simulated ranks.
    """

    def __init__(
        self,
        size: int,
        network: Network,
        symmetry: Symmetry = "none",
        progress: Callable[[int], object] | None = None,
    ) -> None:
        per_node = network.ranks_per_node
        if size < 1:
            raise InvalidArgument(f"{size} ranks: at least 1 is needed")
        if symmetry != "none" and not has_symmetry(symmetry, size, per_node):
            reason = "nodes differ" if symmetry == "rotation" else "powers of two are needed"
            raise InvalidArgument(f"{size} ranks, {per_node} per node: {reason}, so no node can stand for all")
        self.size = size
        self.network = network
        self._symmetry = symmetry
        self._progress = progress
        simulated = size if symmetry == "none" else per_node
        self._nodes = [Node(network) for _ in range(-(-simulated // per_node))]
        nodes = [rank // per_node for rank in range(size)]
        self.transports = [SimulatedTransport(self, rank, size, nodes) for rank in range(simulated)]
        self._events: list[tuple[float, int, int, _Message]] = []
        self._count = 0
        self._messages = 0
        self._sent: dict[int, list[_Message]] = {}
        self._expected: dict[int, list[_Waited]] = {}
        self._paths: dict[tuple[int, int], tuple[Server, ...]] = {}

    def run(self, steps: Sequence[Steps], starts: Sequence[float] = (), opened: Sequence[float] = ()) -> Account:
        """Run the steps of each simulated rank to their end.

        Parameters
        ----------
        steps : sequence of Steps
            An algorithm's generator for each of `transports`.
        starts : sequence of float
            The time when each rank begins; 0 by default.
        opened : sequence of float
            The time when each rank's handshake ends; 0 by default. Until then, it may send, but not use received data.

        Raises
        ------
        CompcollError
            If ranks wait for messages that no rank sends.
        """
        for transport, start in zip(self.transports, starts, strict=False):
            transport.now = start
        for transport, end in zip(self.transports, opened, strict=False):
            transport.opened = end
        for transport, own in zip(self.transports, steps, strict=True):
            transport.steps = own
            transport.ended = False
        for transport in self.transports:
            _advance(transport)
        events, handled = self._events, 0
        while events:
            time, _, stage, message = heapq.heappop(events)
            self._pass(time, stage, message)
            handled += 1
            if self._progress is not None and handled & 0xFFF == 0:
                self._progress(0x1000)
        stuck = [transport.rank for transport in self.transports if not transport.ended]
        if stuck:
            raise CompcollError(f"deadlock: of {len(self.transports)} ranks {len(stuck)} wait, for example {stuck[0]}")
        return Account(tuple(transport.now for transport in self.transports), self._messages)

    def send(self, source: SimulatedTransport, wire: Wire, dest: int, tag: int) -> _Waited:
        """Send a message at the source's time."""
        sending = _Waited(source, wire, False, source.now)
        origin, target = self._image(source.rank, dest)
        key = (tag * self.size + origin) * self.size + target
        message = _Message(sending, wire.nbytes, self._path(source.rank, dest, target))
        expected = self._expected.get(key)
        if expected:
            self._match(message, expected.pop(0))
        else:
            self._sent.setdefault(key, []).append(message)
        self._messages += 1
        self._count += 1
        heapq.heappush(self._events, (source.now, self._count, 0, message))
        return sending

    def receive(self, dest: SimulatedTransport, wire: Wire, source: int, tag: int) -> _Waited:
        """Post a receive at the dest's time."""
        per_node = self.network.ranks_per_node
        near = source // per_node == dest.rank // per_node
        receiving = _Waited(dest, wire, True, dest.now, near)
        key = (tag * self.size + source) * self.size + dest.rank
        sent = self._sent.get(key)
        if sent:
            message = sent.pop(0)
            self._match(message, receiving)
            if message.arrived < math.inf:
                self._deliver(message, receiving)
        else:
            self._expected.setdefault(key, []).append(receiving)
        return receiving

    def _image(self, source: int, dest: int) -> tuple[int, int]:
        """Return the source and dest of the message that stands for this one. Its dest is a simulated rank."""
        if self._symmetry == "none":
            return source, dest
        inner = dest % self.network.ranks_per_node
        if self._symmetry == "rotation":
            return (source - (dest - inner)) % self.size, inner
        return source ^ (dest - inner), inner

    def _path(self, source: int, dest: int, image: int) -> tuple[Server, ...]:
        """Return a message's servers: those of the source's node, then those of the dest's image."""
        path = self._paths.get((source, dest))
        if path is None:
            network = self.network
            per_node = network.ranks_per_node
            here, there = self._nodes[source // per_node], self._nodes[image // per_node]
            first, last = source % per_node, image % per_node
            if source // per_node == dest // per_node:
                path = here.ports_out[first], there.ports_in[last]
            else:
                out, into = here.nics_out[first % network.nics], there.nics_in[last % network.nics]
                path = (out, *here.up, *there.down, into)
            self._paths[source, dest] = path
        return path

    @staticmethod
    def _match(message: _Message, receiving: _Waited) -> None:
        wire = receiving.wire
        room = wire.buffer.nbytes
        if message.nbytes > room or (wire.exact and message.nbytes != room):
            raise CompcollError(
                f"a message of {message.nbytes} bytes came to rank {receiving.rank.rank}, which expected {room}"
            )
        wire.nbytes = message.nbytes
        message.receiving = receiving

    def _pass(self, time: float, stage: int, message: _Message) -> None:
        """Handle the arrival of a message's first byte at a stage of its path."""
        server = message.path[stage]
        start = max(time, server.free)
        server.free = start + message.nbytes * server.per_byte
        message.tail = max(server.free, message.tail)
        if stage == 0:
            _complete(message.sending, message.tail)
        if stage + 1 < len(message.path):
            message.tail += server.latency
            self._count += 1
            heapq.heappush(self._events, (start + server.latency, self._count, stage + 1, message))
            return
        message.arrived = message.tail
        if message.receiving is not None:
            self._deliver(message, message.receiving)

    @staticmethod
    def _deliver(message: _Message, receiving: _Waited) -> None:
        if isinstance(receiving.wire.buffer, memoryview):  # a message with content, such as a handshake's
            receiving.wire.content[:] = message.sending.wire.content
        _complete(receiving, max(message.arrived, receiving.posted))


class SimulatedTransport:
    """One rank's end of a `Simulated` world.

    Attributes
    ----------
    now : float
        The rank's time.
    opened : float
        The time when its handshake ends.
    """

    def __init__(self, world: Simulated, rank: int, size: int, nodes: Sequence[int]) -> None:
        self.rank, self.size, self.nodes = rank, size, nodes
        self.world = world
        self.now = self.opened = 0.0
        self.steps: Steps = iter(())  # type: ignore[assignment]
        self.ended = True
        self.half_message = world.network.message / 2
        self.copy = world.network.inside.per_byte if world.network.copied else 0.0

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        self.now += self.half_message
        return self.world.send(self, wire, dest, tag)

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        return self.world.receive(self, wire, source, tag)


def _advance(rank: SimulatedTransport) -> None:
    """Run a rank until it waits for a message whose time is unknown."""
    for pending in rank.steps:
        if pending is None:
            continue
        assert isinstance(pending, _Waited)
        if pending.done == math.inf:
            pending.waiting = True
            return
        _arrive(rank, pending)
    rank.ended = True


def _arrive(rank: SimulatedTransport, waited: _Waited) -> None:
    rank.now = max(rank.now, rank.opened, waited.done)
    if waited.receives:
        rank.now += rank.half_message
        if rank.copy and waited.near:
            rank.now += rank.copy * waited.wire.nbytes


def _complete(waited: _Waited, time: float) -> None:
    waited.done = time
    if waited.waiting:
        waited.waiting = False
        _arrive(waited.rank, waited)
        _advance(waited.rank)
