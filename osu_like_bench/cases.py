"""The collectives as benchmark cases: their sizes, buffers, calls, and a reference result by MPI.

Buffers have the shape (parts, m), with one part, or one for each rank. Sizes are defined as in OSU's benchmarks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from compcoll import config
from compcoll.communicator import Communicator
from compcoll.host.cores import own_cores

from .data import Array
from .timing import Seconds

ROOT = 0

SPREADS: Mapping[str, Callable[[int, int], list[int]]] = {
    "equal": lambda length, p: [length] * p,
    "linear": lambda length, p: [2 * length * (rank + 1) // (p + 1) for rank in range(p)],
    "one": lambda length, p: [length * p] + [0] * (p - 1),
}
"""Functions of a mean length and a number of ranks that return a length for each rank: of its contribution to
allgatherv, or of the part that every rank sends to it in alltoallv.

All are equal, or they grow with the rank, or all but that of rank 0 are 0.
"""


@dataclass(frozen=True)
class Case:
    """One collective.

    Attributes
    ----------
    name, title : str
        The name of compcoll's method, and the name in OSU's title line.
    of_mpi : str
        The name of mpi4py's method.
    size_is : str
        The meaning of a message's size, for the head of a table.
    busbw : callable
        nccl-tests' factor between algbw and busbw, for a number of ranks.
    split_in, split_out : bool
        Whether the input, and the output, has a part for each rank.
    size_is_split : bool
        Whether a message's size is that of all parts of the input together.
    reduces : bool
        Whether the collective adds the values of all ranks.
    same_everywhere : bool
        Whether all ranks get the same result.
    rooted : bool
        Whether the collective has a root, which is `ROOT`.
    at_root : bool
        Whether only the root gets a result.
    spread : str
        For parts of different lengths, which are measured without a codec, one of `SPREADS`; else empty.
    mean_length : int
        With ``spread``, the mean length of a part.
    """

    name: str
    title: str
    of_mpi: str
    size_is: str
    busbw: Callable[[int], float] = lambda p: (p - 1) / p
    split_in: bool = False
    split_out: bool = False
    size_is_split: bool = False
    reduces: bool = False
    same_everywhere: bool = True
    rooted: bool = False
    at_root: bool = False
    spread: str = ""
    mean_length: int = 0

    def _counts(self, ranks: int) -> list[int]:
        return SPREADS[self.spread](self.mean_length, ranks)

    def has_result(self, rank: int) -> bool:
        """Return whether a rank gets a result."""
        return rank == ROOT or not self.at_root

    def native(self, comm: MPI.Intracomm, x: Array, out: Array) -> Callable[[], Any]:
        """Return mpi4py's call as a function without arguments."""
        method = getattr(comm, self.of_mpi)
        if self.name == "bcast":
            return partial(method, out, ROOT)
        if self.spread:
            counts = self._counts(comm.size)
            if self.split_in:
                return partial(method, [x, counts], [out, [counts[comm.rank]] * comm.size])
            return partial(method, x, [out, counts])
        return partial(method, x, out, **{"root": ROOT} if self.rooted else {})

    def compressed(self, comm: Communicator, x: Any, out: Any, **options: Any) -> Callable[[], Any]:
        """Return compcoll's call as a function without arguments. With ``spread`` it returns a new array."""
        method = getattr(comm, self.name)
        if self.spread:
            return partial(method, x[0], *([self._counts(comm.size)] if self.split_in else []), **options)
        got = out if self.split_in or self.split_out else out[0]
        root = (ROOT,) if self.rooted else ()
        return partial(
            method, x if self.split_in else x[0], *root, out=got if self.has_result(comm.rank) else None, **options
        )

    def length(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """Return the number of elements in a part of messages of ``nbytes`` bytes; 0 if there would be none."""
        return nbytes // itemsize // (ranks if self.size_is_split else 1)

    def size(self, length: int, itemsize: int, ranks: int) -> int:
        """Return the size in bytes of messages whose parts have ``length`` elements."""
        return length * itemsize * (ranks if self.size_is_split else 1)

    def shapes(self, length: int, ranks: int, rank: int = 0) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of a rank's input and output."""
        if self.spread:
            counts = SPREADS[self.spread](length, ranks)
            if self.split_in:
                return (1, sum(counts)), (1, ranks * counts[rank])
            return (1, counts[rank]), (1, sum(counts))
        return (ranks if self.split_in else 1, length), (ranks if self.split_out else 1, length)

    def prepare(self, x: Array, out: Array, rank: int) -> None:
        """Fill the output with NaN, so that only the collective can make it correct; with x on the root of bcast.

        Ranks that get no result have zeros.
        """
        out.fill(np.nan if self.has_result(rank) else 0)
        if self.name == "bcast" and rank == ROOT:
            np.copyto(out, x)

    def reference(self, comm: MPI.Intracomm, x: Array) -> Array:
        """Return the result of MPI's collective in float64; not with ``spread``. Collective."""
        wide = np.ascontiguousarray(x, np.float64)
        out = np.empty(self.shapes(x.shape[1], comm.size)[1])
        self.prepare(wide, out, comm.rank)
        self.native(comm, wide, out)()
        return out


_TO_ROOT: dict[str, Any] = {"same_everywhere": False, "rooted": True, "at_root": True}

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("allreduce", "Allreduce", "Allreduce", "a rank's buffer", lambda p: 2 * (p - 1) / p, reduces=True),
        Case("allgather", "Allgather", "Allgather", "a rank's contribution", split_out=True),
        Case("allgatherv", "Allgatherv", "Allgatherv", "mean over the ranks", spread="linear"),
        Case(
            "reduce_scatter",
            "Reduce_scatter",
            "Reduce_scatter_block",
            "a rank's input, rounded down to equal parts",
            split_in=True,
            size_is_split=True,
            reduces=True,
            same_everywhere=False,
        ),
        Case("reduce", "Reduce", "Reduce", "a rank's buffer", lambda p: 1.0, reduces=True, **_TO_ROOT),
        Case("bcast", "Broadcast", "Bcast", "the root's buffer", lambda p: 1.0, rooted=True),
        Case("gather", "Gather", "Gather", "a rank's contribution", split_out=True, **_TO_ROOT),
        Case(
            "scatter",
            "Scatter",
            "Scatter",
            "the root's part for each rank",
            split_in=True,
            same_everywhere=False,
            rooted=True,
        ),
        Case(
            "alltoall",
            "All-to-All",
            "Alltoall",
            "a rank's part for each other rank",
            split_in=True,
            split_out=True,
            same_everywhere=False,
        ),
        Case(
            "alltoallv",
            "All-to-Allv",
            "Alltoallv",
            "mean of a rank's parts for the ranks",
            split_in=True,
            split_out=True,
            same_everywhere=False,
            spread="linear",
        ),
    )
}


class Ranks:
    """The ranks of a run: their MPI communicator, and compcoll's.

    Attributes
    ----------
    cores : float
        This rank's share of the node's cores.
    nodes : int
        Number of nodes.
    first_on_node : bool
        Whether this rank is the first on its node.
    """

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.compcoll = Communicator(self.comm)
        nodes, own = list(self.compcoll.nodes), own_cores()
        self.nodes = len(set(nodes))
        self.first_on_node = nodes.index(nodes[self.comm.rank]) == self.comm.rank
        self.cores = own.share(self.comm.allgather(own))

    @cached_property
    def one_thread(self) -> Communicator:
        """A communicator with one thread for each kernel. Its first use is collective."""
        before = os.environ.get(config.THREADS)
        os.environ[config.THREADS] = "1"
        try:
            return Communicator(self.comm)
        finally:
            del os.environ[config.THREADS]
            if before is not None:
                os.environ[config.THREADS] = before

    def largest(self, values: Seconds) -> Seconds:
        """Replace each element by the largest of all ranks. Collective."""
        result = np.empty_like(values)
        self.comm.Allreduce(values, result, MPI.MAX)
        return result
