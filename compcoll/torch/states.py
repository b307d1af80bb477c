"""Residuals as saved with a checkpoint: the state of one rank, and one state of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ..communicator import Communicator
from ..errors import InvalidArgument
from ..feedback import ErrorFeedback
from .buffers import array_of, is_dense
from .private import WRAPPERS

_VERSION = 2
RESIDUALS = "residuals"
_KEYS = {"version", "rank", "size", RESIDUALS}
STEPS, BUCKETS = "steps", "buckets"
"""Further keys of DistributedDataParallel states: the number of steps so far, and the buckets of the next step."""
BEGUN, BETWEEN, REPLICAS, MESHES = "begun", "between", "replicas", "meshes"
"""Further keys of FSDP2 states: the number of collectives so far; for hybrid sharding also the residuals between
replicas and the number of replicas; for models on several meshes the rank's `Place` in each parameter's mesh.
"""
OPTIONAL = (STEPS, BUCKETS, BEGUN, BETWEEN, REPLICAS, MESHES)
"""Keys that a state of gradients may lack, since a state of one wrapper may be loaded under another."""
_RANKS = "ranks"

Layout = Sequence[Sequence[str]]
"""Names of the parameters in each bucket of DistributedDataParallel, in order."""


class Place(NamedTuple):
    """A rank's place in a mesh whose ranks average the gradients of some parameters.

    Attributes
    ----------
    rank, size : int
        Number of the rank in the mesh, and number of the mesh's ranks.
    replicas : int
        Number of replicas of the shards.
    subset, subsets : int
        If other ranks of the model average these parameters' gradients separately, such as those of other experts:
        the number of this rank's subset, and the number of subsets.
    """

    rank: int
    size: int
    replicas: int
    subset: int = 0
    subsets: int = 1


def place_of(state: Mapping[str, Any], name: str) -> Place:
    """Return the place of a state's rank in the mesh of a parameter."""
    if (given := state.get(MESHES, {}).get(name)) is not None:
        return Place(*given)
    return Place(state["rank"], state["size"], state.get(REPLICAS, 1))


def of_mesh(
    states: Mapping[str, Any] | Sequence[Mapping[str, Any]], names: Collection[str], places: Sequence[Place], now: Place
) -> Any:
    """Return states as if the model had only some parameters, all in one mesh.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        One state, or those of all ranks.
    names : collection of str
        Names of the parameters.
    places : sequence of Place
        The states' places in the mesh of these parameters.
    now : Place
        The current place of this rank in their mesh. States of other subsets are left out.

    Raises
    ------
    InvalidArgument
        If the number of subsets is not the current one.
    """
    name = next(iter(names))
    for place in places:
        _check_subsets(name, place, now.subsets)
    if isinstance(states, Mapping) and places[0].subset != now.subset:
        raise InvalidArgument(
            f"this is the state of a rank that averages gradients of {name!r} with other ranks than this one: give the "
            "states of all ranks"
        )

    def part(state: Mapping[str, Any], place: Place) -> dict[str, Any]:
        kept = {
            kind: {name: state[kind][name] for name in names if name in state[kind]}
            for kind in (RESIDUALS, BETWEEN)
            if kind in state
        }
        return {**state, **kept, "rank": place.rank, "size": place.size, MESHES: {}}

    if isinstance(states, Mapping):
        return part(states, places[0])
    return [part(*each) for each in zip(states, places, strict=True) if each[1].subset == now.subset]


def _check_subsets(name: str, place: Place, subsets: int) -> None:
    if place.subsets != subsets:
        raise InvalidArgument(
            f"in this state, {place.subsets} sets of ranks average gradients of {name!r} separately, but here "
            f"{subsets}: load it into a model with as many sets, for example with as many expert-parallel ranks"
        )


