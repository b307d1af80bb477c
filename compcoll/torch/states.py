"""Residuals as they are saved with a checkpoint: a rank's state, and one state of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ..communicator import Communicator
from ..errors import InvalidArgument
from ..feedback import ErrorFeedback
from .buffers import array_of, is_dense

_VERSION = 2
_LOSSES = "residuals"
_KEYS = {"version", "rank", "size", _LOSSES}
STEPS, BUCKETS = "steps", "buckets"
"""What states of DistributedDataParallel's hold besides: how many steps there were, and the next one's buckets."""
BEGUN, BETWEEN, REPLICAS = "begun", "between", "replicas"
"""What states of FSDP2's hold besides: how many collectives there were; and of hybrid sharding, what was lost between
the replicas, and how many these are.
"""
OPTIONAL = (STEPS, BUCKETS, BEGUN, BETWEEN, REPLICAS)
"""What gradients' states may lack, since those of one wrapper are loaded under another."""
_RANKS = "ranks"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

Layout = Sequence[Sequence[str]]
"""The names of the parameters in each bucket of DistributedDataParallel's, in their order."""


def logical_name(name: str) -> str:
    """Find the name that a parameter has where nothing wraps modules: neither torch.compile nor checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def draw_as_begun(feedback: ErrorFeedback | None, communicator: Communicator) -> None:
    """Let a codec that chooses elements at random, as ``randomk``, go by how many collectives have begun: codecs that
    round at random do, and that number is in states.
    """
    if feedback is not None:
        feedback.calls = communicator.sequence_number


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Find the element type of the residuals of gradients of a type."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def from_memory(values: npt.NDArray[Any] | None, parameter: Tensor) -> Tensor:
    """Give values that lie as a parameter's elements do the parameter's own order and shape; zeros for None.

    Parameters
    ----------
    values : array or None
        One for each element of the parameter, in the order of its memory, as DistributedDataParallel's buckets have
        them.
    parameter : Tensor
        Of any memory format.
    """
    held = _like(parameter)
    if values is None:
        return held.zero_().contiguous()
    array_of(held)[...] = values
    return held.clone(memory_format=torch.contiguous_format)


def to_memory(values: Tensor, parameter: Tensor) -> npt.NDArray[Any]:
    """Copy values of a parameter's shape into the order of its memory: the inverse of `from_memory`."""
    held = _like(parameter).copy_(values)  # which lives longer than the view of it
    copied: npt.NDArray[Any] = array_of(held).copy()
    return copied


def _like(parameter: Tensor) -> Tensor:
    # As DistributedDataParallel's buckets do: elements that overlap, or leave gaps, are laid out row by row.
    dtype = loss_dtype(parameter.dtype)
    if not is_dense(parameter):
        return torch.empty(parameter.shape, dtype=dtype)
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype)


