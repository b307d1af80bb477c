"""The nodes of a transport's ranks: which ranks share a node, its cores, and its shared memory."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from typing import Any

from ..host.cores import Cores, own_cores
from .base import LibraryConnection
from .shared import Mail, Offer, Room, Shared, accept, offer, withdraw


def host_name() -> str:
    """Return a name for this machine, or for the part whose processes share memory and network access.

    It consists of the host's name, its running kernel and the network name space.
    """
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{platform.node()} {own_cores().kernel} {network}"


def find_nodes(connection: LibraryConnection, name: str, progress: Callable[[], object]) -> None:
    """Set a connection's ``nodes``, ``cores``, ``shared`` and ``mail``. Collective.

    With containers or network name spaces, ranks of one machine may be on several nodes.

    Parameters
    ----------
    connection : LibraryConnection
        A connection that can already gather.
    name : str
        Name of this rank's node.
    progress : callable
        Advances other messages while a rank waits for a message through shared memory.
    """
    own, rank, size, gather = own_cores(), connection.rank, connection.size, connection.gather
    if size == 1:
        connection.nodes, connection.cores = (0,), own.share([own])
        return
    names = gather(lambda: name)
    here = [each for each in range(size) if names[each] == name]
    first, place, ranks = here[0], here.index(rank), len(here)
    room, memory = Room(ranks, size), None
    with contextlib.ExitStack() as ending:

        def offered() -> tuple[Offer | None, tuple[Any, ...]]:
            nonlocal memory
            made = offer(room) if place == 0 and ranks > 1 else None
            if made is None:
                return None, own.parts
            ending.callback(withdraw, made[1])
            memory = made[0]
            return made[1], own.parts

        found = gather(offered)
        connection.cores = cores = own.share([Cores.of(*parts) for _, parts in found])

        def accepted() -> tuple[bool, float]:
            nonlocal memory
            given = found[first][0]
            if memory is None and given is not None:
                memory = accept(Offer(*given))
            return memory is not None or ranks == 1, cores

        reached = gather(accepted)
    order: dict[str, int] = {}
    connection.nodes = nodes = tuple(order.setdefault(each, len(order)) for each in names)
    if memory is not None and all(each for each, _ in reached):
        connection.shared = Shared(room.sums(memory, min(reached[each][1] for each in here) < 1), place, ranks)
        connection.mail = Mail(room, memory, nodes, progress)
