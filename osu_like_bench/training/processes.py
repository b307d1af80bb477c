"""Ranks of mpirun (or torchrun) as a process group of PyTorch."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from compcoll import config

_TIMEOUT = timedelta(seconds=300)


class Place(NamedTuple):
    """A process among the ranks: its number, how many there are, and how many of those on its node."""

    rank: int
    size: int
    neighbours: int


def start(backend: str) -> Place:
    """Make this process a rank of the default process group.

    Under mpirun the ranks are MPI's, and meet at a store whose address goes over MPI; where a launcher like torchrun
    has set RANK, its variables hold.

    Parameters
    ----------
    backend : str
        Such as ``"gloo"`` or ``"compcoll"``.
    """
    if "RANK" in os.environ:
        if backend == "compcoll":
            import compcoll.torch
        dist.init_process_group(backend, timeout=_TIMEOUT)
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        neighbours = node.size
        node.Free()
        if backend == "compcoll":
            import compcoll.torch  # noqa: F401

            dist.init_process_group(backend, timeout=_TIMEOUT)
        else:
            store = _store(world, "127.0.0.1" if neighbours == world.size else _address())
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)
    return Place(dist.get_rank(), dist.get_world_size(), neighbours)


def _address() -> str:
    return socket.gethostbyname(socket.gethostname())


def _store(world: Any, address: str) -> dist.Store:
    store = None
    if world.rank == 0:
        store = dist.TCPStore(address, 0, world.size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    address, port = world.bcast((address, store.port) if store is not None else None, root=0)
    return store or dist.TCPStore(address, port, world.size, is_master=False, timeout=_TIMEOUT)


def share_cores(place: Place, threads: int | None = None) -> int:
    """Give torch, and compcoll from now on, so many threads; by default this rank's share of its node's cores.

    Returns
    -------
    int
        How many.
    """
    count = threads or max(config.cores() // place.neighbours, 1)
    torch.set_num_threads(count)
    os.environ.setdefault(config.THREADS, str(count))
    return count
