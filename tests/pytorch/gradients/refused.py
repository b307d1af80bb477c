"""What compress() says where MPI is asked for and did not start the ranks; or, with arguments, has no threads.

The arguments: the level of threads that mpi4py asks for, and a file where gloo's ranks meet.
"""

from __future__ import annotations

import sys

import mpi4py
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from osu_like_bench.training.processes import leave

if len(sys.argv) > 1:
    mpi4py.rc.thread_level = sys.argv[1]
    from mpi4py import MPI

    place = {"rank": MPI.COMM_WORLD.rank, "world_size": MPI.COMM_WORLD.size}
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], MPI.COMM_WORLD.size), **place)
else:
    dist.init_process_group("gloo")
try:
    compcoll.torch.compress(
        DistributedDataParallel(torch.nn.Linear(40, 40)), transport="mpi" if len(sys.argv) == 1 else "auto"
    )
except compcoll.CompcollError as error:
    print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", flush=True)
leave()
