"""The record that describes an algorithm: names, cost formula, generators, error growth and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, NamedTuple, TypeVar

from ..layout import World
from ..pending import Steps
from .costs import Costs

J = TypeVar("J")

Symmetry = Literal["none", "rotation", "exclusive"]
"""How ranks can be renumbered so that one node does what another does, if all chunks have one length.

``"rotation"``: by adding a number, modulo p, as in a ring. ``"exclusive"``: by XOR with a number, if all partners are
``rank ^ distance``; it is used only if p is a power of two. ``"none"``: not at all. A simulation is only slower then.
"""


REDUCTIONS = ("allreduce", "reduce_scatter", "reduce")
"""The collectives that reduce."""

ROOTED = ("bcast", "reduce", "gather", "scatter")
"""The collectives with a root."""

UNEVEN = ("allgatherv", "alltoallv")
"""The collectives in which ranks do not know each other's sizes before."""


class Encodings(NamedTuple):
    """The numbers of times that values are encoded.

    Attributes
    ----------
    levels : int
        The most encodings of a single value between its rank and the result.
    total : int
        The most encodings whose errors add up in a value of the result.
    """

    levels: int
    total: int


class Growth(NamedTuple):
    """Factors from the error of one encoding to that of the result. They may be estimates if p is no power of two.

    Every encoding of a partial sum of j independent terms of variance 1 adds an error of variance ``j ε²``, and the
    sum of all p terms has variance p.

    Attributes
    ----------
    independent : float
        The factor if the encodings' errors are independent.
    alike : float
        The factor if they have the same mean, which adds up: ``Σ √j / √p`` over the encodings.
    recoded : bool
        Whether ZFP's errors are alike to the extent that was measured along a ring: see `Codec.bias`. False for all
        other algorithms.
    """

    independent: float
    alike: float
    recoded: bool = False


def growth_at_root(growth: Callable[[str, int, int, float], Growth], ranks: int, nodes: int, again: float) -> Growth:
    """Return the growth of a reduce whose root does not encode its own chunk.

    That chunk has the error of a reduce_scatter, the others have that of an allreduce. All have the same length.
    """
    own, other = (growth(collective, ranks, nodes, again) for collective in ("reduce_scatter", "allreduce"))
    independent, alike = (
        math.sqrt((a**2 + (ranks - 1) * b**2) / ranks) for a, b in zip(own[:2], other[:2], strict=True)
    )
    return Growth(independent, alike, other.recoded)


NEVER = Encodings(0, 0)
ONE_ENCODING = Encodings(1, 1)

KEPT = Growth(1.0, 0.0)
"""The growth for collectives that only move values."""


@dataclass(frozen=True)
class Algorithm(Generic[J]):
    """An algorithm and its properties.

    Attributes
    ----------
    name : str
        The name that ``algorithm=`` takes.
    collectives : mapping
        The collectives that it runs, with the generator of each; None if it does not send messages of its own.
    cost : callable
        Predicts the seconds of a collective after its handshake.
    encodings : callable
        Returns how often values are encoded, for a collective, a number of ranks and a number of nodes.
    growth : callable
        Returns the growth of the error, for the same arguments and the relative change of a partial sum's variance
        by one encoding: see `compcoll.plan.accuracy.relative_error`.
    chunked : bool
        Whether the `Job.chunks` of an allreduce or a reduce are one for each rank. Otherwise there is a single one.
    rounds_once : bool
        Whether uncompressed 16-bit floats are added in float32 and rounded once, not at every hop.
    by_mpi : bool
        Whether it starts MPI's own collectives.
    inside_node : bool
        Whether it needs memory that all ranks share.
    unfit : callable
        Returns the reason why ``auto`` and ``tune`` do not take it among these ranks; empty if they may.
    always_faster : callable or None
        For an algorithm that supports only some sizes, element types, ranks or transports. Takes the bytes of each
        rank's wire and the number of ranks. Returns whether the algorithm was never slower than MPI's own collective in
        measurements.
    cost_proxy : str
        The algorithm whose measured times correct this formula if this algorithm was not measured.
    symmetry : str
        How a simulation of one node can represent all nodes (see `compcoll.simulation.network`).
    """

    name: str
    collectives: Mapping[str, Callable[[J], Steps] | None]
    cost: Callable[[Costs, str], float]
    encodings: Callable[[str, int, int], Encodings] = lambda *_: NEVER
    growth: Callable[[str, int, int, float], Growth] = lambda *_: KEPT
    chunked: bool = False
    rounds_once: bool = False
    by_mpi: bool = False
    inside_node: bool = False
    unfit: Callable[[World], str] = lambda _: ""
    always_faster: Callable[[float, int], bool] | None = None
    cost_proxy: str = ""
    symmetry: Symmetry = "none"

    @cached_property
    def steps(self) -> Mapping[str, Callable[[J], Steps]]:
        """The generators by collective."""
        return {name: steps for name, steps in self.collectives.items() if steps is not None}

    @property
    def restricted(self) -> bool:
        """Whether it supports only some sizes, element types, ranks or transports."""
        return self.always_faster is not None

    @property
    def ordered(self) -> bool:
        """Whether its calls must begin, or use the shared memory, in the same order on all ranks."""
        return self.by_mpi or self.inside_node

    def parts(self, ranks: int) -> int:
        """Return the number of chunks of a buffer."""
        return ranks if self.chunked else 1
