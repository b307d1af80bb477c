"""What compression has lost so far, as it is saved with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from ..errors import InvalidArgument

Residuals = dict[str, npt.NDArray[Any]]
"""By name of the parameter, flat."""

_VERSION = 1
_LOSSES = "residuals"
_KEYS = {"version", "rank", "size", _LOSSES}


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

    Raises
    ------
    InvalidArgument
        If one state is of another rank or number of ranks, several are not of all ranks, or it is another model's,
        another version's, not finite, or no such state.
    """
    for state in [states] if isinstance(states, Mapping) else states:
        if not isinstance(state, Mapping) or set(state) != _KEYS.union(more):
            needed = ", ".join(sorted(_KEYS.union(more)))
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