def logical_name(name: str) -> str:
    """Return the name that a parameter has without the wrappers of torch.compile and of activation checkpointing."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def count_calls_with(feedback: ErrorFeedback | None, communicator: Communicator) -> None:
    """Give a feedback the number of collectives so far, by which ``randomk`` selects its random elements.

    Codecs that round at random use this number, too, and states contain it.
    """
    if feedback is not None:
        feedback.calls = communicator.sequence_number


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the element type of residuals for gradients of a type."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def from_memory(values: npt.NDArray[Any] | None, parameter: Tensor) -> Tensor:
    """Convert values in the order of a parameter's memory to the parameter's own order and shape; zeros for None.

    Parameters
    ----------
    values : array or None
        One value for each element, in the order of the parameter's memory, as in DistributedDataParallel's buckets.
    parameter : Tensor
        Parameter of any memory format.
    """
    held = _like(parameter)
    if values is None:
        return held.zero_().contiguous()
    array_of(held)[...] = values
    return held.clone(memory_format=torch.contiguous_format)


def to_memory(values: Tensor, parameter: Tensor) -> npt.NDArray[Any]:
    """Copy values of a parameter's shape into the order of its memory: the inverse of `from_memory`."""
    held = _like(parameter).copy_(values)  # must outlive the view of it
    copied: npt.NDArray[Any] = array_of(held).copy()
    return copied


def _like(parameter: Tensor) -> Tensor:
    # As in DistributedDataParallel's buckets, a parameter whose memory has gaps or overlaps is laid out row by row.
    dtype = residual_dtype(parameter.dtype)
    if not is_dense(parameter):
        return torch.empty(parameter.shape, dtype=dtype)
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype)


def state_of(rank: int, size: int, residuals: Mapping[str, Any], **more: Mapping[str, Any]) -> dict[str, Any]:
    """Make a rank's state, with further values of its parameters, such as a velocity."""
    copies = {
        kind: {name: torch.as_tensor(kept).clone() for name, kept in arrays.items()}
        for kind, arrays in {RESIDUALS: residuals, **more}.items()
    }
    return {"version": _VERSION, "rank": rank, "size": size, **copies}


