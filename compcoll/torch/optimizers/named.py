"""States of optimizers by the parameters' names, whatever order, memory format and vector they are kept in."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InvalidArgument

States = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def fitted(
    states: States, complete: Sequence[str], partial: Sequence[str], here: Mapping[str, torch.Size], model: nn.Module
) -> States:
    """Take the parameters that are trained here out of a state, or out of all ranks' states.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        Of one rank, or of all.
    complete, partial : sequence of str
        Which of their entries hold tensors by name: of all parameters, or of some.
    here : mapping
        The shapes of the parameters that are trained.
    model : torch.nn.Module
        Whose other parameters were trained then: they are dropped, with a warning.

    Raises
    ------
    InvalidArgument
        If a parameter is missing, has another shape, or is none of the model's.
    """
    gone = {name for name, _ in model.named_parameters()} - here.keys()
    dropped: set[str] = set()

    def fit(kind: str, given: Any) -> Any:
        if kind not in (*complete, *partial) or not isinstance(given, Mapping):
            return given
        dropped.update(gone & given.keys())
        if unknown := given.keys() - gone - here.keys():
            raise InvalidArgument(f"this state's {kind} has elements of {min(unknown)!r}, which is not in the model")
        for name, shape in here.items():
            values = given.get(name)
            if values is None and kind in complete:
                raise InvalidArgument(f"this state's {kind} has no elements of {name!r}")
            if values is not None and values.shape != shape:
                there = list(values.shape)
                raise InvalidArgument(
                    f"this state's {kind} has {name!r} in shape {there}, but here it is {list(shape)}"
                )
        return {name: values for name, values in given.items() if name not in gone}

    def fit_all(state: Any) -> Any:
        return {kind: fit(kind, given) for kind, given in state.items()} if isinstance(state, Mapping) else state

    kept = fit_all(states) if isinstance(states, Mapping) else [fit_all(state) for state in states]
    if dropped:
        told = ", ".join(map(repr, sorted(dropped)))
        warnings.warn(f"this state has values of {told}, which are not trained here: they are dropped", stacklevel=3)
    return kept


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List an optimizer's parameters in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def untrained(model: nn.Module, trained: Mapping[int, str]) -> list[Tensor]:
    """List a model's buffers, and its parameters that are not trained."""
    return [*model.buffers(), *(p for p in model.parameters() if id(p) not in trained)]


def check_trained(optimizer: torch.optim.Optimizer, trained: Mapping[int, str]) -> None:
    """Refuse parameters that were frozen, thawed or added to an optimizer since ``trained`` were found.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any.
    trained : mapping
        The names of those that required gradients, by their ids.

    Raises
    ------
    InvalidArgument
        If others do now.
    """
    now = {id(p): p for p in parameters_of(optimizer) if p.requires_grad}
    if now.keys() == trained.keys():
        return
    frozen = [name for key, name in trained.items() if key not in now]
    added = [list(p.shape) for key, p in now.items() if key not in trained]
    what = f"{frozen[0]!r} was frozen" if frozen else f"one of shape {added[0]} came to be trained"
    raise InvalidArgument(f"of the parameters {what} meanwhile: make the optimizer anew, and load its state")


def state_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Copy an optimizer's state; tensors in the parameters' logical order.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any.
    names : mapping
        The parameters' names by their ids.
    """
    given = optimizer.state_dict()
    state = {
        names[id(p)]: {kind: _copied(value) for kind, value in given["state"][at].items()}
        for at, p in enumerate(parameters_of(optimizer))
        if at in given["state"]
    }
    return {"state": state, "groups": groups_of(optimizer)}


def load_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Any]) -> None:
    """Have an optimizer go on from what `state_by_name` gave; tensors get the memory format of the parameters."""
    kept = {
        at: {kind: _laid_out(value, p) for kind, value in state["state"][names[id(p)]].items()}
        for at, p in enumerate(parameters_of(optimizer))
        if names.get(id(p)) in state["state"]
    }
    load(optimizer, kept, state["groups"])


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copy the options of an optimizer's groups."""
    return [{k: deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def load(optimizer: torch.optim.Optimizer, state: dict[int, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Give an optimizer its state, by the parameters' places, and its groups' options."""
    places = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    check_groups(groups, len(places))
    numbered = [{**deepcopy(dict(group)), "params": each} for group, each in zip(groups, places, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": numbered})


def check_groups(groups: Sequence[Any], count: int) -> None:
    """Refuse a state of another number of groups.

    Raises
    ------
    InvalidArgument
        If it has more or fewer.
    """
    if len(groups) != count:
        raise InvalidArgument(f"this state has {len(groups)} groups of parameters, but here are {count}")


def _copied(value: Any) -> Any:
    return value.detach().clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else deepcopy(value)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """Copy a value, in the parameter's memory format if it has its shape: fused steps go by memory's order."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    return _copied(value)
