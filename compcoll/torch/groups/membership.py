"""Communicators for PyTorch process groups, over MPI or over gloo, and this process's calls in each group.

Each group in use has one communicator, over a gloo group of the same ranks. Calls run in the order in which they were
started; a thread runs the asynchronous ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ... import config
from ...codecs.base import Codec
from ...codecs.registry import as_codec
from ...communicator import Communicator
from ...errors import (
    CollectiveMismatch,
    InvalidArgument,
    InvalidBuffer,
    MPIMissing,
    NotUnderMPI,
    ThreadsUnavailable,
    UnsupportedDevice,
    UnsupportedDType,
)
from ...execute import observation
from ...feedback import ErrorFeedback
from ...host.device import HostDevice
from ...plan.cost import Profile
from ...plan.profile import remember, save
from ...stats import Stats
from ...tools.machine import launcher
from ...tools.tune import describe
from ...tools.tune import tune as _tune
from ...transports.serialization import packed, unpacked
from .. import private
from ..agreement import gathered, timeout_of
from ..buffers import COMPRESSIBLE, check_device
from ..failure_detector import Board
from ..job_queue import JobQueue, Work
from ..linear import Linear
from ..streams import JobStreams
from ..untraced import untraced
from .transport import GroupTransport, node_name

TRANSPORTS = ("auto", "mpi", "group")
"""Transports of wires. "auto" is MPI if the group's ranks are ranks of one MPI job, and otherwise the group."""

IN_FLIGHT = 2
"""The most communicators that `communicators_of` makes: one waits for its wires while the other encodes."""

_THREADS_ADVICE = 'set mpi4py.rc.thread_level = "multiple" before MPI starts, and use an MPI built with threads'
_BY_ELASTIC = "TORCHELASTIC_RUN_ID"  # torchrun sets it


Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""A process group; a device mesh of one dimension, or of two, whose rows are nodes; or None, the default group."""

_of_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups that were made from meshes, by their ranks; kept as long as the default group lives."""
_rows: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""This rank's row in the mesh from which a group was made."""


def check_group(group: Group) -> dist.ProcessGroup:
    """Return the group that a call names; the default group for None. Collective for a new mesh of two dimensions.

    Raises
    ------
    InvalidArgument
        If there is no group yet, or this process is not in it.
    """
    if not dist.is_initialized():
        raise InvalidArgument(
            accelerate_runs_one_process()
            or "there is no process group yet: call torch.distributed.init_process_group() first"
        )
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        group = _group_of_mesh(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"group={group!r}: this process is not in that group, and must not call its collectives")
    return group


def accelerate_runs_one_process() -> str:
    """Return the text of an error if Accelerate runs this process alone, and otherwise an empty one."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.is_initialized() or accelerate.PartialState().num_processes > 1:
        return ""
    return (
        "Accelerate runs one process only: `accelerate launch --cpu` starts one, whatever --num_processes says. Start "
        "two by `torchrun --nproc-per-node 2 train.py` or `accelerate launch --multi_gpu --num_processes 2 train.py`, "
        "even without GPUs; without GPUs, both need Accelerator(cpu=True), or use_cpu=True of TrainingArguments"
    )


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of a mesh's ranks, which the first call makes."""
    place = mesh.get_coordinate()
    if place is None:
        raise InvalidArgument(f"group={mesh!r}: this process is not in that mesh, and must not call its collectives")
    if mesh.ndim > 2:
        raise InvalidArgument(f"group={mesh!r} has {mesh.ndim} dimensions: a mesh may have 1, or 2 (nodes and ranks)")
    if mesh.ndim == 1:
        return mesh.get_group()
    known = _of_meshes.setdefault(dist.group.WORLD, {})
    if (name := f"{mesh.device_type} {mesh.mesh.tolist()}") not in known:
        ranks = sorted(mesh.mesh.flatten().tolist())
        if local := len(ranks) < dist.get_world_size():
            _check_same_name(mesh, ranks)
        limit = timedelta(seconds=timeout_of(mesh.get_group(0), torch.device(mesh.device_type)))
        with private.uncounted() if local else nullcontext():
            group = known[name] = dist.new_group(ranks, timeout=limit, use_local_synchronization=local)
        _rows[group] = place[0]
    return known[name]


