"""The nodes of a transport's ranks: which ranks share a node, its cores, and its shared memory."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

from ..host.cores import Cores, own_cores
from .shared import Mail, Offer, Room, Shared, accept, offer, withdraw

Gather = Callable[[Callable[[], Any]], list[Any]]
"""Calls a function on each rank and returns all results, as `LibraryConnection.gather` does; collective."""


class Nodes(NamedTuple):
    """The nodes of all ranks, and the resources of this rank's node.

    Attributes
    ----------
    nodes : tuple of int
        The number of each rank's node, counted in order of first rank.
    cores : float
        This rank's share of the cores that it may use, if all ranks of the machine that share them use equally many.
        With containers or network name spaces, ranks of one machine may be on several nodes.
    shared : Shared or None
        Memory that the ranks of this node share. Either all nodes with more than one rank have it, or none.
    mail : Mail or None
        The path of handshake messages inside the node.
    """

    nodes: tuple[int, ...]
    cores: float
    shared: Shared | None = None
    mail: Mail | None = None


def host_name() -> str:
    """Return a name for this machine, or for the part whose processes share memory and network access.

    It consists of the host's name, its running kernel and the network name space.
    """
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{platform.node()} {own_cores().kernel} {network}"


def find_nodes(name: str, rank: int, size: int, gather: Gather, progress: Callable[[], object]) -> Nodes:
    """Find the nodes of all ranks, and set up shared memory for the ranks of each node. Collective.

    Parameters
    ----------
    name : str
        Name of this rank's node.
    rank, size : int
        This rank, and the number of ranks.
    gather : callable
        Calls a function on each rank and returns all results.
    progress : callable
        Advances other messages while a rank waits for a message through shared memory.
    """
    own = own_cores()
    if size == 1:
        return Nodes((0,), own.share([own]))
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

        def accepted() -> bool:
            nonlocal memory
            given = found[first][0]
            if memory is None and given is not None:
                memory = accept(Offer(*given))
            return memory is not None or ranks == 1

        reached = gather(accepted)
    order: dict[str, int] = {}
    nodes = tuple(order.setdefault(each, len(order)) for each in names)
    cores = own.share([Cores.of(*parts) for _, parts in found])
    if memory is None or not all(reached):
        return Nodes(nodes, cores)
    return Nodes(nodes, cores, Shared(room.sums(memory), place, ranks), Mail(room, memory, nodes, progress))
