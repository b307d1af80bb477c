"""The losses of compression so far, as they are saved with a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..communicator import Communicator
from ..errors import InvalidArgument
from ..feedback import ErrorFeedback

Residuals = dict[str, npt.NDArray[Any]]
"""Flat arrays of what was lost, by name of the parameter."""

_VERSION = 1
_LOSSES = "residuals"
_KEYS = {"version", "rank", "size", _LOSSES}

Layout = Sequence[Sequence[str]]
"""The names of the parameters in each bucket of DistributedDataParallel's, in their order."""


def draw_as_begun(feedback: ErrorFeedback | None, communicator: Communicator) -> None:
    """Let a codec that chooses elements at random, as ``randomk``, go by how many collectives have begun: codecs that
    round at random do, and that number is in states.
    """
    if feedback is not None:
        feedback.calls = communicator.begun


def nothing_lost(size: int, dtype: torch.dtype) -> npt.NDArray[Any]:
    """Make a parameter's losses before any step: a state that holds all can be the frame into which one is loaded."""
    return np.zeros(size, np.float64 if dtype is torch.float64 else np.float32)


def state_of(rank: int, size: int, residuals: Residuals, **more: Residuals) -> dict[str, Any]:
    """A rank's state; with what is kept besides of parameters, such as a velocity."""
    copies = {
        kind: {name: torch.from_numpy(kept.copy()) for name, kept in arrays.items()}
        for kind, arrays in {_LOSSES: residuals, **more}.items()
    }
    return {"version": _VERSION, "rank": rank, "size": size, **copies}


def residuals_of(
    states: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    rank: int,
    size: int,
    sizes: Mapping[str, int],
    more: Sequence[str] = (),
    kind: str = _LOSSES,
    drawn: str | None = None,
) -> Residuals:
    """A rank's part of a state, or of all ranks' states of then: their sum over the ranks stays what it was.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        Made by `state_of`.
    rank, size : int
        Of now.
    sizes : mapping
        Elements of the compressed parameters, by name.
    more : sequence of str
        What such states hold besides.
    kind : str
        Which of the arrays of a state are wanted.
    drawn : str, optional
        Where such states tell what codecs drew so far that round at random: early ones lack it.

    Raises
    ------
    InvalidArgument
        If one state is of another rank or number of ranks, several are not of all ranks, or it is another model's,
        another version's, not finite, or no such state.
    """
    wanted = _KEYS.union(more)
    for state in [states] if isinstance(states, Mapping) else states:
        if not isinstance(state, Mapping) or set(state) - {drawn} != wanted - {drawn}:
            needed = ", ".join(sorted(wanted))
            raise InvalidArgument(f"this is no state of such a compression: {needed} are needed")
        if state["version"] != _VERSION:
            raise InvalidArgument(f"this state is of version {state['version']!r}: this release reads {_VERSION}")
    if isinstance(states, Mapping):
        if (states["rank"], states["size"]) != (rank, size):
            raise InvalidArgument(
                f"this is the state of rank {states['rank']} of {states['size']}, but here is rank {rank} of {size}: "
                "give the states of all ranks"
            )
        chosen = [states]
    else:
        ranks = [state["rank"] for state in states]
        if not states or sorted(ranks) != list(range(states[0]["size"])):
            raise InvalidArgument(f"states of ranks {ranks} were given: those of all ranks are needed, each once")
        chosen = [state for state in states if state["rank"] % size == rank]
    residuals: Residuals = {}
    for state in chosen:
        for name, kept in state[kind].items():
            if sizes.get(name) != kept.numel():
                raise InvalidArgument(
                    f"this state has {kept.numel()} elements of {name!r}, which is no compressed parameter of that size"
                )
            if not bool(torch.isfinite(kept).all()):
                raise InvalidArgument(f"this state's losses of {name!r} hold NaN or Inf")
            values = kept.numpy()
            residuals[name] = residuals[name] + values if name in residuals else values.copy()
    return residuals


def layout_of(states: Mapping[str, Any] | Sequence[Mapping[str, Any]], names: Collection[str]) -> Layout | None:
    """Find the buckets that a state's next step had, under ``buckets``; None if it had none.

    DistributedDataParallel makes its buckets anew after the first step, and where an element lies in a bucket decides
    how it is encoded and in which order ranks add it. So a first step that goes on from a state has that one's buckets.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        Of one rank, or of all: `residuals_of` has looked at them.
    names : collection of str
        Those of all parameters that are in buckets.

    Raises
    ------
    InvalidArgument
        If they are of other parameters.
    """
    layout: Layout = (states if isinstance(states, Mapping) else states[0])["buckets"]
    held = [name for bucket in layout for name in bucket]
    if held and sorted(held) != sorted(names):
        differing = sorted(set(held).symmetric_difference(names)) or held[:1]
        raise InvalidArgument(f"this state's buckets are of other parameters: {differing[0]!r} is not in both")
    return layout or None