def _check_same_name(mesh: DeviceMesh, ranks: list[int]) -> None:
    """Check that `new_group` gives the group of a mesh one name on all its ranks. Otherwise it waits until a time-out.

    Raises
    ------
    CollectiveMismatch
        On every rank of the mesh, if not.
    """
    names = {private.name_of_new_group(ranks)}
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        parts = gathered(packed(sorted(names)), group, torch.device(mesh.device_type))
        names = {name for part in parts for name in unpacked(part)}
    if len(names) > 1:
        raise CollectiveMismatch(
            f"the ranks of {mesh!r} have made different numbers of process groups: without the other ranks of the job, "
            "PyTorch makes a group only if this number is the same on all its ranks. Use the mesh before any rank "
            "makes groups of its own, or make the same number of groups on each rank"
        )


def communicator_of(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: float | None = None,
    transport: str = "auto",
    *,
    measured: bool = False,
) -> Communicator:
    """Make a communicator whose rank k is the group's rank k. Collective in the group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Group of any backend.
    device : torch.device
        Device of the group's tensors.
    timeout : float, optional
        Seconds without progress after which a wait fails; by default COMPCOLL_TIMEOUT, or else the group's time-out.
    transport : {"auto", "mpi", "group"}
        Transport of wires.
    measured : bool
        Whether to measure the group's links first, if no profile contains them. ``algorithm="auto"`` needs them.

    Raises
    ------
    InvalidArgument
        If the time-out is no number of seconds, or there is no such transport.
    NotUnderMPI
        On every rank, if MPI is requested, but the group's ranks are not ranks of one MPI job.
    MPIMissing
        If MPI is requested, but not installed.
    ThreadsUnavailable
        On every rank, if MPI was initialised without MPI_THREAD_MULTIPLE on any rank.
    """
    return communicators_of(group, device, timeout, transport, measured=measured, most=1)[0]


def communicators_of(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: float | None = None,
    transport: str = "auto",
    *,
    measured: bool = False,
    most: int = IN_FLIGHT,
) -> list[Communicator]:
    """Make communicators for collectives that run at the same time, each in a thread of its own. Collective.

    Over a group, a poll for a message waits for it, so a communicator runs one collective after another. Between nodes,
    transfers take most of the time, so there are ``most`` communicators, each with its own connections. Inside a node,
    on GPUs and over MPI, there is only one: ranks of a node share cores, and a GPU's stream orders all work anyway. The
    other parameters and the errors are those of `communicator_of`.
    """
    if transport not in TRANSPORTS:
        raise InvalidArgument(f"transport={transport!r} is none of {', '.join(TRANSPORTS)}")
    if timeout is not None or config.timeout_is_set():
        seconds = config.timeout(timeout)
    else:
        seconds = timeout_of(group, device)
    ranks = None if transport == "group" else _ranks_in_mpi(group, device, transport)
    if ranks is None:
        if measured and group.size() > 1:
            _measure(group, device, seconds)
        found = [Communicator(_transport(group, device, seconds), timeout=seconds)]
        if device.type == "cpu" and len(set(found[0].nodes)) > 1:
            found += [Communicator(_transport(group, device, seconds), timeout=seconds) for _ in range(1, most)]
        return found
    from ...transports.library import among

    comm = among(ranks)
    communicator = Communicator(comm, progress="sleep", timeout=seconds)
    comm.Free()
    return [communicator]


def _transport(group: dist.ProcessGroup, device: torch.device, seconds: float) -> GroupTransport:
    """Make a transport over a group. Its mesh defines the nodes; without a mesh they are detected."""
    host = f"{node_name()} row {_rows[group]}" if group in _rows else None
    return GroupTransport(group, device, seconds, host=host)


