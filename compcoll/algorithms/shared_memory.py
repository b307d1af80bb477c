"""Shared memory: an allreduce of uncompressed values among the ranks of one node, by kernels/shared_sum.cpp.

The buffer passes in pieces through memory that all ranks share. Each rank copies in the values that other ranks add,
adds all ranks' values in its own p-th of the piece, and copies out the other ranks' sums. A rank reads and writes its
buffers once; in between 2(p-1)/p of the buffer's bytes move from cache to cache.

S. Li, T. Hoefler, M. Snir, "NUMA-Aware Shared-Memory Collective Communication for MPI", HPDC 2013 (its scatter-reduce
among threads of one memory).
"""

from __future__ import annotations

from .costs import Costs
from .job import Job
from .record import Algorithm

STREAMED_NBYTES = 8 << 20
"""The bytes from which a process group on MPI uses shared memory for sums inside a node."""


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds: a rank copies (p-1)/p of the buffer in, adds as much, and copies as much out.

    The two barriers count as log2 p messages.
    """
    p = c.world.size
    return (p - 1).bit_length() * c.inside_latency + (p - 1) / p * c.n * (c.encode + c.add + c.decode)


# From 16 KiB on, shared memory took 0.4 to 0.9 times as long as MPI's own collective, measured with 2 and 4 ranks on 2
# cores, alone and beside other work. For fewer bytes the cost model decides.
SHARED_MEMORY: Algorithm[Job] = Algorithm(
    "shared_memory",
    {"allreduce": None},
    _cost,
    inside_node=True,
    always_faster=lambda nbytes, ranks: True,
)