def state_of(rank: int, size: int, residuals: Mapping[str, Any], **more: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's state; with what is kept besides of parameters, such as a velocity."""
    copies = {
        kind: {name: torch.as_tensor(kept).clone() for name, kept in arrays.items()}
        for kind, arrays in {_LOSSES: residuals, **more}.items()
    }
    return {"version": _VERSION, "rank": rank, "size": size, **copies}


def residuals_of(
    states: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    rank: int,
    size: int,
    shapes: Mapping[str, Sequence[int]],
    more: Sequence[str] = (),
    kind: str = _LOSSES,
    optional: Collection[str] = (),
) -> dict[str, Tensor]:
    """A rank's part of a state, or of all ranks' states of then: their sum over the ranks stays what it was.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        Made by `state_of`.
    rank, size : int
        Of now.
    shapes : mapping
        Of the model's parameters, by name.
    more : sequence of str
        What such states hold besides.
    kind : str
        Which of the arrays of a state are wanted.
    optional : collection of str
        What such states may hold, or lack.

    Raises
    ------
    InvalidArgument
        If one state is of another rank or number of ranks, several are not of all ranks, or it is another model's,
        another version's, not finite, or no such state.
    """
    wanted = _KEYS.union(more)
    for state in [states] if isinstance(states, Mapping) else states:
        if isinstance(state, Mapping) and state.get("version", _VERSION) != _VERSION:
            raise InvalidArgument(
                f"this state is of version {state['version']!r}, and this release reads {_VERSION}: leave it out, and "
                "training goes on as if nothing had been lost so far"
            )
        if not isinstance(state, Mapping) or set(state).difference(optional) != wanted.difference(optional):
            needed = ", ".join(sorted(wanted))
            raise InvalidArgument(f"this is no state of such a compression: {needed} are needed")
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
    residuals: dict[str, Tensor] = {}
    for state in chosen:
        for name, kept in state.get(kind, {}).items():
            if name not in shapes or tuple(kept.shape) != tuple(shapes[name]):
                raise InvalidArgument(
                    f"this state has {list(kept.shape)} elements of {name!r}, which is no parameter of that shape"
                )
            if not bool(torch.isfinite(kept).all()):
                raise InvalidArgument(f"this state's residual of {name!r} hold NaN or Inf")
            residuals[name] = residuals[name] + kept if name in residuals else kept.clone()
    return residuals


def check_fed_back(residuals: Mapping[str, Tensor], *, feedback: bool) -> None:
    """Refuse residuals where nothing feeds them back.

    Raises
    ------
    InvalidArgument
        If there are some.
    """
    if residuals and not feedback:
        raise InvalidArgument(
            "this state has residuals, but feedback=False leaves them out: load it with feedback=True"
        )


def added(residuals: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add residuals up, by name."""
    both = {name: residuals[name] + more[name] for name in residuals.keys() & more.keys()}
    return {**residuals, **more, **both}


def layout_of(states: Mapping[str, Any] | Sequence[Mapping[str, Any]], names: Collection[str]) -> Layout | None:
    """Find the buckets that a state's next step had, under `BUCKETS`; None if it had none, or of other parameters.

    DistributedDataParallel makes its buckets anew after the first step, and where an element lies in a bucket decides
    how it is encoded and in which order ranks add it. So a first step that goes on from a state has that one's buckets.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        Of one rank, or of all: `residuals_of` has looked at them.
    names : collection of str
        Those of all parameters that are in buckets.
    """
    layout: Layout = (states if isinstance(states, Mapping) else states[0]).get(BUCKETS, ())
    held = [name for bucket in layout for name in bucket]
    return layout if held and sorted(held) == sorted(names) else None


class GatheredState:
    """A compression whose state is that of all ranks: what is lost differs from rank to rank, while Accelerate,
    Lightning and others save what rank 0 gives them.

    Parameters
    ----------
    compression : GradientCompression, ShardCompression, DGC, ACPSGD, PowerSGD, OneBitAdam, ZeroOneAdam or DiLoCo
        Whose states are gathered.
    group : torch.distributed.ProcessGroup, optional
        Of its ranks; the default group's by default.

    Examples
    --------
    >>> compression = compcoll.torch.compress(DistributedDataParallel(nn.Linear(64, 64)), codec="zfp", rate=8)
    >>> state = compcoll.torch.GatheredState(compression).state_dict()  # whole on rank 0
    >>> compcoll.torch.GatheredState(compression).load_state_dict(state)
    """

    def __init__(self, compression: Any, group: dist.ProcessGroup | None = None) -> None:
        self._compression = compression
        self._group = group

    def state_dict(self) -> dict[str, Any]:
        """Gather all ranks' states on rank 0; the others get one that is empty. Collective: every rank calls it.

        Rank 0 needs memory for as many states as there are ranks.
        """
        own = self._compression.state_dict()
        first = dist.get_rank(self._group) == 0
        states: list[Any] | None = [None] * dist.get_world_size(self._group) if first else None
        dist.gather_object(own, states, group_dst=0, group=self._group)
        return {_RANKS: states or []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of rank 0's: every rank reads it. There may be more or fewer ranks than then.

        Raises
        ------
        InvalidArgument
            If it is no such state, another rank's, or does not belong to this compression.
        """
        if not isinstance(state, Mapping) or set(state) != {_RANKS}:
            raise InvalidArgument("this is no state of all ranks: what state_dict() gave on rank 0 is needed")
        if not state[_RANKS]:
            raise InvalidArgument("this state is empty, as state_dict() gives it on other ranks than 0: save rank 0's")
        self._compression.load_state_dict(state[_RANKS])
