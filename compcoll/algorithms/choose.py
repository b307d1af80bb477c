"""Which algorithms there are, and which one ``algorithm="auto"`` means."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import UnknownAlgorithm
from ..request import Steps
from . import direct, recursive_doubling, ring
from .job import Job

AUTO = "auto"
NATIVE = "native"
HIERARCHICAL = "hierarchical"

ALLREDUCE: Mapping[str, Callable[[Job], Steps]] = {
    "ring": ring.allreduce,
    "recursive_doubling": recursive_doubling.allreduce,
    "direct": direct.allreduce,
}
REDUCE_SCATTER: Mapping[str, Callable[[Job], Steps]] = {
    "ring": ring.reduce_scatter,
    "direct": direct.reduce_scatter,
}
ALLGATHER: Mapping[str, Callable[[Job], Steps]] = {
    "ring": ring.allgather,
    "direct": direct.allgather,
}

NAMES: Mapping[str, tuple[str, ...]] = {
    "allreduce": (*ALLREDUCE, HIERARCHICAL, NATIVE),
    "reduce_scatter": (*REDUCE_SCATTER, NATIVE),
    "allgather": (*ALLGATHER, NATIVE),
    "allgatherv": (*ALLGATHER, NATIVE),
    "bcast": ("binomial", NATIVE),
    "alltoall": ("pairwise", NATIVE),
}
"""The algorithms of each collective."""

MANY_RANKS = 16
"""From here on a ring: its neighbours are few, while direct keeps p-1 messages in flight at every rank."""

SMALL_NBYTES = 32 * 1024
"""Below, latency decides, and nothing is compressed."""

MEDIUM_NBYTES = 256 * 1024
"""Below, few messages are worth more than few bytes."""


def check(collective: str, algorithm: str) -> None:
    """Refuse a name that the collective does not have."""
    allowed = NAMES[collective]
    if algorithm != AUTO and algorithm not in allowed:
        raise UnknownAlgorithm(f"{collective} has no algorithm {algorithm!r}: there are {AUTO}, {', '.join(allowed)}")


def choose(collective: str, *, nbytes: int, size: int, compressed: bool, native: bool) -> str:
    """The algorithm that ``auto`` means.

    Uncompressed collectives are MPI's own, if MPI knows the element type. Compressed ones go direct up to 16 ranks
    and by the ring beyond; an allreduce below 256 KiB by recursive doubling, and one below 32 KiB uncompressed.

    Parameters
    ----------
    collective : str
        Such as ``"allreduce"``.
    nbytes : int
        Bytes of a rank's buffer, uncompressed.
    size : int
        Number of ranks.
    compressed : bool
        Whether a codec is asked for.
    native : bool
        Whether MPI can run it uncompressed.
    """
    if native and (not compressed or (collective == "allreduce" and nbytes < SMALL_NBYTES)):
        return NATIVE
    if collective == "bcast":
        return "binomial"
    if collective == "alltoall":
        return "pairwise"
    if collective == "allreduce" and nbytes < MEDIUM_NBYTES:
        return "recursive_doubling"
    return "direct" if size <= MANY_RANKS else "ring"


def between_nodes(nodes: int) -> Callable[[Job], Steps]:
    """The algorithm that the leaders of that many nodes run in a hierarchical allreduce."""
    return ALLREDUCE["direct" if nodes <= MANY_RANKS else "ring"]
