"""What compress() says where MPI did not start the ranks, or not for threads; the argument is what mpi4py asks for."""

from __future__ import annotations

import sys

import mpi4py

if len(sys.argv) > 1:
    mpi4py.rc.thread_level = sys.argv[1]

import torch
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from osu_like_bench.training.processes import start

rank = start("gloo").rank
try:
    compcoll.torch.compress(DistributedDataParallel(torch.nn.Linear(40, 40)))
except compcoll.CompcollError as error:
    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
torch.distributed.barrier()
