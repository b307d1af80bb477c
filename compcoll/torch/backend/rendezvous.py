"""The rendezvous of processes that MPI started, which needs no MASTER_ADDR, RANK or WORLD_SIZE."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch.distributed as dist

from ...transports.job_end import end_job_with_uncaught_errors, files
from ...transports.library import MPI
from ...transports.nodes import host_name
from ..options import Options
from .channel import SECONDS_TO_MEET, create_channel, watched, world
from .process_group import ProcessGroup

_LONGEST_TEXT = 4096


def rendezvous(timeout: timedelta = timedelta(seconds=SECONDS_TO_MEET)) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield a store, the rank of this process, and the number of ranks.

    The store is a file if all ranks are on one node, and otherwise a server on rank 0. PyTorch's other backends need
    it; a process group on MPI does not.
    """
    rank, size = world()
    end_job_with_uncaught_errors()
    with watched("the rendezvous of all ranks", max(timeout.total_seconds(), SECONDS_TO_MEET)):
        store = _store(rank, size, timeout)
    yield store, rank, size
    raise RuntimeError("a rendezvous by MPI cannot be repeated")


def _store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Make a store for all ranks. Collective."""
    comm = MPI.COMM_WORLD.Dup()
    if len(set(_gathered(comm, crc32(host_name().encode())))) == 1:
        # A FileStore asks no name server; a TCPStore does, even for 127.0.0.1.
        path = _from_rank_0(comm, _temporary_file() if rank == 0 else "")
        files.append(path)
        store: dist.Store = dist.FileStore(path, size)
    elif rank == 0:
        host = os.environ.get("MASTER_ADDR") or MPI.Get_processor_name()
        store = dist.TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
        _from_rank_0(comm, f"{host} {store.port}")
    else:
        host, port = _from_rank_0(comm, "").split()
        store = dist.TCPStore(host, int(port), size, False, timeout, wait_for_workers=False)
    comm.Free()
    return store


def _from_rank_0(comm: MPI.Intracomm, text: str) -> str:
    """Return the text of rank 0 on every rank. Collective."""
    data = bytearray(text.encode().ljust(_LONGEST_TEXT))
    comm.Bcast([data, MPI.BYTE])
    return data.decode().rstrip()


def _gathered(comm: MPI.Intracomm, number: int) -> list[int]:
    """Gather a number from each rank. Collective."""
    numbers = array("q", [0]) * comm.size
    comm.Allgather([array("q", [number]), MPI.INT64_T], [numbers, MPI.INT64_T])
    return numbers.tolist()


def _temporary_file() -> str:
    with tempfile.NamedTemporaryFile(prefix="compcoll-store-", delete=False) as file:
        return file.name


def create(given: Any, options: object) -> ProcessGroup:
    """Make the process group that PyTorch requests.

    The parameters are those of `compcoll.torch.backend.wrapping.create`.

    Raises
    ------
    InvalidArgument
        If MPI does not let several threads call it, or for options of another backend.
    """
    wanted, ranks = Options.given(options), _ranks(given)
    return ProcessGroup(given.store, create_channel(ranks, given.timeout.total_seconds()), ranks, wanted)


def _ranks(given: Any) -> list[int]:
    """Return the rank in MPI.COMM_WORLD of each rank of the group."""
    rank, size = world()
    if given.global_ranks_in_group:
        everybody = dist.group.WORLD
        known = everybody.world_ranks if isinstance(everybody, ProcessGroup) else list(range(size))
        return [known[number] for number in given.global_ranks_in_group]
    if given.group_size == size:
        numbers = _gathered(MPI.COMM_WORLD, given.group_rank)
        return [numbers.index(number) for number in range(size)]
    given.store.set(f"compcoll/{given.group_rank}", str(rank))
    return [int(given.store.get(f"compcoll/{number}")) for number in range(given.group_size)]
