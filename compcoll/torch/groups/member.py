"""The part of this process in a process group: a communicator over it, its calls in their order, and what they take.

Of each group that is used a communicator is kept, over a gloo group of the same ranks. Calls run in the order in which
they were started, an asynchronous one in a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ...codecs.base import Codec
from ...communicator import Communicator
from ...errors import InvalidArgument, InvalidBuffer, UnsupportedDevice, UnsupportedDType
from ...feedback import ErrorFeedback
from ...registry import as_codec
from ...stats import Stats
from ..arrays import GPUArrays, HostArrays, arrays_on
from ..buffers import COMPRESSIBLE
from ..job_queue import JobQueue, Work
from ..linear import Linear
from ..roll_call import Board
from ..untraced import untraced
from .membership import Group, check_group, communicator_of


class Decision(NamedTuple):
    """The way in which a sum runs.

    Attributes
    ----------
    by_group : Stats or None
        What is said of it where it is the group's own all_reduce.
    operation : Linear
        The sum or mean.
    codec, algorithm, feedback
        Of the communicator's allreduce otherwise.
    """

    by_group: Stats | None
    operation: Linear
    codec: Codec
    algorithm: str
    feedback: ErrorFeedback | None


class Member:
    """The part of this process in a group: its communicator, and its calls in their order.

    Attributes
    ----------
    stats : Stats or None
        Of the collective that ended last.
    decided : dict
        How sums of one tensor run, by all their arguments. Those need no other look.
    in_one_node : bool
        Whether all ranks are in one node, and open collectives through memory that they share.
    board : Board
        Where those that wait in the group's own all_reduce find out who is silent.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.communicator: Communicator = communicator_of(group, device, over="group", measured=True)
        self.stats: Stats | None = None
        self.decided: dict[tuple[Any, ...], Decision] = {}
        self.board: Board = self.communicator._transport.board  # type: ignore[attr-defined]  # of this group, over it
        self.in_one_node = len(set(self.communicator.nodes)) == 1
        self._group = ref(group)  # which a member must not keep alive
        self._jobs = JobQueue("group")
        self._places: dict[torch.device, HostArrays | GPUArrays] = {}

    @property
    def carrier_known(self) -> bool:
        """Tell whether the ranks have found out what carries messages between their GPUs, by which ``auto`` decides."""
        there = self.communicator._gpu
        return there is not None and there.carrier_known

    def all_reduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work:
        """Start the group's own all_reduce, without compression."""
        group: Any = self._group()
        return getattr(group, "uncompressed_allreduce", group.allreduce)(tensors, options)

    def place(self, device: torch.device) -> HostArrays | GPUArrays:
        """The arrays that stand for tensors of a device."""
        if device not in self._places:
            self._places[device] = arrays_on(device)
        return self._places[device]

    def start(self, run: Callable[[], Any], result: Any, async_op: bool, *tensors: Tensor) -> Work | None:
        """Run a collective in its turn; at once if the caller waits."""

        def job() -> Any:
            run()
            self.stats = self.communicator.stats
            return result

        place = self.place(tensors[0].device)
        if async_op:
            return place.submit(self._jobs, job, *tensors)
        place.run(self._jobs, job, *tensors)
        return None


members: dict[ReferenceType[dist.ProcessGroup], Member] = {}
"""By group, as long as it lives: one that is made anew is another. A WeakKeyDictionary costs a call of Python's."""


def member_of(group: dist.ProcessGroup, device: torch.device) -> Member:
    """The part of this process in a group, made at first. Collective then."""
    if (known := members.get(ref(group))) is not None:
        return known
    made = members[ref(group, members.pop)] = Member(group, device)
    return made


@untraced
def stats(group: Group = None) -> Stats | None:
    """Tell what the compressed collective of a group that ended last did on this rank: codec, algorithm and bytes.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or torch.distributed.DeviceMesh, optional
        The default one by default.

    Returns
    -------
    Stats or None
        None before the first.

    Examples
    --------
    >>> compcoll.torch.all_reduce(torch.ones(1024), op="avg", codec="zfp", rate=8)
    >>> compcoll.torch.stats().collective
    'allreduce'
    """
    member = members.get(ref(check_group(group)))
    return None if member is None else member.stats


def check_tensors(group: Group, *tensors: Tensor) -> dist.ProcessGroup:
    """Refuse tensors that cannot be compressed; find the group that is meant."""
    group = check_group(group)
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidBuffer(f"{kind}: dense tensors are needed")
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        where = ", ".join(sorted(map(str, devices))) or "none"
        raise UnsupportedDevice(f"a call's tensors must be on one device, not on {where}")
    if len({tensor.dtype for tensor in tensors}) != 1:
        raise InvalidBuffer(f"tensors of one element type are needed, not {[str(t.dtype) for t in tensors]}")
    (device,), dtype = devices, tensors[0].dtype
    if dtype not in COMPRESSIBLE:
        raise UnsupportedDType(
            f"{dtype} cannot be compressed: {', '.join(map(str, COMPRESSIBLE))} can; use torch.distributed's own"
        )
    backends = dist.get_backend_config(group) if group in dist.distributed_c10d._world.pg_map else ""
    if backends and not any(each.partition(":")[0] == device.type for each in str(backends).split(",")):
        raise UnsupportedDevice(
            f"tensors on {device} over a group of backends {backends}: it has none for {device.type}"
        )
    return group


def coding(codec: str | Codec | None, options: dict[str, Any]) -> Codec:
    """Make the codec that a call names.

    Raises
    ------
    InvalidArgument
        If it names none.
    """
    chosen = as_codec(codec, options)
    if chosen is None:
        raise InvalidArgument("codec=None: name a codec, or use torch.distributed's own collective")
    return chosen


def check_fixed(codec: Codec) -> Codec:
    """Refuse a codec whose wires have sizes that others do not know.

    Raises
    ------
    InvalidArgument
        If it is one.
    """
    if not codec.fixed_size:
        raise InvalidArgument(f"{codec!r}: its wires have sizes that other ranks do not know; use one of a fixed rate")
    return codec
