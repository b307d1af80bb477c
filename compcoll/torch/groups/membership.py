"""The ranks of one of PyTorch's process groups as a communicator of ours: over MPI, or over the group itself."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ... import config
from ...communicator import Communicator
from ...devices.host import HostDevice
from ...errors import InvalidArgument, MPIMissing, NotUnderMPI, ThreadsUnavailable
from ...model.profile import remember, save
from ...tools.in_passing import estimate
from ...tools.machine import launcher
from ...tools.timing import Bar, Stopwatch
from ...tools.tune import describe
from ...tools.tune import tune as _tune
from ..membership import gathered, timeout_of
from ..untraced import untraced
from .transport import GroupTransport, node_name

WAYS = ("auto", "mpi", "group")
"""What wires may travel over: MPI where the ranks are MPI's and else the group, or one of both."""

IN_FLIGHT = 2
"""The most communicators of `communicators_of`: one waits for its wires while the other encodes."""

_THREADS_ADVICE = 'set mpi4py.rc.thread_level = "multiple" before MPI starts, and use an MPI built with threads'
_BY_ELASTIC = "TORCHELASTIC_RUN_ID"  # torchrun's


Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""What names a group: itself, a device mesh of one dimension or of two, whose rows are nodes, or None, the default."""

_of_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups that were made of meshes, by their ranks; as long as the default group lives."""
_rows: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Of groups that were made of a mesh, this rank's row in it."""


def check_group(group: Group) -> dist.ProcessGroup:
    """The group that a call means, the default one if it names none. Collective for a new mesh of two dimensions.

    Raises
    ------
    InvalidArgument
        If there is none yet, or this process is not in it.
    """
    if not dist.is_initialized():
        raise InvalidArgument("there is no process group yet: torch.distributed.init_process_group() comes first")
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        group = _group_of_mesh(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"group={group!r}: this process is not in that group, and must not call its collectives")
    return group


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of a mesh's ranks, made at first."""
    place = mesh.get_coordinate()
    if place is None:
        raise InvalidArgument(f"group={mesh!r}: this process is not in that mesh, and must not call its collectives")
    if mesh.ndim > 2:
        raise InvalidArgument(f"group={mesh!r} has {mesh.ndim} dimensions: one is a group, two are nodes and ranks")
    if mesh.ndim == 1:
        return mesh.get_group()
    known = _of_meshes.setdefault(dist.group.WORLD, {})
    if (name := f"{mesh.device_type} {mesh.mesh.tolist()}") not in known:
        ranks = sorted(mesh.mesh.flatten().tolist())
        limit = timedelta(seconds=timeout_of(mesh.get_group(0), torch.device(mesh.device_type)))
        # Names that are made locally differ between ranks that have made different numbers of groups.
        local = len(ranks) < dist.get_world_size()
        group = known[name] = dist.new_group(ranks, timeout=limit, use_local_synchronization=local)
        _rows[group] = place[0]
    return known[name]


def communicator_of(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: float | None = None,
    over: str = "auto",
    *,
    measured: bool = False,
) -> Communicator:
    """Make a communicator whose rank k is the group's rank k. Collective in the group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Any backend's.
    device : torch.device
        Where the group has its tensors.
    timeout : float, optional
        Seconds without progress after which a wait gives up; by default COMPCOLL_TIMEOUT, or else the group's.
    over : {"auto", "mpi", "group"}
        What wires travel over.
    measured : bool
        Whether to measure a group's links first, if nobody has: for ``algorithm="auto"``.

    Raises
    ------
    InvalidArgument
        If the time-out is no number of seconds, or there is no such way.
    NotUnderMPI
        On every rank, if MPI is asked for, and the group's ranks are not ranks of one MPI job.
    MPIMissing
        If MPI is asked for, and there is none.
    ThreadsUnavailable
        On every rank, if MPI was initialised without MPI_THREAD_MULTIPLE on any.
    """
    return communicators_of(group, device, timeout, over, measured=measured, most=1)[0]


