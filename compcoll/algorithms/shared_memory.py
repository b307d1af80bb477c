"""Through shared memory: an allreduce of uncompressed values among the ranks of one node, by kernels/shared_sum.cpp.

The buffer goes in pieces through memory that all ranks have in common. Each rank copies in what the others will add,
adds all ranks' values for its own p-th of the piece, and copies out the sums of the others. A rank reads and writes its
buffers once; in between 2(p-1)/p of the buffer's bytes pass from cache to cache.

S. Li, T. Hoefler, M. Snir, "NUMA-Aware Shared-Memory Collective Communication for MPI", HPDC 2013 (its scatter-reduce
among threads of one memory).
"""

from __future__ import annotations

from .costs import Costs
from .job import Job
from .record import Algorithm

STREAMED_NBYTES = 8 << 20
"""The size from which a process group of MPI leaves sums inside a node to shared memory."""


def _cost(c: Costs, collective: str) -> float:
    """Through shared memory: a rank copies (p-1)/p of the buffer in, adds as much, and copies as much out. To wait for
    everybody, twice, is taken for log2 p messages.
    """
    p = c.world.size
    return (p - 1).bit_length() * c.inside_latency + (p - 1) / p * c.n * (c.encode + c.add + c.decode)


def _always_faster(nbytes: float, ranks: int) -> bool:
    """Shared memory took 0.4 to 0.9 times as long as MPI's own from 16 KiB on, on 2 and 4 ranks of 2 cores, alone and
    beside other work. Of fewer bytes the cost model decides.
    """
    return True


SHARED_MEMORY: Algorithm[Job] = Algorithm(
    "shared_memory",
    ("allreduce",),
    _cost,
    restricted=True,
    in_turn=True,
    inside_node=True,
    always_faster=_always_faster,
)
