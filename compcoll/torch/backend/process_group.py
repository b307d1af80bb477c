"""The process group "compcoll"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ...errors import CollectiveMismatch, CommunicatorBroken, PeerTimeout
from ...stats import Stats
from .. import private
from ..handles import CoalescedWork, CompletedWork
from ..job_queue import JobQueue, Work
from ..options import Options
from ..untraced import untraced
from .channel import Channel, Collective, create_channel, signature
from .collectives import Collectives
from .messages import Message, Messages
from .reductions import Reductions
from .splitting import SplittingGroup


def _collective(prepare: Callable[..., Collective], default: Any) -> Callable[..., Work | CompletedWork]:
    """Make a collective of `ProcessGroup` from the method that prepares it. Collectives run in the order of the calls.

    Parameters
    ----------
    prepare : callable
        Method of `Collectives` or `Reductions`. It takes the collective's arguments, and PyTorch's options if its last
        parameter is ``opts``.
    default : object
        PyTorch's options for callers that pass none.
    """
    code = prepare.__code__
    names = code.co_varnames[1 : code.co_argcount]
    wanted = "opts" in names
    count = len(names) - wanted

    @untraced
    @wraps(prepare)
    def start(self: ProcessGroup, *arguments: Any, opts: Any = default) -> Work | CompletedWork:
        if len(arguments) > count:
            arguments, opts = arguments[:count], arguments[count]
        given = (*arguments, opts) if wanted else arguments
        try:
            collective = prepare(self._collectives, *given)
        except Exception as error:
            self._refuse(prepare.__name__, error)
            raise
        job = partial(self.channel.run, collective, opts.timeout.total_seconds())
        work: Work | CompletedWork = self._completed
        if opts.asyncOp:
            work = self.jobs.submit(job, collective.order)
        else:
            self.jobs.run(job, collective.order)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    return start


class ProcessGroup(SplittingGroup):
    """A process group on MPI.

    Parameters
    ----------
    store : torch.distributed.Store
        Store that `get_group_store` returns. The group itself communicates only through MPI.
    channel : Channel
        Channel between the ranks.
    ranks : list of int
        The ranks of the group in MPI.COMM_WORLD.
    options : Options
        What to compress.
    """

    def __init__(self, store: Any, channel: Channel, ranks: list[int], options: Options) -> None:
        super().__init__(store, channel.rank, channel.size, options)
        self.world_ranks = ranks
        self.channel = channel
        self.jobs = JobQueue()
        self._messages = Messages(channel.comm.Dup(), channel.seconds)
        self._collectives = Reductions(channel, options)
        self._completed = CompletedWork()
        self._coalesced: list[Any] | None = None
        self._alive = True
        _register_stub(self)

    @property
    def stats(self) -> Stats | None:
        """Statistics of the last collective that might be compressed, or used shared memory; None before the first."""
        return self._collectives.stats

    allreduce = _collective(Reductions.allreduce, c10d.AllreduceOptions())
    allreduce_coalesced = _collective(Reductions.allreduce_coalesced, c10d.AllreduceCoalescedOptions())
    reduce = _collective(Reductions.reduce, c10d.ReduceOptions())
    reduce_scatter = _collective(Reductions.reduce_scatter, c10d.ReduceScatterOptions())
    reduce_scatter_single = _collective(Reductions.reduce_scatter_single, c10d.ReduceScatterOptions())
    reduce_scatter_single_coalesced = _collective(
        Reductions.reduce_scatter_single_coalesced, c10d.ReduceScatterOptions()
    )
    broadcast = _collective(Collectives.broadcast, c10d.BroadcastOptions())
    allgather = _collective(Collectives.allgather, c10d.AllgatherOptions())
    allgather_coalesced = _collective(Collectives.allgather_coalesced, c10d.AllgatherOptions())
    all_gather_single = _collective(Collectives.all_gather_single, c10d.AllgatherOptions())
    all_gather_single_coalesced = _collective(Collectives.all_gather_single_coalesced, c10d.AllgatherOptions())
    gather = _collective(Collectives.gather, c10d.GatherOptions())
    scatter = _collective(Collectives.scatter, c10d.ScatterOptions())
    alltoall = _collective(Collectives.alltoall, c10d.AllToAllOptions())
    all_to_all_single = _collective(Collectives.all_to_all_single, c10d.AllToAllOptions())
    barrier = _collective(Collectives.barrier, c10d.BarrierOptions())

    # Names from earlier versions of PyTorch, which parts of PyTorch still call.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @untraced
    def send(self, tensors: Sequence[Tensor], dest: int, tag: int = 0) -> Message:
        return self._started(self._messages.send(tensors, dest, tag))

    @untraced
    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Message:
        return self._started(self._messages.receive(tensors, source, tag))

    @untraced
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Message:
        return self._started(self._messages.receive(tensors, None, tag))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Run a barrier; the error on rank 0 names the first late rank, or all late ranks with `wait_all_ranks`."""
        seconds = self.channel.seconds if timeout is None else timeout.total_seconds()
        if self.rank() == 0 and seconds <= 0:
            raise CommunicatorBroken(f"Rank 0 timed out in monitoredBarrier after {seconds * 1000:.0f} ms")
        barrier = Collective(_nothing, None, signature("monitored_barrier"))
        try:
            self.jobs.run(partial(self.channel.run, barrier, max(seconds, 1e-3)))
        except (CommunicatorBroken, PeerTimeout) as error:
            if self.rank() != 0:
                raise CommunicatorBroken(
                    f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0: {error}"
                ) from error
            missing = error.missing if isinstance(error, PeerTimeout) else ()
            if not missing:
                raise
            late = missing if wait_all_ranks else missing[:1]
            ranks = f"Rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
            raise CommunicatorBroken(f"{ranks} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms") from error

    def _of_some(
        self, ranks: Sequence[int], store: dist.Store, timeout: timedelta | None, options: Options
    ) -> ProcessGroup:
        members = [self.world_ranks[rank] for rank in ranks]
        seconds = self.channel.seconds if timeout is None else timeout.total_seconds()
        return ProcessGroup(store, create_channel(members, seconds), members, options)

    @property
    def timeout(self) -> float:
        """Seconds that a wait may last, for operations without a time-out of their own."""
        return self.channel.seconds

    def set_timeout(self, timeout: timedelta) -> None:
        self.channel.seconds = self._messages.seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """End this group. All its ranks call this."""
        if not self._alive:
            return
        self._alive = False
        for part in self._parts:
            part.shutdown()
        self.jobs.close(self.channel.seconds)
        if self.channel.broken is None:
            self._messages.free()
        self._collectives.log_unused_codec()
        self.channel.free()

    abort = shutdown

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> CoalescedWork:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    def _started(self, message: Message) -> Message:
        if self._coalesced is not None:
            self._coalesced.append(message)
        return message

    def _refuse(self, name: str, error: Exception) -> None:
        """Inform the other ranks, which wait in the same collective, that this rank cannot take part."""
        refusal = signature(f"{name} refused: {type(error).__name__}: {error}", "by rank", self.rank())
        try:
            self.jobs.run(partial(self.channel.run, Collective(_nothing, None, refusal), self.channel.seconds))
        except CollectiveMismatch as mismatch:
            raise error from mismatch


def _nothing() -> None:
    """Do nothing: the ranks' handshake is all that these calls need."""


def _register_stub(group: ProcessGroup) -> None:
    """Register a backend that gives PyTorch's C++ a name and devices; any operation that reaches it is an error."""
    stub = private.fake_backend(group.rank(), group.size())
    custom = dist.ProcessGroup.BackendType.CUSTOM
    for device in ("cpu", "cuda"):
        private.register_backend(group, device, custom, stub)
    private.set_default_backend(group, custom)
