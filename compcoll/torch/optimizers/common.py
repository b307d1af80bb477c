"""Shared parts of the optimizers: ranks, parameters as one vector in host memory, loss scaling, states by name."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...codecs.base import Codec
from ...communicator import Communicator
from ...errors import InvalidArgument, UnsupportedDType
from ...feedback import ErrorFeedback
from ...plan import choose
from ...plan.signature import Signature
from ...sparse import Sparsifier
from .. import private
from ..agreement import check_alike, compare, gather_bytes
from ..buffers import COMPRESSIBLE, HostArray, array_of
from ..groups.membership import check_group, communicator_of, device_of
from ..hooks import register_hook
from ..policy import try_codec
from ..states import check_versions, count_calls_with, residuals_of
from ..training_stats import TrainingStats

Ranks: TypeAlias = dist.ProcessGroup | Communicator
"""A process group of any backend, or a compcoll communicator that is used for nothing else."""


def join(
    ranks: Ranks | None, lines: Sequence[str], timeout: float | None, transport: str, algorithm: str
) -> Communicator:
    """Check that all ranks have the same model and settings, and return their communicator. Collective.

    Parameters
    ----------
    ranks : ProcessGroup or Communicator, optional
        Default: the default process group. A communicator is used as it is.
    lines : sequence of str
        Settings that must be equal on all ranks.
    timeout, transport
        As for `compcoll.torch.compress`. A communicator has its own.
    algorithm : str
        Algorithm of the averages. ``"auto"`` needs measurements of the links.

    Raises
    ------
    InvalidArgument
        If there is no such group, or timeout or transport is given together with a communicator.
    CollectiveMismatch
        On every rank, if ``lines`` differ. The error shows the first difference.
    """
    own = [*lines, f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"]
    if isinstance(ranks, Communicator):
        if timeout is not None or transport != "auto":
            raise InvalidArgument(
                f"timeout={timeout!r}, transport={transport!r}: leave these out, the given communicator has its own"
            )
        gather = lambda values: list(torch.from_numpy(ranks.allgather(values.numpy(), codec=None)))  # noqa: E731
        compare(gather_bytes("\n".join(own).encode(), gather))
        return ranks
    group = check_group(ranks)
    device = device_of(group)
    check_alike(group, device, own)
    return communicator_of(group, device, timeout, transport, measured=algorithm == choose.AUTO)


def broadcast_object(root: int, communicator: Communicator, value: dict[str, Any]) -> dict[str, Any]:
    """Broadcast a dict from ``root`` to all ranks. Collective."""
    memory = io.BytesIO()
    if communicator.rank == root:
        torch.save(value, memory)
    data = np.frombuffer(memory.getvalue(), np.uint8).copy()
    (nbytes,) = communicator.bcast(np.array([data.size]), root, codec=None)
    data = communicator.bcast(data if communicator.rank == root else np.empty(nbytes, np.uint8), root, codec=None)
    received: dict[str, Any] = torch.load(io.BytesIO(data.tobytes()), weights_only=True)
    return received


def any_rank(communicator: Communicator, flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether any rank has set it. Collective."""
    return [bool(flag) for flag in communicator.allreduce(np.array(flags, np.int64), op="max", codec=None)]


def check_together(communicator: Communicator, line: str) -> None:
    """Check that all ranks call this with the same line, for example after loading a state. Collective.

    Raises
    ------
    CollectiveMismatch
        On every rank, if a rank has another line or makes another call.
    """
    sequence_number = communicator.sequence_number
    communicator._agree(Signature(line))
    communicator.sequence_number = sequence_number  # random codecs depend on it


def module_of(model: nn.Module) -> nn.Module:
    """Return the module without its DistributedDataParallel wrapper."""
    module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def keep_gradients(model: nn.Module, name: str) -> None:
    """Register a DistributedDataParallel hook, called ``name``, that leaves each rank its own gradients."""
    if not isinstance(model, DistributedDataParallel):
        return

    def hook(bucket: dist.GradBucket) -> Future[Tensor]:
        own = bucket.buffer()
        future: Future[Tensor] = Future(devices=[own.device] if own.is_cuda else [])
        future.set_result(own)
        return future

    register_hook(model, hook, name)


class Scaling(NamedTuple):
    """What a GradScaler reports to ``step()``.

    Attributes
    ----------
    overflowed : bool
        Whether a gradient of this rank contains Inf or NaN.
    scale : float
        Factor by which the gradients must still be divided.
    """

    overflowed: bool
    scale: float


@contextmanager
def scaling_of(optimizer: torch.optim.Optimizer) -> Iterator[Scaling | None]:
    """Yield what the GradScaler that calls ``step()`` reports; None without a scaler.

    After an error, the scaler does not delete its attributes, and would multiply its next scale by the old one. So this
    context manager deletes them.
    """
    found = getattr(optimizer, "found_inf", None)
    scale = getattr(optimizer, "grad_scale", None)
    try:
        yield None if found is None else Scaling(bool(float(found)), 1.0 if scale is None else float(scale))
    except BaseException:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        raise


def unscale(parameters: Iterable[Tensor], scale: float) -> None:
    """Divide the parameters' gradients by a scale.

    Raises
    ------
    InvalidArgument
        If a gradient is float16, which would lose small values. `torch.amp.GradScaler.unscale_` rejects it, too.
    """
    if scale == 1.0:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise InvalidArgument("gradients of float16 cannot be unscaled: keep parameters in float32 under autocast")
    for gradient in gradients:
        (private.sparse_values(gradient) if gradient.is_sparse else gradient).div_(scale)


States = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Flat:
    """The layout of a vector that holds several parameters one after another.

    Parameters
    ----------
    parameters : mapping
        Parameters by name, in order.

    Attributes
    ----------
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

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """Return tensors by name, in the parameters' shapes, that share a vector's memory."""
        return dict(zip(self.shapes, self.views(vector), strict=True))

    def load(self, arrays: Mapping[str, Tensor], vector: Tensor) -> Tensor:
        """Copy a state's arrays into a vector, with zeros for parameters that the state lacks."""
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
    """Averages a vector over the ranks repeatedly by compcoll's allreduce, with feedback.

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
        Whether a residual is a contribution to the mean, so that a change of the number of ranks must keep the sum of
        the residuals. If False, it has the unit of this rank's values, and the mean of the residuals must be kept.

    Raises
    ------
    InvalidArgument
        If the codec needs second moments of samples.
    """

    of_mean = True

    def __init__(self, codec: Codec | None, algorithm: str, feedback: bool, vector: Tensor) -> None:
        if isinstance(codec, Sparsifier) and codec.state is not ErrorFeedback:
            raise InvalidArgument(f"{codec!r} needs second moments of single samples, which only gradients have")
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
    check_versions(every)
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
    what = f"{frozen[0]!r} was frozen" if frozen else f"one of shape {added[0]} was added or unfrozen"
    raise InvalidArgument(f"the trained parameters have changed, {what}: make a new optimizer, and load its state")


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
        raise InvalidArgument(f"this state has {len(groups)} groups of parameters, but this optimizer has {count}")


def _copied(value: Any) -> Any:
    return value.detach().clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else deepcopy(value)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """Copy a value. If it has the parameter's shape, use its memory format, since fused steps use memory order."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    return _copied(value)
