"""A transport with all ranks in one process: for tests and experiments without mpirun."""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import CompcollError
from ..pending import Pending
from .base import Connection, Wire
from .shared import Mail, Room, Shared

Key = tuple[int, int, int]
"""Source, destination and tag."""


class _Transfer:
    """One end of a message."""

    __slots__ = ("done", "key", "wire", "world")

    def __init__(self, world: Loopback, key: Key, wire: Wire) -> None:
        self.world = world
        self.key = key
        self.wire = wire
        self.done = False

    def Test(self) -> bool:
        if not self.done:
            self.world.deliver(self.key)
        return self.done

    def __repr__(self) -> str:
        source, dest, tag = self.key
        return f"message {source} → {dest}, tag {tag}, {self.wire.nbytes} bytes"


class Loopback:
    """A world of ranks whose messages are copies in memory, delivered late and in any order that MPI would allow.

    A message is copied when both ends are posted and a random number permits. So a wire that is read or written too
    early causes a wrong result. The memory of posted receives is filled with 0xff.

    Parameters
    ----------
    size : int
        Number of ranks.
    ranks_per_node : int, optional
        Number of consecutive ranks that share a node; all by default.
    seed : int, optional
        Seed of the delivery order. With None, messages are delivered at once, and those of handshakes through the
        nodes' shared memory.

    Examples
    --------
    >>> world = Loopback(4)
    >>> comms = [Communicator(transport) for transport in world.transports]
    >>> sums = world.run([comm.iallreduce(x) for comm, x in zip(comms, inputs)])
    """

    def __init__(self, size: int, ranks_per_node: int | None = None, seed: int | None = None) -> None:
        nodes = [rank // (ranks_per_node or size) for rank in range(size)]
        self.transports = [LoopbackTransport(self, rank, size, nodes) for rank in range(size)]
        for node in set(nodes):
            room = Room(nodes.count(node), size)
            common = room.memory()
            for place, transport in enumerate(each for each in self.transports if nodes[each.rank] == node):
                transport.shared = Shared(room.sums(common), place, room.ranks)
                if seed is None:
                    transport.mail = Mail(room, common, nodes, lambda: None)
        self._random = random.Random(seed) if seed is not None else None
        self._lock = threading.Lock()
        self._sends: dict[Key, deque[_Transfer]] = defaultdict(deque)
        self._receives: dict[Key, deque[_Transfer]] = defaultdict(deque)
        self.announcements: dict[int, str] = {}

    def post(self, transfer: _Transfer, *, sending: bool) -> None:
        """Queue one end of a message for the other end."""
        with self._lock:
            (self._sends if sending else self._receives)[transfer.key].append(transfer)

    def deliver(self, key: Key) -> None:
        """Copy the next message of this source, destination and tag, if both ends are posted and chance permits."""
        with self._lock:
            sends, receives = self._sends[key], self._receives[key]
            if not sends or not receives or (self._random and self._random.random() < 0.5):
                return
            sent, received = sends.popleft(), receives.popleft()
        if sent.wire.nbytes > received.wire.buffer.nbytes:
            raise CompcollError(f"{sent} does not fit into {received.wire.buffer.nbytes} bytes")
        received.wire.nbytes = sent.wire.nbytes
        received.wire.content[:] = sent.wire.content
        sent.done = received.done = True

    def run(self, requests: Iterable[Any], patience: int = 200) -> list[Any]:
        """Advance one request of each rank until all complete, and return their results.

        Raises
        ------
        CompcollError
            In a deadlock: no request advanced for ``patience`` rounds over all ranks. The message then contains the
            errors of requests. Without a deadlock, the error of the lowest rank whose request raised one.
        """
        todo = list(requests)
        order, idle = list(range(len(todo))), 0
        errors: dict[int, BaseException] = {}
        while order and idle < patience:
            if self._random:
                self._random.shuffle(order)
            idle += 1
            for index in list(order):
                before = todo[index].steps
                try:
                    finished = todo[index].test()
                except CompcollError as error:
                    errors[index], finished = error, True
                if finished:
                    order.remove(index)
                if finished or todo[index].steps != before:
                    idle = 0
        if order:
            waiting = "; ".join(f"rank {index} waits for {todo[index].waiting_for!r}" for index in sorted(order))
            raise CompcollError(f"deadlock: {waiting}; errors: {errors}")
        if errors:
            raise errors[min(errors)]
        return [request.wait() for request in todo]


class LoopbackTransport(Connection):
    """One rank's end of a `Loopback` world."""

    def __init__(self, world: Loopback, rank: int, size: int, nodes: list[int]) -> None:
        self.world = world
        self.rank = rank
        self.size = size
        self.nodes = nodes

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        transfer = _Transfer(self.world, (self.rank, dest, tag), wire)
        self.world.post(transfer, sending=True)
        return transfer

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        np.asarray(wire.buffer)[:] = 0xFF
        transfer = _Transfer(self.world, (source, self.rank, tag), wire)
        self.world.post(transfer, sending=False)
        return transfer

    def announce(self, text: str) -> None:
        self.world.announcements[self.rank] = text

    def announced(self) -> Mapping[int, str]:
        return {rank: text for rank, text in tuple(self.world.announcements.items()) if rank != self.rank}