def residuals_of(
    states: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    rank: int,
    size: int,
    shapes: Mapping[str, Sequence[int]],
    more: Sequence[str] = (),
    kind: str = RESIDUALS,
    optional: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return a rank's residuals from its own state, or its share from all ranks' states.

    The shares preserve the sum of the residuals over the ranks, whatever the number of ranks is now.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        Made by `state_of`.
    rank, size : int
        Current rank, and current number of ranks.
    shapes : mapping
        Shapes of the model's parameters, by name.
    more : sequence of str
        Further keys of such states.
    kind : str
        Key of the wanted arrays.
    optional : collection of str
        Keys that such states may have or lack.

    Raises
    ------
    InvalidArgument
        If one state is of another rank or number of ranks, several states are not those of all ranks, or a state is of
        another model or version, not finite, or not such a state.
    """
    residuals: dict[str, Tensor] = {}
    for state in chosen_from(states, rank, size, more, optional):
        for name, kept in state.get(kind, {}).items():
            if name not in shapes or tuple(kept.shape) != tuple(shapes[name]):
                raise InvalidArgument(
                    f"this state has {list(kept.shape)} elements of {name!r}, which is no parameter of that shape"
                )
            if not bool(torch.isfinite(kept).all()):
                raise InvalidArgument(f"this state's residual of {name!r} holds NaN or Inf")
            _check_subsets(name, place_of(state, name), 1)
            residuals[name] = residuals[name] + kept if name in residuals else kept.clone()
    return residuals


def check_versions(states: Sequence[Any]) -> None:
    """Check that no state was saved by a release with another format.

    Raises
    ------
    InvalidArgument
        If a state has another version.
    """
    for state in states:
        if isinstance(state, Mapping) and state.get("version", _VERSION) != _VERSION:
            raise InvalidArgument(
                f"this state has version {state['version']!r}, but this release reads version {_VERSION}: do not load "
                "it; training then continues without its residuals; see docs/upgrading.md"
            )


def chosen_from(
    states: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    rank: int,
    size: int,
    more: Sequence[str] = (),
    optional: Collection[str] = (),
) -> list[Mapping[str, Any]]:
    """Return the states whose residuals a rank takes over: the arguments and errors are those of `residuals_of`."""
    wanted = _KEYS.union(more)
    every = [states] if isinstance(states, Mapping) else states
    check_versions(every)
    for state in every:
        if not isinstance(state, Mapping) or set(state).difference(optional) != wanted.difference(optional):
            needed = ", ".join(sorted(wanted))
            raise InvalidArgument(f"this is no state of such a compression, which has the keys {needed}")
    if isinstance(states, Mapping):
        if (states["rank"], states["size"]) != (rank, size):
            raise InvalidArgument(
                f"this is the state of rank {states['rank']} of {states['size']}, but here is rank {rank} of {size}: "
                "give the states of all ranks"
            )
        return [states]
    ranks = [state["rank"] for state in states]
    if not states or sorted(ranks) != list(range(states[0]["size"])):
        raise InvalidArgument(f"states of ranks {ranks} were given: give the state of each rank once")
    return [state for state in states if state["rank"] % size == rank]


def check_fed_back(residuals: Mapping[str, Tensor], *, feedback: bool) -> None:
    """Check that no residuals are loaded where feedback is off.

    Raises
    ------
    InvalidArgument
        If there are residuals, and ``feedback`` is False.
    """
    if residuals and not feedback:
        raise InvalidArgument(
            "this state has residuals, but feedback=False leaves them out: load it with feedback=True"
        )


def added(residuals: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add residuals by name."""
    both = {name: residuals[name] + more[name] for name in residuals.keys() & more.keys()}
    return {**residuals, **more, **both}


def layout_of(states: Mapping[str, Any] | Sequence[Mapping[str, Any]], names: Collection[str]) -> Layout | None:
    """Return the buckets of a state's next step; None if it has no buckets, or buckets of other parameters.

    DistributedDataParallel rebuilds its buckets after the first step. The place of an element in a bucket decides how
    it is encoded, and in which order ranks add it. So the first step after loading a state uses the state's buckets.

    Parameters
    ----------
    states : mapping, or sequence of mapping
        State of one rank, or of all ranks; `residuals_of` has checked them.
    names : collection of str
        Names of all parameters that are in buckets.
    """
    layout: Layout = (states if isinstance(states, Mapping) else states[0]).get(BUCKETS, ())
    held = [name for bucket in layout for name in bucket]
    return layout if held and sorted(held) == sorted(names) else None


class GatheredState:
    """Wrap a compression so that its state holds the states of all ranks.

    Residuals differ from rank to rank, while Accelerate, Lightning and others save the state of rank 0 only.

    Parameters
    ----------
    compression : GradientCompression, ShardCompression, DGC, ACPSGD, PowerSGD, OneBitAdam, ZeroOneAdam or DiLoCo
        Compression whose states are gathered.
    group : torch.distributed.ProcessGroup, optional
        Group of its ranks; the default group by default.

    Examples
    --------
    >>> compression = compcoll.torch.compress(DistributedDataParallel(nn.Linear(64, 64)))
    >>> state = compcoll.torch.GatheredState(compression).state_dict()  # whole on rank 0
    >>> compcoll.torch.GatheredState(compression).load_state_dict(state)
    """

    def __init__(self, compression: Any, group: dist.ProcessGroup | None = None) -> None:
        self._compression = compression
        self._group = group

    def state_dict(self) -> dict[str, Any]:
        """Gather all ranks' states on rank 0; other ranks get an empty one. Collective: every rank calls it.

        Rank 0 needs memory for the states of all ranks.
        """
        own = self._compression.state_dict()
        first = dist.get_rank(self._group) == 0
        states: list[Any] | None = [None] * dist.get_world_size(self._group) if first else None
        dist.gather_object(own, states, group_dst=0, group=self._group)
        return {_RANKS: states or []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state saved by rank 0: every rank reads it. The number of ranks may have changed.

        Raises
        ------
        InvalidArgument
            If it was not returned by `state_dict` on rank 0, or does not belong to this compression.
        """
        if not isinstance(state, Mapping) or set(state) != {_RANKS}:
            raise InvalidArgument("this is no state of all ranks: load what state_dict() returned on rank 0")
        if not state[_RANKS]:
            raise InvalidArgument("this state is empty, as on all ranks but 0: save and load the state of rank 0")
        self._compression.load_state_dict(state[_RANKS])
