"""Many collectives of random kind, size, codec, algorithm and rank count, each checked against a float64 reference.

    launch/mpirun -n 4 python tests/reliability/soak.py 2000

Rank 0 prints one line of JSON: how many there were, and what has grown in the second half: memory, file descriptors,
MPI's requests; besides, its own resident memory at each tenth.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from compcoll import Communicator, IntSum, Request
from compcoll.algorithms.record import REDUCTIONS, UNEVEN, Encodings
from compcoll.codecs.base import ErrorBound
from compcoll.dtypes import DTYPES as FORMATS
from compcoll.pending import Pending
from compcoll.sparse import TopK
from compcoll.transports.mpi import MPITransport
from osu_like_bench.bounds import bound_of, encodings_of, of_blocks, result_bound, spread_out

sys.path.append(str(Path(__file__).resolve().parents[1]))

from oracles.collectives import arguments, counts_of, expected
from promises import ALGORITHMS, CODECS, algorithms_of

LONGEST = 20_000
POOL = 2 * LONGEST
WAYS = {
    "allreduce": [*ALGORITHMS, "auto"],
    "reduce_scatter": [*algorithms_of("reduce_scatter"), "auto"],
    "allgather": ["ring", "direct", "auto"],
    "allgatherv": ["ring", "direct", "auto"],
    "bcast": ["binomial", "auto"],
    "alltoall": ["pairwise", "auto"],
    "alltoallv": ["pairwise", "auto"],
    "reduce": [*algorithms_of("reduce"), "auto"],
    "gather": ["linear", "auto"],
    "scatter": ["linear", "auto"],
}
SPLIT = ("reduce_scatter", "scatter", "alltoall")
"""The collectives whose first axis has a part for each rank."""
DTYPES = [np.float32, np.float32, np.float64, np.float16]


class Counted:
    """A request of MPI's, counted until it tests true."""

    def __init__(self, owner: Watched, request: Pending) -> None:
        self._owner, self._request = owner, request
        owner.open += 1

    def Test(self) -> bool:
        if not self._request.Test():
            return False
        self._owner.open -= 1
        return True


class Watched(MPITransport):
    """MPI, and how many of its requests nobody has seen the end of."""

    open = 0

    def isend(self, *arguments: Any) -> Pending:
        return Counted(self, super().isend(*arguments))

    def irecv(self, *arguments: Any) -> Pending:
        return Counted(self, super().irecv(*arguments))

    def reductions(
        self, collective: str, op: str, root: int | None = None
    ) -> tuple[Callable[[Any, Any], None], Callable[[Any, Any], Pending]]:
        block, start = super().reductions(collective, op, root)
        return block, lambda x, out: Counted(self, start(x, out))

    def iallgatherv(self, *arguments: Any, **counts: Any) -> Pending:
        return Counted(self, super().iallgatherv(*arguments, **counts))

    def ibcast(self, *arguments: Any) -> Pending:
        return Counted(self, super().ibcast(*arguments))

    def ialltoall(self, *arguments: Any) -> Pending:
        return Counted(self, super().ialltoall(*arguments))

    def ialltoallv(self, *arguments: Any, **counts: Any) -> Pending:
        return Counted(self, super().ialltoallv(*arguments, **counts))

    def igather(self, *arguments: Any, **root: Any) -> Pending:
        return Counted(self, super().igather(*arguments, **root))

    def iscatter(self, *arguments: Any, **root: Any) -> Pending:
        return Counted(self, super().iscatter(*arguments, **root))


