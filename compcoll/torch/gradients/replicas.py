"""The compressed all-reduce between the replicas of hybrid sharding (HSDP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..handles import CompletedWork

BETWEEN = "between"
REPLICAS = "replicas"
"""What states of hybrid sharding hold besides: losses of a rank's rows between replicas, and how many these are."""
BEGUN = "begun"
"""How many collectives began among the shards, and between replicas: what codecs draw by that round at random."""


class Replicas(dist.ProcessGroup):
    """The process group that a module's all-reduce between replicas is given: FSDP2 has no other place for one's own.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Of this rank's rows.
    average : callable
        Sums or averages a tensor in place, by an operation.
    """

    def __init__(self, group: dist.ProcessGroup, average: Callable[[Tensor, Any], None]) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        self._average = average

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> CompletedWork:
        """Average one tensor; it has ended, or its stream is ordered, when this returns."""
        (tensor,) = tensors
        try:
            self._average(tensor, dist.ReduceOp.SUM if options is None else options.reduceOp)
        except Exception:
            # PyTorch's log of exceptions asks for the backend of every group, and this rank in it.
            world = dist.distributed_c10d._world
            for known in (world.pg_map, world.pg_group_ranks):
                known[self] = known[self._group]
            raise
        return CompletedWork()


def completed(state: Any) -> Any:
    """Give a state of one replica what that of several holds."""
    return state if not isinstance(state, Mapping) or REPLICAS in state else {**state, BETWEEN: {}, REPLICAS: 1}


def folded(state: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """A state of another number of ranks or replicas, as if all its losses were those of the reduce-scatter.

    That one's are averaged by the replicas afterwards; what was lost between them is not.
    """
    residuals: dict[str, Tensor] = {}
    shards = state["size"] // state[REPLICAS]
    for name, kept in state["residuals"].items():
        whole = kept * (replicas / state[REPLICAS])
        if name in state[BETWEEN]:
            lost = state[BETWEEN][name]
            begin = state["rank"] % shards * lost.numel()
            part = whole[begin : begin + lost.numel()]  # what lies beyond is padding
            part += lost[: part.numel()] * replicas
        residuals[name] = whole
    return {**state, "residuals": residuals, BETWEEN: {}}
