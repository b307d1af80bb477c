"""The outer optimizer's state, by the parameters' names: it works on a vector of each fragment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from .fragments import Fragment
from .named import groups_of, load, parameters_of


def outer_state(outer: torch.optim.Optimizer, fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Copy the state: of each kind a tensor for each parameter, and what is no vector, such as a number of steps."""
    vectors: dict[str, dict[str, Tensor]] = {}
    rest: list[dict[str, Any]] = []
    for fragment in fragments:
        state = outer.state.get(fragment.outer, {})
        of_elements = {kind for kind, value in state.items() if _is_vector(value, fragment)}
        rest.append({kind: deepcopy(value) for kind, value in state.items() if kind not in of_elements})
        for kind in of_elements:
            parts = fragment.flat.by_name(state[kind].clone())
            vectors.setdefault(kind, {}).update((name, torch.from_numpy(part)) for name, part in parts.items())
    return {"vectors": vectors, "rest": rest, "groups": groups_of(outer)}


def load_outer_state(outer: torch.optim.Optimizer, fragments: Sequence[Fragment], state: Mapping[str, Any]) -> None:
    """Go on from what `outer_state` gave; elements that it does not have are 0."""
    kept = {}
    for fragment, rest in zip(fragments, state["rest"], strict=True):
        kept[id(fragment.outer)] = one = deepcopy(rest)
        for kind, arrays in state["vectors"].items():
            if held := [arrays[name] for name in fragment.flat.names if name in arrays]:
                one[kind] = torch.zeros_like(fragment.outer, dtype=held[0].dtype)
                fragment.flat.load(arrays, one[kind])
    places = {at: kept[id(p)] for at, p in enumerate(parameters_of(outer)) if kept[id(p)]}
    load(outer, places, state["groups"])


def _is_vector(value: Any, fragment: Fragment) -> bool:
    return isinstance(value, Tensor) and value.shape == fragment.outer.shape