class Case:
    """One collective: the same on all ranks, as it is drawn from the same random numbers."""

    def __init__(self, draw: random.Random, size: int, pools: list[np.ndarray]) -> None:
        self.size = size
        self.collective = draw.choice(["allreduce"] * 5 + list(WAYS))
        self.codec = draw.choice([*CODECS, IntSum(), TopK(density=0.1)])
        self.algorithm = draw.choice(WAYS[self.collective])
        if isinstance(self.codec, IntSum | TopK) and self.collective != "allreduce":
            self.codec = None
        if isinstance(self.codec, TopK):
            self.algorithm = draw.choice(["sparse_ring", "sparse_direct", "sparse_native"])
        self.op = draw.choice(["sum", "mean"])
        self.root = draw.randrange(size)
        self.dtype = draw.choice(DTYPES)
        n = int(LONGEST ** draw.random()) - 1
        if self.collective in SPLIT:
            n -= n % size
        lengths = [n] * size
        if self.collective in UNEVEN:
            lengths = [draw.randrange(n + 1) for _ in range(size)]
        begins = [draw.randrange(POOL - n) for _ in range(size)]
        self.inputs = [pools[r][b : b + m].astype(self.dtype) for r, (b, m) in enumerate(zip(begins, lengths))]

    def start(self, comm: Communicator) -> Request:
        x, options = self.inputs[comm.rank], {"codec": self.codec, "algorithm": self.algorithm}
        if self.collective in REDUCTIONS:
            options["op"] = self.op
        options |= arguments(self.collective, x.size, self.size, comm.rank, self.root)
        return getattr(comm, f"i{self.collective}")(x, **options)

    def expected(self, rank: int, values: list[np.ndarray]) -> Any:
        """What the collective makes of these, in float64."""
        mean = self.collective in REDUCTIONS and self.op == "mean"
        result = expected(self.collective, values, rank, self.root)
        return result / self.size if mean and result is not None else result

    def check(self, rank: int, request: Request) -> None:
        result = request.wait()
        inputs = [x.astype(np.float64) for x in self.inputs]
        right = self.expected(rank, inputs)
        if right is None:
            assert result is None
            return
        assert result.shape == right.shape and result.dtype == self.dtype, (result.shape, right.shape)
        codec = None if request.stats.codec is None else self.codec
        difference = np.abs(result.astype(np.float64) - right)
        bound = self.bound(rank, request.stats.algorithm, codec, inputs)
        assert (difference <= bound).all(), f"{self}: off by {difference.max()}, {np.max(bound)} allowed"

    def bound(self, rank: int, algorithm: str, codec: Any, inputs: list[np.ndarray]) -> np.ndarray:
        """How far each element may be from what is expected, from the largest magnitude of its block on all ranks."""
        name = np.dtype(self.dtype).name
        reduces = self.collective in REDUCTIONS
        terms = self.size if reduces else 1
        if isinstance(codec, IntSum):  # half a level for each rank
            levels = (2 ** (codec.bits - 1) - 1) // self.size
            lossy = ErrorBound(codec.block, 0.5001 / levels)
            loss = result_bound(ErrorBound(), encodings_of("allreduce", "native", self.size, 1), name, terms)
            loss = ErrorBound(lossy.block, lossy.relative + loss.relative, 0.0, loss.absolute)
        else:
            # Blocks begin with every chunk: in some collectives with every rank's part.
            path = encodings_of(self.collective, algorithm, self.size, 1)
            if codec is not None and codec.homomorphic:  # values are rounded once by any algorithm
                path = Encodings(1, 1)
            loss = result_bound(bound_of(codec, name, self.size), path, name, terms)
        # Means multiply each value by 1/p, which is itself rounded; and the reference is a float64, too.
        loss = replace(loss, relative=loss.relative + 4 * FORMATS[name].rounding)
        bounds = []
        for source, values in enumerate(inputs):
            counts = [values.size // self.size] * self.size if self.collective in SPLIT else [values.size]
            if self.collective == "alltoallv":
                counts = counts_of(values.size, self.size, source)
            pieces = np.split(values, np.cumsum(counts)[:-1])
            lost = [of_blocks(loss, piece) if piece.size else piece for piece in pieces]
            in_parts = replace(loss, absolute=0.0)  # that is added once, below
            spread = [spread_out(in_parts, each, piece.size) for each, piece in zip(lost, pieces, strict=True)]
            bounds.append(np.concatenate(spread))
        if isinstance(codec, IntSum):  # the largest of all ranks' magnitudes, as often as there are ranks
            bounds = [np.max(bounds, axis=0)] * self.size
        return self.expected(rank, bounds) * (1 + 1e-9) + self.size * loss.absolute + 1e-30

    def __repr__(self) -> str:
        return (
            f"{self.collective} of {[x.size for x in self.inputs]} {np.dtype(self.dtype).name} by {self.algorithm}, "
            f"{self.codec!r}, {self.op}, root {self.root}"
        )


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(world: MPI.Intracomm, count: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    pools = [np.random.default_rng([seed, rank]).standard_normal(POOL) for rank in range(world.size)]
    groups = [world.Split(world.rank < size, world.rank) for size in range(1, world.size + 1)]
    transports = [Watched(group) for group in groups]
    comms = [Communicator(transport, timeout=60) for transport in transports]
    under_way: list[tuple[Case, Communicator, Request]] = []
    warm, before = count // 2, (0, 0)
    resident = []
    started = time.perf_counter()
    for number in range(count):
        if number % (count // 10) == 0:
            resident.append(resident_nbytes() >> 20)
        if number == warm:
            before = resident_nbytes(), len(os.listdir("/proc/self/fd"))
        size = draw.randint(1, world.size)
        case, ahead = Case(draw, size, pools), draw.choice([0, 0, 0, 1, 3])
        if world.rank >= size:
            continue
        under_way.append((case, comms[size - 1], case.start(comms[size - 1])))
        while len(under_way) > ahead:
            done, comm, request = under_way.pop(0)
            done.check(comm.rank, request)
    for done, comm, request in under_way:
        done.check(comm.rank, request)
    grown = resident_nbytes() - before[0], len(os.listdir("/proc/self/fd")) - before[1]
    left = sum(transport.open for transport in transports)
    most = [world.allreduce(value, MPI.MAX) for value in (*grown, left)]
    for comm in comms:
        comm.free()
    return {
        "collectives": count,
        "ranks": world.size,
        "seconds": round(time.perf_counter() - started, 1),
        "resident_mib": resident,
        "memory_grown_by": most[0],
        "descriptors_grown_by": most[1],
        "requests_left": most[2],
    }


if __name__ == "__main__":
    told = soak(MPI.COMM_WORLD, int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(told), flush=True)
