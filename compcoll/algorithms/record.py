"""The record of an algorithm: all that is known of it, beside its generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from ..layout import World
from ..pending import Steps
from .costs import Costs

MANY_RANKS = 16
"""The most ranks without rings: above, a rank's neighbours are few there, while direct keeps p-1 messages in flight."""

J = TypeVar("J")

Symmetry = Literal["none", "rotation", "exclusive"]
"""The map of a node to any other that does not change what ranks do: none, adding, or exclusive or of ranks."""


class Encodings(NamedTuple):
    """The numbers of times that values are encoded.

    Attributes
    ----------
    levels : int
        How often a value is on its way, at most.
    total : int
        How many encodings' losses a value of the result may hold.
    """

    levels: int
    total: int


class Growth(NamedTuple):
    """Factors from the error of one encoding to that of the result.

    Every encoding of a partial sum of j independent terms of variance 1 adds an error of variance ``j ε²``, and the
    sum of all p terms has variance p.

    Attributes
    ----------
    independent : float
        Where encodings' errors are.
    alike : float
        Where they have the same mean, which adds up: ``Σ √j / √p`` over the encodings.
    recoded : bool
        Whether what is encoded was decoded just before.
    """

    independent: float
    alike: float
    recoded: bool = False


NEVER = Encodings(0, 0)
ONE_ENCODING = Encodings(1, 1)


def _never(collective: str, ranks: int, nodes: int) -> Encodings:
    return NEVER


def _kept(collective: str, ranks: int, nodes: int, once: float) -> Growth:
    """The growth of what moves values only: none."""
    return Growth(1.0, 0.0)


def _anywhere(world: World) -> str:
    return ""


def _nowhere(nbytes: float, ranks: int) -> bool:
    return False


@dataclass(frozen=True)
class Algorithm(Generic[J]):
    """An algorithm.

    Attributes
    ----------
    name : str
        By which it is asked for.
    collectives : tuple of str
        Those that it runs.
    cost : callable
        Seconds of a collective after its handshake.
    steps : mapping
        Its generator for each collective; empty where it runs by other means than messages of our own.
    encodings : callable
        How often a collective's values are encoded, among so many ranks on so many nodes.
    growth : callable
        The growth of the error there, for a relative error of one encoding that is itself encoded again (else 0).
    chunked : bool
        Whether it cuts a buffer into one chunk a rank, rather than working on the whole.
    rounds_once : bool
        Whether uncompressed halves are added in float32 and rounded once, not at every hop.
    restricted : bool
        Whether it is not for all sizes, element types, ranks or transports.
    by_mpi : bool
        Whether it starts MPI's own collectives.
    in_turn : bool
        Whether its calls must begin, or go through the one shared memory, in the same order on all ranks.
    inside_node : bool
        Whether it needs memory that all ranks share.
    unfit : callable
        Why ``auto`` does not take it among some ranks; empty if it may.
    always_faster : callable
        Whether so many bytes of each rank's wire, among so many ranks, never took longer than by MPI's own, as seen.
    cost_proxy : str
        The algorithm whose measured times correct its formula where it was not measured itself.
    symmetry : str
        How one node may stand for all when it is simulated (see `compcoll.simulation.network`).
    """

    name: str
    collectives: tuple[str, ...]
    cost: Callable[[Costs, str], float]
    steps: Mapping[str, Callable[[J], Steps]] = field(default_factory=dict)
    encodings: Callable[[str, int, int], Encodings] = _never
    growth: Callable[[str, int, int, float], Growth] = _kept
    chunked: bool = False
    rounds_once: bool = False
    restricted: bool = False
    by_mpi: bool = False
    in_turn: bool = False
    inside_node: bool = False
    unfit: Callable[[World], str] = _anywhere
    always_faster: Callable[[float, int], bool] = _nowhere
    cost_proxy: str = ""
    symmetry: Symmetry = "none"

    def parts(self, ranks: int) -> int:
        """Tell how many chunks a buffer is cut into."""
        return ranks if self.chunked else 1
