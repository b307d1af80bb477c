"""What tests compare each algorithm with: one file for each, `NAME.py`, with a `Reference` called `REFERENCE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np

from compcoll.algorithms.costs import Costs

FOLDER = Path(__file__).parent

Values = np.ndarray
RoundTrip = Callable[[Values], Values]
Seconds = Callable[[Costs, int, int, float], float]


@dataclass(frozen=True)
class Reference:
    """An algorithm, written down a second time from its publication. Mappings have an entry for each collective.

    Attributes
    ----------
    seconds : mapping
        The predicted seconds, from the constants, p ranks, k ranks of a node, and n bytes of a rank's buffer.
    encodings : mapping
        For sums on p ranks and some nodes: the most encodings of one value on its way, and the encodings whose errors
        add up in a value of the result.
    variance : mapping
        For sums of our own: the variance of the error of a sum of p terms, in units of ε². An encoding changes a
        partial sum's variance by the factor ``1 + again``.
    alike : mapping
        For sums of our own: ``Σ √j / √p`` over the encodings, each of a partial sum of j of p terms.
    replay : callable or None
        The allreduce in NumPy, from all ranks' arrays and a function that encodes and decodes an array. A node has
        two ranks. Arrays can be cut into p equal chunks, and into one equal chunk for each node.
    sent : callable or None
        How often each of p ranks, on nodes of their own, sends its whole buffer in an allreduce. None if ranks differ
        for some p.
    ordered : bool
        Whether MPI, or the ranks' one shared memory, matches its calls by their order instead of by tags.
    """

    seconds: Mapping[str, Seconds]
    encodings: Mapping[str, Callable[[int, int], tuple[int, int]]] = field(default_factory=dict)
    variance: Mapping[str, Callable[[int, float], float]] = field(default_factory=dict)
    alike: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    replay: Callable[[list[Values], RoundTrip], Values] | None = None
    sent: Callable[[int], float] | None = None
    ordered: bool = False


@cache
def reference(algorithm: str) -> Reference:
    """Return the reference of an algorithm."""
    path = FOLDER / f"{algorithm}.py"
    assert path.exists(), f"write tests/algorithms/references/{path.name}: direct.py there shows how"
    found = import_module(f"{__name__}.{algorithm}").REFERENCE
    assert isinstance(found, Reference)
    return found


def both(host: float, wire: float, parts: float) -> float:
    """Return the seconds of two things at once, in parts: the longer, and a part of the shorter."""
    return max(host, wire) + min(host, wire) / parts
