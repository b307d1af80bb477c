"""The ranks of the default process group, as measurements need them: whoever started them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from compcoll.transports.nodes import host_name

from ..timing import Seconds


class Peers:
    """The ranks of a run.

    Attributes
    ----------
    size, nodes : int
        How many they are, and on how many hosts.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self.nodes = len(set(self.everybody(host_name())))

    def everybody(self, value: Any) -> list[Any]:
        """Each rank's value."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def largest(self, seconds: Seconds) -> Seconds:
        """Element by element, the largest of all ranks."""
        dist.all_reduce(torch.from_numpy(seconds), dist.ReduceOp.MAX)
        return seconds
