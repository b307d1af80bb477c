"""Parameters as one vector in host memory: its mean over the ranks, and states by the parameters' names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ...codecs.base import Codec
from ...communicator import Communicator
from ...errors import InvalidArgument, UnsupportedDType
from ...feedback import ErrorFeedback
from ...sparse import Sparsifier
from ..arrays import HostArray
from ..buffers import COMPRESSIBLE, array_of
from ..policy import try_codec
from ..states import draw_as_begun, residuals_of
from ..training_stats import TrainingStats

States = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Flat:
    """The layout of parameters that lie one behind the other.

    Parameters
    ----------
    parameters : mapping
        By name, in their order.

    Attributes
    ----------
    names : tuple of str
        Of the parameters.
    shapes, sizes : dict
        Their shapes and numbers of elements, by name.
    dtype : torch.dtype
        The element type of vectors: float64 if a parameter has it, else float32.

    Raises
    ------
    InvalidArgument
        If there are none.
    UnsupportedDType
        If one has another type than float16, bfloat16, float32 and float64.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        if not parameters:
            raise InvalidArgument("there are no parameters to be trained")
        for name, parameter in parameters.items():
            if parameter.dtype not in COMPRESSIBLE:
                known = ", ".join(map(str, COMPRESSIBLE))
                raise UnsupportedDType(f"parameter {name!r} is of {parameter.dtype}: it must be of {known}")
        self.names = tuple(parameters)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.sizes = {name: shape.numel() for name, shape in self.shapes.items()}
        self.dtype = reduce(torch.promote_types, (p.dtype for p in parameters.values()), torch.float32)

    def zeros(self) -> Tensor:
        """Make a vector of zeros."""
        return torch.zeros(sum(self.sizes.values()), dtype=self.dtype)

    def views(self, vector: Tensor) -> list[Tensor]:
        """View a vector's memory in the parameters' shapes."""
        parts = vector.split(list(self.sizes.values()))
        return [part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=True)]

    def pack(self, tensors: Iterable[Tensor | None], vector: Tensor | None = None) -> Tensor:
        """Copy tensors of the parameters' shapes into a vector, by default a new one; zeros for None."""
        vector = self.zeros() if vector is None else vector
        for view, tensor in zip(self.views(vector), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
        return vector

    def by_name(self, vector: Tensor) -> dict[str, Any]:
        """Split a vector into arrays of the parameters' shapes that share its memory, by name."""
        return {name: view.numpy() for name, view in zip(self.names, self.views(vector), strict=True)}

    def load(self, arrays: Mapping[str, Tensor], vector: Tensor) -> Tensor:
        """Copy a state's values of the parameters into a vector; zeros where the state has none."""
        return self.pack((arrays[n].reshape(s) if n in arrays else None for n, s in self.shapes.items()), vector)


def exact_mean(vector: Tensor, communicator: Communicator, stats: TrainingStats) -> int:
    """Average a vector without a codec, in place; returns the bytes sent. Collective."""
    values = array_of(vector)
    communicator.allreduce(values, op="mean", out=values, codec=None)
    return stats.add_last(communicator, 2 * (communicator.size - 1) / communicator.size)


class Exchange:
    """The mean of a vector over the ranks by compcoll's allreduce, again and again, with feedback.

    With the algorithm ``"direct"`` a rank's values are encoded once, and the mean once more by the owner of each part,
    both with feedback: a rank keeps what its own encodings lost.

    Parameters
    ----------
    codec : Codec or None
        As for `compcoll.allreduce`.
    algorithm : str
        Of that.
    feedback : bool
        Whether residuals are kept.
    vector : Tensor
        Others like this one will be averaged.

    Attributes
    ----------
    residual : array or None
        The residual of each element; None if there is no feedback.
    of_mean : bool
        Whether residuals are parts of the mean, so that the ranks' sum counts, rather than of this rank's values.

    Raises
    ------
    InvalidArgument
        If the codec needs second moments of samples.
    """

    of_mean = True

    def __init__(self, codec: Codec | None, algorithm: str, feedback: bool, vector: Tensor) -> None:
        if isinstance(codec, Sparsifier) and codec.state is not ErrorFeedback:
            raise InvalidArgument(f"{codec!r} decides by second moments of samples, which there are of gradients only")
        self._codec, self._algorithm, self._vector = codec, algorithm, vector
        self._feedback = ErrorFeedback() if feedback and codec is not None else None
        self.residual: HostArray | None = None

    def try_out(self, communicator: Communicator) -> None:
        """Refuse what a call would, on a few zeros, and make the residuals. Collective."""
        zeros = torch.zeros(64, dtype=self._vector.dtype).numpy()
        make = None if self._feedback is None else ErrorFeedback
        try_codec(communicator, [zeros], self._codec, self._algorithm, make)
        if self._feedback is not None:
            communicator._prepare_feedback(self._feedback, array_of(self._vector))
            self.residual = self._feedback.residual

    def mean(self, vector: Tensor, communicator: Communicator, stats: TrainingStats) -> int:
        """Set a vector to the ranks' mean; returns the bytes sent. Collective."""
        values = array_of(vector)
        draw_as_begun(self._feedback, communicator)
        communicator.allreduce(
            values, op="mean", out=values, feedback=self._feedback, codec=self._codec, algorithm=self._algorithm
        )
        return stats.add_last(communicator, 2 * (communicator.size - 1) / communicator.size)


def read_states(
    states: States,
    rank: int,
    size: int,
    complete: Sequence[str],
    partial: Sequence[str],
    more: Sequence[str],
    here: Mapping[str, torch.Size],
    model: nn.Module,
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Read the parameters that are trained here out of a rank's state, or of all ranks' states.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        Of one rank, or of all.
    rank, size : int
        Of now.
    complete, partial : sequence of str
        Which of their entries hold tensors by name: of all parameters, or of some.
    more : sequence of str
        Their other entries.
    here : mapping
        The shapes of the parameters that are trained.
    model : torch.nn.Module
        Whose other parameters were trained then: they are dropped, with a warning.

    Returns
    -------
    list, dict
        The states in the order of the ranks; and this rank's part of the residuals.

    Raises
    ------
    InvalidArgument
        If a parameter is missing, has another shape, or is none of the model's; and as of `residuals_of`.
    """
    gone = {name for name, _ in model.named_parameters()} - here.keys()
    dropped: set[str] = set()

    def fit(kind: str, given: Any) -> Any:
        if kind not in (*complete, *partial) or not isinstance(given, Mapping):
            return given
        dropped.update(gone & given.keys())
        if unknown := given.keys() - gone - here.keys():
            raise InvalidArgument(f"this state's {kind} has elements of {min(unknown)!r}, which is not in the model")
        if kind in complete and (missing := here.keys() - given.keys()):
            raise InvalidArgument(f"this state's {kind} has no elements of {min(missing)!r}")
        for name in here.keys() & given.keys():
            if given[name].shape != here[name]:
                there, wanted = list(given[name].shape), list(here[name])
                raise InvalidArgument(f"this state's {kind} has {name!r} in shape {there}, but here it is {wanted}")
        return {name: values for name, values in given.items() if name not in gone}

    every: list[Any] = [states] if isinstance(states, Mapping) else list(states)
    every = [{k: fit(k, v) for k, v in state.items()} if isinstance(state, Mapping) else state for state in every]
    given = every[0] if isinstance(states, Mapping) else every
    residuals = residuals_of(given, rank, size, here, (*complete, *more), optional=("begun",))
    if dropped:
        told = ", ".join(map(repr, sorted(dropped)))
        warnings.warn(f"this state has values of {told}, which are not trained here: they are dropped", stacklevel=3)
    return sorted(every, key=lambda state: int(state["rank"])), residuals


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
    given = optimizer.state_dict()["state"]
    state = {
        names[id(p)]: {kind: _copied(value) for kind, value in given[at].items()}
        for at, p in enumerate(parameters_of(optimizer))
        if at in given
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