def _measure(group: dist.ProcessGroup, device: torch.device, seconds: float) -> None:
    """Measure a group's links, unless a profile has them."""
    transport = _transport(group, device, seconds)

    def quick_profile() -> Profile:
        with observation.silent():
            return _tune(Communicator(transport, timeout=seconds), transport, quick=True).profile

    remember(transport, HostDevice().name, quick_profile)


@untraced
def tune(group: Group = None, seconds: float = 30.0) -> str:
    """Measure codecs and a group's links, and store a profile for ``algorithm="auto"``. Collective in the group.

    The profile is stored in this user's settings; it holds for these hosts and this backend. Without a profile, the
    first use of a group measures a few allreduces, which takes two or three seconds.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or DeviceMesh, optional
        The default group by default.
    seconds : float
        No measurement begins after this time.

    Returns
    -------
    str
        Report of the measurements.

    Raises
    ------
    ProfileError
        If the profile cannot be written.

    Examples
    --------
    >>> said = compcoll.torch.tune(seconds=0.1)
    >>> said.splitlines()[-1].startswith("stored in")
    True
    """
    group = check_group(group)
    device = device_of(group)
    transport = _transport(group, device, timeout_of(group, device))
    communicator = Communicator(transport)
    stored = _tune(communicator, transport, seconds)
    path = transport.broadcast(lambda: str(save(stored)))
    return "\n".join([*describe(stored), f"stored in {path}"])


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device on which a group has its tensors."""
    kinds = private.device_types(group)
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def _ranks_in_mpi(group: dist.ProcessGroup, device: torch.device, transport: str) -> list[int] | None:
    """Return the group's ranks in MPI_COMM_WORLD; None if they are not MPI ranks and ``transport`` is "auto"."""
    own = packed(_standing(needed=transport == "mpi"))
    standings = [unpacked(each) for each in gathered(own, group, device)]
    ranks, sizes, threads = (list(column) for column in zip(*standings, strict=True))
    if len(set(ranks)) < len(ranks) or len(set(sizes)) > 1 or sizes[0] < len(ranks):
        if transport == "auto":
            return None
        raise NotUnderMPI(
            f"the process group has {len(ranks)} ranks, but in MPI_COMM_WORLD they are rank "
            f"{', '.join(f'{rank} of {size}' for rank, size in zip(ranks, sizes, strict=True))}: start the program "
            'with mpirun or srun (torchrun does not start MPI), or send over the group: transport="group"'
        )
    if not all(threads):
        lacking = ", ".join(str(rank) for rank, have in enumerate(threads) if not have)
        raise ThreadsUnavailable(
            "gradients are reduced by a thread while back-propagation goes on, but MPI was initialised without "
            f"MPI_THREAD_MULTIPLE on rank {lacking}: {_THREADS_ADVICE}"
        )
    return ranks


def mpi_knows(ranks: int) -> bool:
    """Return whether this process is one of at least ``ranks`` MPI ranks."""
    return _standing()[1] >= ranks


def _standing(*, needed: bool = False) -> tuple[int, int, bool]:
    """Return this process's rank in MPI_COMM_WORLD, the number of ranks, and whether several threads may call MPI.

    The number of ranks is 0 if MPI does not run, was not started by a launcher, and is not needed. torchrun's processes
    do not start MPI, unless it is needed: if srun started torchrun, MPI would take each process for srun's rank.
    """
    likely = "mpi4py.MPI" in sys.modules or (_BY_ELASTIC not in os.environ and launcher().name != "none")
    try:
        if needed or likely:
            from ...transports.library import standing

            return standing()
    except MPIMissing:
        if needed:
            raise
    return 0, 0, True


class Decision(NamedTuple):
    """How a sum runs.

    Attributes
    ----------
    by_group : Stats or None
        Statistics to report if the group's own all_reduce runs it.
    operation : Linear
        The sum or mean.
    codec, algorithm, feedback
        Arguments of the communicator's allreduce otherwise.
    """

    by_group: Stats | None
    operation: Linear
    codec: Codec
    algorithm: str
    feedback: ErrorFeedback | None