def communicators_of(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: float | None = None,
    over: str = "auto",
    *,
    measured: bool = False,
    most: int = IN_FLIGHT,
) -> list[Communicator]:
    """Make communicators for as many collectives that go on at once, each in a thread of its own. Collective.

    Over a group who looks for a message waits for it: there a communicator has one collective after another. Between
    nodes, where wires take most of the time, there are several, with connections of their own. There is one inside a
    node, where ranks share cores, on GPUs, where a stream orders everything, and over MPI. Parameters and errors are
    those of `communicator_of`; ``most`` tells how many.
    """
    if over not in WAYS:
        raise InvalidArgument(f"over={over!r} is none of {', '.join(WAYS)}")
    if timeout is not None or config.timeout_is_set():
        seconds = config.timeout(timeout)
    else:
        seconds = timeout_of(group, device)
    ranks = None if over == "group" else _ranks_in_mpi(group, device, over)
    if ranks is None:
        if measured and group.size() > 1:
            _measure(group, device, seconds)
        found = [Communicator(_transport(group, device, seconds), timeout=seconds)]
        if device.type == "cpu" and len(set(found[0].nodes)) > 1:
            found += [Communicator(_transport(group, device, seconds), timeout=seconds) for _ in range(1, most)]
        return found
    from ...transports.library import among

    comm = among(ranks)
    communicator = Communicator(comm, progress="nap", timeout=seconds)
    comm.Free()
    return [communicator]


def _transport(group: dist.ProcessGroup, device: torch.device, seconds: float) -> GroupTransport:
    """A transport over a group; ranks of a node are told by its mesh, or found."""
    host = f"{node_name()} row {_rows[group]}" if group in _rows else None
    return GroupTransport(group, device, seconds, host=host)


def _measure(group: dist.ProcessGroup, device: torch.device, seconds: float) -> None:
    """Measure what a group's links carry, unless a profile tells."""
    transport = _transport(group, device, seconds)
    remember(transport, HostDevice().name, lambda: estimate(Communicator(transport, timeout=seconds), transport))


@untraced
def tune(group: Group = None, seconds: float = 30.0) -> str:
    """Measure codecs and what a group's links carry, and store a profile by which ``algorithm="auto"`` chooses from
    then on, in this user's settings: that of these hosts and this backend. Collective in the group.

    Without one a few allreduces are measured when a group is used first, which takes two or three seconds.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or DeviceMesh, optional
        The default one by default.
    seconds : float
        No measurement begins after so long.

    Returns
    -------
    str
        What was measured, for people.

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
    with Bar(enabled=transport.rank == 0) as bar:
        stored = _tune(communicator, transport, Stopwatch(transport, seconds), bar)
    path = transport.tell(lambda: str(save(stored)))
    return "\n".join([*describe(stored), f"stored in {path}"])


def device_of(group: dist.ProcessGroup) -> torch.device:
    """A device on which a group has its tensors."""
    kinds = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def _ranks_in_mpi(group: dist.ProcessGroup, device: torch.device, over: str) -> list[int] | None:
    """Find the group's ranks in MPI_COMM_WORLD; None if they are no MPI's, and need not be."""
    own = " ".join(map(str, map(int, _standing(needed=over == "mpi"))))
    told = [tuple(map(int, row.split())) for row in gathered(own.encode(), group, device)]
    ranks, sizes, threads = (list(column) for column in zip(*told, strict=True))
    if len(set(ranks)) < len(ranks) or len(set(sizes)) > 1 or sizes[0] < len(ranks):
        if over == "auto":
            return None
        raise NotUnderMPI(
            f"the process group has {len(ranks)} ranks, but in MPI_COMM_WORLD they are rank "
            f"{', '.join(f'{rank} of {size}' for rank, size in zip(ranks, sizes, strict=True))}: start the program "
            'with mpirun or srun (torchrun does not start MPI), or have wires travel over the group: over="group"'
        )
    if not all(threads):
        lacking = ", ".join(str(rank) for rank, have in enumerate(threads) if not have)
        raise ThreadsUnavailable(
            "gradients are reduced by a thread while back-propagation goes on, but MPI was initialised without "
            f"MPI_THREAD_MULTIPLE on rank {lacking}: {_THREADS_ADVICE}"
        )
    return ranks


def mpi_knows(ranks: int) -> bool:
    """Tell whether this process is one of at least so many ranks of MPI's."""
    return _standing()[1] >= ranks


def _standing(*, needed: bool = False) -> tuple[int, int, bool]:
    """Find this process's rank in MPI_COMM_WORLD, the number of ranks there, and whether several threads may call MPI.

    There are no ranks if MPI does not run and no launcher starts it, unless it is needed. torchrun, which may itself be
    started by srun, starts processes that MPI must not take for its rank.
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
