"""MPI's own collectives."""

from __future__ import annotations

from collections.abc import Callable

from ..codecs.base import Array
from ..dtypes import HALVES
from ..host.device import HostDevice
from ..kernels import _host
from ..pending import OrderingTicket, Pending, Steps
from ..stats import UNKNOWN, Stats
from .costs import Costs
from .job import Job
from .record import REDUCTIONS, ROOTED, UNEVEN, Algorithm

MOST = 2**31 - 1
"""The most elements in all for MPI's own collectives, whose counts and displacements are ints."""


def move(start: Callable[[Array, Array], Pending], x: Array, out: Array, ticket: OrderingTicket, stats: Stats) -> Steps:
    """Start one of MPI's nonblocking collectives when its ticket's turn has come, and wait for it."""
    started = start(x, out)
    ticket.used = True
    stats.wire_nbytes = UNKNOWN
    yield started


class Reduction:
    """MPI's reduction by one operation of one element type. 16-bit floats that MPI does not know are added in float32.

    Parameters
    ----------
    reduce : MPIReduction or Function
        The blocking reduction of its first argument into the second.
    start : callable
        Starts the nonblocking reduction.
    device : HostDevice
        The device of the arrays.
    dtype : str
        Their element type.
    scale : float
        Factor of the result.

    Attributes
    ----------
    operation : Operation
        The blocking reduction, with conversions and factor.
    """

    def __init__(
        self,
        reduce: _host.MPIReduction | _host.Function,
        start: Callable[[Array, Array], Pending],
        device: HostDevice,
        dtype: str,
        scale: float,
    ) -> None:
        self._reduce, self._start = reduce, start
        self._device, self._dtype, self._scale = device, dtype, scale
        as_given = scale == 1.0 and dtype not in HALVES
        self.operation: _host.Operation = reduce if as_given else _host.Function(self._convert_and_reduce, UNKNOWN)

    def _convert_and_reduce(self, x: Array, out: Array) -> None:
        values, sums = self._device.for_mpi(x, out, self._dtype)
        self._reduce(values, sums)
        self._device.from_mpi(sums, out, self._dtype, self._scale)

    def steps(self, x: Array, out: Array, ticket: OrderingTicket, stats: Stats) -> Steps:
        """Start the reduction when its ticket's turn has come, and wait for it."""
        values, sums = self._device.for_mpi(x, out, self._dtype)
        yield from move(self._start, values, sums, ticket, stats)
        self._device.from_mpi(sums, out, self._dtype, self._scale)


def _cost(c: Costs, collective: str) -> float:
    """Predict the seconds of MPI's own collective: the fastest of the usual algorithms. γ: seconds to add a byte.

    Allreduce: recursive doubling, ``log2 p (α + n β + n γ)``, or Rabenseifner's, ``2 log2 p α + 2 (p-1)/p n β +
    (p-1)/p n γ``. Reduce: the same, of a tree. Reduce_scatter: half of the latter. Allgather, and gather by a tree:
    ``log2 p α + (p-1) n β``. Scatter: ``log2 p α + (p-1)/p n β``. Broadcast: a tree, ``log2 p (α + n β)``, or scatter
    and allgather, ``(log2 p + p - 1) α + 2 (p-1)/p n β``. Alltoall: pairwise, ``(p-1) α + (p-1)/p n β``.

    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    p, k = c.world.size, c.world.per_node
    levels = (p - 1).bit_length()
    share = (p - 1) / p
    # In a ring one rank of a node sends to the next node; in exchanges over a distance all its ranks do.
    beta = max(c.inside if k > 1 or c.world.nodes == 1 else 0.0, c.between * c.world.crossing)
    if collective in ("alltoall", "alltoallv"):
        chunk = c.n / p
        near, far = k - 1, p - k
        return (p - 1) * c.latency + chunk * max(c.inside * near, c.between * far * k)
    if collective in ("allgather", "allgatherv", "gather"):
        return levels * c.latency + (p - 1) * c.n * beta
    if collective == "scatter":
        return levels * c.latency + share * c.n * beta
    if collective == "bcast":
        tree = levels * (c.latency + c.n * beta)
        return min(tree, (levels + p - 1) * c.latency + 2 * share * c.n * beta)
    if collective == "reduce_scatter":
        return levels * c.latency + share * c.n * (beta + c.add)
    near_levels = min(max(k - 1, 0).bit_length(), levels) if c.world.nodes > 1 else levels
    far_levels = levels - near_levels
    sending = 1 if collective == "reduce" else k  # ranks of a node that send at once
    doubling = near_levels * (c.inside_latency + c.n * c.inside) + far_levels * (c.latency + c.n * c.between * sending)
    doubling += levels * c.n * c.add
    return min(doubling, 2 * levels * c.latency + share * c.n * (2 * beta + c.add))


NATIVE: Algorithm[Job] = Algorithm(
    "native",
    dict.fromkeys((*REDUCTIONS, "allgather", *UNEVEN, *ROOTED, "alltoall")),
    _cost,
    by_mpi=True,
)