class Member:
    """A process as a member of a group: its communicator, and its calls in order.

    Attributes
    ----------
    stats : Stats or None
        Statistics of the last completed collective.
    decided : dict
        How to run a sum of one tensor. Its key is all arguments of the call, and equal calls reuse it.
    in_one_node : bool
        Whether all ranks are in one node, and make handshakes through shared memory.
    board : Board
        Reports silent ranks to those that wait in the group's own all_reduce.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.communicator: Communicator = communicator_of(group, device, transport="group", measured=True)
        self.stats: Stats | None = None
        self.decided: dict[tuple[Any, ...], Decision] = {}
        self.board: Board = self.communicator._transport.board  # type: ignore[attr-defined]  # of this group, over it
        self.in_one_node = len(set(self.communicator.nodes)) == 1
        self._group = ref(group)  # a member must not keep its group alive
        self._jobs = JobQueue("group")
        self._streams = JobStreams()

    @property
    def gpu_transport_known(self) -> bool:
        """Whether the transport between the ranks' GPUs is known; ``algorithm="auto"`` depends on it."""
        there = self.communicator._gpu
        return there is not None and there.gpu_transport_known

    def all_reduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work:
        """Start the group's own all_reduce, without compression."""
        group: Any = self._group()
        return getattr(group, "uncompressed_allreduce", group.allreduce)(tensors, options)

    def start(self, run: Callable[[], Any], result: Any, async_op: bool, *tensors: Tensor) -> Work | None:
        """Run a collective after those started before; return a handle at once if `async_op` is set."""

        def job() -> Any:
            run()
            self.stats = self.communicator.stats
            return result

        order = self._streams.order(*tensors)
        if async_op:
            return self._jobs.submit(job, order)
        self._jobs.run(job, order)
        return None


members: dict[ReferenceType[dist.ProcessGroup], Member] = {}
"""Members by group, as long as the group lives. A WeakKeyDictionary would cost a Python call in each look-up."""


def member_of(group: dist.ProcessGroup, device: torch.device) -> Member:
    """Return this process's member of a group. The first call makes it, and is collective."""
    if (known := members.get(ref(group))) is not None:
        return known
    made = members[ref(group, members.pop)] = Member(group, device)
    return made


@untraced
def stats(group: Group = None) -> Stats | None:
    """Return what the last compressed collective of a group did on this rank: codec, algorithm and bytes.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or torch.distributed.DeviceMesh, optional
        The default group by default.

    Returns
    -------
    Stats or None
        None before the first collective.

    Examples
    --------
    >>> compcoll.torch.all_reduce(torch.ones(1024), op="avg", codec="int8")
    >>> compcoll.torch.stats().collective
    'allreduce'
    """
    member = members.get(ref(check_group(group)))
    return None if member is None else member.stats


def check_tensors(group: Group, *tensors: Tensor) -> dist.ProcessGroup:
    """Check that tensors can be compressed, and return the call's group."""
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
    check_device(device)
    if dtype not in COMPRESSIBLE:
        raise UnsupportedDType(
            f"{dtype} cannot be compressed: use {', '.join(map(str, COMPRESSIBLE))}, or torch.distributed's collectives"
        )
    backends = "" if private.group_entry(group) is None else dist.get_backend_config(group)
    if backends and not any(each.partition(":")[0] == device.type for each in str(backends).split(",")):
        raise UnsupportedDevice(
            f"tensors on {device} over a group of backends {backends}: the group has none for {device.type}"
        )
    return group


def coding(codec: str | Codec | None, options: dict[str, Any]) -> Codec:
    """Make the codec that a call names.

    Raises
    ------
    InvalidArgument
        If the call names no codec.
    """
    chosen = as_codec(codec, options)
    if chosen is None:
        raise InvalidArgument("codec=None: name a codec, or use torch.distributed's own collective")
    return chosen


def check_fixed(codec: Codec) -> Codec:
    """Check that the size of a codec's wires does not depend on the values, so that receivers know it.

    Raises
    ------
    InvalidArgument
        If the size depends on the values.
    """
    if not codec.fixed_size:
        raise InvalidArgument(f"{codec!r}: its wires have sizes that receivers do not know; use a codec of fixed size")
    return codec
