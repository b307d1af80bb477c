"""Parameters as one vector in host memory: layout, mean over the ranks, and states by parameter name."""

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
from ...plan import choose
from ...sparse import Sparsifier
from ..buffers import COMPRESSIBLE, HostArray, array_of
from ..policy import try_codec
from ..states import count_calls_with, residuals_of
from ..training_stats import TrainingStats

States = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Flat:
    """The layout of a vector that holds several parameters one after another.

    Parameters
    ----------
    parameters : mapping
        Parameters by name, in order.

    Attributes
    ----------
    names : tuple of str
        Names of the parameters.
    shapes, sizes : dict
        Shapes and numbers of elements, by name.
    dtype : torch.dtype
        Element type of vectors: float64 if a parameter has it, else float32.

    Raises
    ------
    InvalidArgument
        If there are no parameters.
    UnsupportedDType
        If a parameter is not float16, bfloat16, float32 or float64.
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
        """Return a vector of zeros."""
        return torch.zeros(sum(self.sizes.values()), dtype=self.dtype)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector in the parameters' shapes."""
        parts = vector.split(list(self.sizes.values()))
        return [part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=True)]

    def pack(self, tensors: Iterable[Tensor | None], vector: Tensor | None = None) -> Tensor:
        """Copy tensors of the parameters' shapes into a vector (default: a new one); None becomes zeros."""
        vector = self.zeros() if vector is None else vector
        for view, tensor in zip(self.views(vector), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
        return vector

    def by_name(self, vector: Tensor) -> dict[str, Any]:
        """Return arrays by name, in the parameters' shapes, that share a vector's memory."""
        return {name: view.numpy() for name, view in zip(self.names, self.views(vector), strict=True)}

    def load(self, arrays: Mapping[str, Tensor], vector: Tensor) -> Tensor:
        """Copy a state's arrays into a vector; zeros for parameters that it lacks."""
        return self.pack((arrays[n].reshape(s) if n in arrays else None for n, s in self.shapes.items()), vector)


def average(
    vector: Tensor,
    communicator: Communicator,
    stats: TrainingStats,
    codec: Codec | None = None,
    algorithm: str = choose.AUTO,
    feedback: ErrorFeedback | None = None,
) -> int:
    """Replace a vector by the ranks' mean, and return the bytes sent. Collective."""
    values = array_of(vector)
    count_calls_with(feedback, communicator)
    communicator.allreduce(values, op="mean", out=values, feedback=feedback, codec=codec, algorithm=algorithm)
    return stats.add_last(communicator)


class Averager:
    """Repeated mean of a vector over the ranks by compcoll's allreduce, with feedback.

    With the algorithm ``"direct"``, each rank encodes its values once, and the owner of each part encodes the mean once
    more. Both use feedback: each rank keeps the residuals of its own encodings.

    Parameters
    ----------
    codec : Codec or None
        As for `compcoll.allreduce`.
    algorithm : str
        As for `compcoll.allreduce`.
    feedback : bool
        Whether to keep residuals.
    vector : Tensor
        A vector with the size and type of those to average.

    Attributes
    ----------
    residual : array or None
        The residual of each element; None without feedback.
    of_mean : bool
        Whether residuals are contributions to the mean, so that their sum over the ranks counts. If False, they are in
        the units of this rank's values.

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
        """Average a few zeros, to raise a call's errors early, and allocate the residuals. Collective."""
        zeros = torch.zeros(64, dtype=self._vector.dtype).numpy()
        make = None if self._feedback is None else ErrorFeedback
        try_codec(communicator, [zeros], self._codec, self._algorithm, make)
        if self._feedback is not None:
            communicator._prepare_feedback(self._feedback, array_of(self._vector))
            self.residual = self._feedback.residual

    def average(self, vector: Tensor, communicator: Communicator, stats: TrainingStats) -> int:
        """Replace a vector by the ranks' mean, and return the bytes sent. Collective."""
        return average(vector, communicator, stats, self._codec, self._algorithm, self._feedback)


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
    """Read the currently trained parameters from one rank's state, or from all ranks' states.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        State of one rank, or of all.
    rank, size : int
        Current rank and number of ranks.
    complete, partial : sequence of str
        State entries that hold tensors by name: for all parameters, or for some.
    more : sequence of str
        Other state entries.
    here : mapping
        Shapes of the trained parameters, by name.
    model : torch.nn.Module
        The model. State values of its parameters that are not trained now are dropped with a warning.

    Returns
    -------
    list, dict
        The states in rank order, and this rank's part of the residuals.

    Raises
    ------
    InvalidArgument
        If a parameter is missing, has another shape, or is not in the model; and as `residuals_of` does.
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
        names = ", ".join(map(repr, sorted(dropped)))
        warnings.warn(f"this state has values of {names}, which are not trained here: they are dropped", stacklevel=3)
    return sorted(every, key=lambda state: int(state["rank"])), residuals


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List an optimizer's parameters in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def untrained(model: nn.Module, trained: Mapping[int, str]) -> list[Tensor]:
    """List a model's buffers, and its parameters that are not trained."""
    return [*model.buffers(), *(p for p in model.parameters() if id(p) not in trained)]


def check_trained(optimizer: torch.optim.Optimizer, trained: Mapping[int, str]) -> None:
    """Check that no parameters of an optimizer were frozen, unfrozen or added since ``trained`` was recorded.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any optimizer.
    trained : mapping
        Names of the parameters that required gradients, by id.

    Raises
    ------
    InvalidArgument
        If other parameters require gradients now.
    """
    now = {id(p): p for p in parameters_of(optimizer) if p.requires_grad}
    if now.keys() == trained.keys():
        return
    frozen = [name for key, name in trained.items() if key not in now]
    added = [list(p.shape) for key, p in now.items() if key not in trained]
    what = f"{frozen[0]!r} was frozen" if frozen else f"one of shape {added[0]} came to be trained"
    raise InvalidArgument(f"of the parameters {what} meanwhile: make the optimizer anew, and load its state")


def state_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Copy an optimizer's state; tensors are contiguous.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any optimizer.
    names : mapping
        Parameter names by id.
    """
    given = optimizer.state_dict()["state"]
    state = {
        names[id(p)]: {kind: _copied(value) for kind, value in given[at].items()}
        for at, p in enumerate(parameters_of(optimizer))
        if at in given
    }
    return {"state": state, "groups": groups_of(optimizer)}


def load_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Any]) -> None:
    """Load a state from `state_by_name` into an optimizer; tensors get the memory format of the parameters."""
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
    """Load a state, by parameter index, and the groups' options into an optimizer."""
    places = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    numbered = [{**deepcopy(dict(group)), "params": each} for group, each in zip(groups, places, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": numbered})


def check_groups(groups: Sequence[Any], count: int) -> None:
    """Check the number of parameter groups of a state.

    Raises
    ------
    InvalidArgument
        If it differs from ``count``.
    """
    if len(groups) != count:
        raise InvalidArgument(f"this state has {len(groups)} groups of parameters, but here are {count}")


def _copied(value: Any) -> Any:
    return value.detach().clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else deepcopy(value)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """Copy a value. If it has the parameter's shape, use its memory format, since fused steps use memory order."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    return _copied(value)
