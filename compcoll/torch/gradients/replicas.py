"""The compressed all-reduce between the replicas of hybrid sharding (HSDP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..handles import CompletedWork


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
