"""Start and end a process group of PyTorch between the ranks of mpirun or torchrun."""

from __future__ import annotations

import os
import sys
import time
import weakref
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

import compcoll.torch  # noqa: F401  # registers the backend
from compcoll import config
from compcoll.host.cores import usable_cores
from compcoll.transports.nodes import host_name

from ..timing import Seconds

_TIMEOUT = timedelta(seconds=300)
_SECONDS_TO_LET_GO = 1.0
_SECONDS_TO_FINALIZE = 0.5
"""When a rank exits with an error status, MPICH's mpiexec kills ranks that have not finalized MPI: give them time."""


class Place(NamedTuple):
    """A process's rank, the number of ranks, and the number of ranks on its node."""

    rank: int
    size: int
    neighbours: int


def start(backend: str) -> Place:
    """Make this process a rank of the default process group.

    Under mpirun, the ranks are MPI's, and MPI broadcasts the address of their store. If a launcher such as torchrun has
    set RANK, its variables are used instead.

    Parameters
    ----------
    backend : str
        PyTorch's name of the backend, such as ``"gloo"`` or ``"compcoll"``.
    """
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
        return Place(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    from compcoll.torch.backend.rendezvous import rendezvous

    store, rank, size = next(iter(rendezvous(_TIMEOUT)))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return place()


def leave() -> None:
    """End the default process group. Collective: a rank that left early would close connections that gloo still uses.

    Gloo's threads release a collective's tensors after it has ended, and need the GIL for this. If the interpreter
    exits earlier, it aborts (PyTorch 2.13, Python below 3.14). So this function waits for the last tensor's release.
    """
    last = torch.zeros(1)
    held, deadline = weakref.ref(last), time.monotonic() + _SECONDS_TO_LET_GO
    dist.all_reduce(last)
    del last
    time.sleep(1e-3)
    while held() is not None and time.monotonic() < deadline:
        time.sleep(1e-3)
    if "RANK" not in os.environ:
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()
    dist.destroy_process_group()


def give_up(status: int) -> NoReturn:
    """Exit before gloo's threads can abort this process (see `leave`), without other ranks, which may be gone."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" not in os.environ:
        from mpi4py import MPI

        MPI.Finalize()
        time.sleep(_SECONDS_TO_FINALIZE)
    os._exit(status)


def place() -> Place:
    """Return this process's place among MPI's ranks. Collective."""
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    neighbours = node.size
    node.Free()
    return Place(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, neighbours)


def share_cores(place: Place, threads: int | None = None) -> int:
    """Set the number of threads of torch and compcoll. The default is this rank's share of its node's cores.

    Returns
    -------
    int
        The number of threads.
    """
    count = threads or max(usable_cores() // place.neighbours, 1)
    torch.set_num_threads(count)
    os.environ.setdefault(config.THREADS, str(count))
    return count


class Peers:
    """The ranks of a run.

    Attributes
    ----------
    size, nodes : int
        Number of ranks, and of their hosts.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self.nodes = len(set(self.everybody(host_name())))

    def everybody(self, value: Any) -> list[Any]:
        """Return each rank's value. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def largest(self, seconds: Seconds) -> Seconds:
        """Replace each element by the largest of all ranks. Collective."""
        dist.all_reduce(torch.from_numpy(seconds), dist.ReduceOp.MAX)
        return seconds
