"""Fusion buffers, which hold factors and exact gradients, and their sums over the ranks."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...codecs.base import Codec
from ...errors import InvalidArgument, UnsupportedDevice
from ...feedback import ErrorFeedback
from ...plan import choose
from .. import private
from ..agreement import gathered, timeout_of
from ..buffers import array_of
from ..failure_detector import board_of, store_of
from ..groups.gloo import make_gloo
from ..groups.membership import communicator_of
from ..handles import Followed
from ..job_queue import JobQueue
from ..states import count_calls_with
from ..training_stats import TrainingStats
from .factors import Gradient

Wait = Callable[[], object]
"""Waits for a sum to end."""


class Kind(enum.Enum):
    """What a buffer holds for each gradient that has factors: the exact gradient, or one factor."""

    EXACT = "exact"
    LEFT = "left"
    RIGHT = "right"


def numbers_of(gradient: Gradient, kind: Kind) -> int:
    """Return how many numbers are sent for a gradient."""
    if kind is Kind.EXACT or not gradient.rank:
        return gradient.size * gradient.parts
    return gradient.rank * (gradient.rows if kind is Kind.LEFT else gradient.columns)


class Buffer:
    """Memory for one sum: factors, then exact gradients, then one number per flag.

    Parameters
    ----------
    gradients : sequence of Gradient
        Gradients of one element type, in the order in which they become ready.
    kind : Kind
        What to send of gradients with factors.
    device : torch.device
        Device of the memory.
    flags : int
        Number of flags.

    Attributes
    ----------
    own : torch.Tensor
        This rank's factors.
    wire : torch.Tensor
        The values to send, and after the sum the means.
    factors, flags : int
        How many numbers of the wire are factors, and flags.
    feedback : ErrorFeedback or None
        Holds the codec's residual of the factors.
    due : set of str
        Gradients that are still missing before the buffer can be sent.
    sent : bool
        Whether the buffer was sent.
    right : Buffer or None
        The buffer of the matching right factors, if a step sends both.
    """

    def __init__(self, gradients: Sequence[Gradient], kind: Kind, device: torch.device, flags: int = 0) -> None:
        self.gradients = list(gradients)
        self.kind = kind
        low = [g for g in gradients if self.has_factor(g)]
        offset = 0
        self._places: dict[str, tuple[int, int]] = {}
        for gradient in (*low, *(g for g in gradients if not self.has_factor(g))):
            end = offset + numbers_of(gradient, kind)
            self._places[gradient.name] = (offset, end)
            offset = end
        self.factors = sum(numbers_of(g, kind) for g in low)
        self._end, self.flags = offset, flags
        dtype = gradients[0].dtype
        self.own = torch.zeros(self.factors, dtype=dtype, device=device)
        self.wire = torch.zeros(offset + flags, dtype=dtype, device=device)
        self.feedback: ErrorFeedback | None = None
        self.right: Buffer | None = None
        self.restart()

    def has_factor(self, gradient: Gradient) -> bool:
        """Return whether this buffer sends a gradient as a factor."""
        return self.kind is not Kind.EXACT and gradient.rank > 0

    def restart(self) -> None:
        """Prepare for another step."""
        self.due = {gradient.name for gradient in self.gradients}
        self.sent = False

    def own_factor(self, gradient: Gradient) -> Tensor:
        """Return a view of this rank's factor, to write to."""
        return self._shaped(self.own, gradient)

    def mean_factor(self, gradient: Gradient) -> Tensor:
        """Return a view of the mean of all ranks' factors."""
        return self._shaped(self.wire, gradient)

    def lost_factor(self, gradient: Gradient) -> Tensor | None:
        """Return the codec's residual of this rank's part of the mean; None without a codec."""
        if self.feedback is None or self.feedback.residual is None:
            return None
        return self._shaped(torch.from_numpy(self.feedback.residual), gradient)

    def put(self, gradient: Gradient, values: Tensor | None, ranks: int) -> None:
        """Store an exact gradient divided by the number of ranks; zeros for None."""
        begin, end = self._places[gradient.name]
        part = self.wire[begin:end].view((*gradient.shape, 2) if gradient.parts == 2 else gradient.shape)
        if values is None:
            part.zero_()
            return
        part.copy_(torch.view_as_real(values.resolve_conj()) if gradient.parts == 2 else values)
        part.div_(ranks)

    def get(self, gradient: Gradient, values: Tensor) -> None:
        """Copy an exact gradient's mean to ``values``."""
        begin, end = self._places[gradient.name]
        part = self.wire[begin:end]
        if gradient.parts == 2:
            # view_as_complex() rejects pairs at an odd offset, hence the copy.
            values.copy_(torch.view_as_complex(part.view(*gradient.shape, 2).clone()))
        else:
            values.copy_(part.view(gradient.shape))

    def put_flags(self, flags: Sequence[bool]) -> None:
        self.wire[self._end :] = torch.tensor(flags, dtype=self.wire.dtype)

    def get_flags(self) -> list[bool]:
        """Return which flags any rank has set."""
        raised: list[bool] = (self.wire[self._end :] != 0).tolist()
        return raised

    def start(self, sums: Sums, stats: TrainingStats, ranks: int) -> Wait:
        """Start to compute the mean; return a callable that waits for it."""
        torch.div(self.own, ranks, out=self.wire[: self.factors])
        return sums.start(self, stats)

    def _shaped(self, memory: Tensor, gradient: Gradient) -> Tensor:
        begin, end = self._places[gradient.name]
        left = self.kind is Kind.LEFT
        return memory[begin:end].view((-1, gradient.rank) if left else (gradient.rank, -1))


def fuse(
    gradients: Sequence[Gradient], kind: Kind, nbytes: float, device: torch.device, *, flagged: bool
) -> list[Buffer]:
    """Distribute all of a model's gradients over buffers.

    A buffer is full at ``nbytes`` times the ratio of sent to uncompressed bytes of the whole model. So there are about
    as many buffers as without compression.

    Parameters
    ----------
    gradients : sequence of Gradient
        Gradients in the order in which they become ready.
    kind : Kind
        What to send of gradients with factors.
    nbytes : float
        Uncompressed size of a buffer in bytes; 0 gives each gradient its own buffer.
    device : torch.device
        Device of the buffers.
    flagged : bool
        Whether the last buffer has a flag for each gradient.

    Returns
    -------
    list of Buffer
        Buffers in sending order.
    """
    sent = {g.name: numbers_of(g, kind) * g.dtype.itemsize for g in gradients}
    limit = nbytes * sum(sent.values()) / max(sum(g.nbytes for g in gradients), 1)
    groups: list[list[Gradient]] = []
    open_groups: dict[torch.dtype, list[Gradient]] = {}
    for gradient in gradients:
        group = open_groups.setdefault(gradient.dtype, [])
        if not group:
            groups.append(group)
        group.append(gradient)
        if sum(sent[g.name] for g in group) >= limit:
            del open_groups[gradient.dtype]
    order = {gradient.name: number for number, gradient in enumerate(gradients)}
    groups.sort(key=lambda group: order[group[-1].name])
    last = len(groups) - 1
    flags = len(gradients) if flagged else 0
    return [Buffer(group, kind, device, flags if number == last else 0) for number, group in enumerate(groups)]


def _line_beside(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Make a process group of the same ranks that only jobs use. Collective.

    Its store key is a random one from rank 0. PyTorch's own group names count the groups that a rank has made. They
    could differ between ranks, which would then wait for each other forever.
    """
    store = store_of(group)
    if store is None:
        raise InvalidArgument(f"group={group!r} has no store: use a group made by init_process_group or new_group")
    key = gathered(secrets.token_hex(8).encode(), group, device)[0].decode()
    own = dist.PrefixStore(f"compcoll/low-rank/{key}", store)
    limit = timedelta(seconds=timeout_of(group, device))
    if dict(each.split(":") for each in dist.get_backend_config(group).split(","))[device.type] != "nccl":
        return make_gloo(board_of(group), own, limit)
    return dist.ProcessGroupNCCL(own, group.rank(), group.size(), private.nccl_options(limit))


class Sums:
    """Sums of the buffers' wires by the process group's own all_reduce, asynchronous and in call order.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        A group of any backend.
    device : torch.device
        Device of the buffers.
    jobs : bool
        Whether jobs of the queue start the sums. The sums then use a process group of their own, because ranks match a
        group's collectives by order, and the caller's thread may start other collectives at the same time.

    Attributes
    ----------
    jobs : JobQueue
        Runs jobs of several sums, one job after another.
    ranks : int
        Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, jobs: bool) -> None:
        self.jobs, self.ranks, self._group = JobQueue("low-rank"), group.size(), group
        self._line = _line_beside(group, device) if jobs else group

    def begin(self, step: int, buffers: int) -> None:
        """Begin a step with at most ``buffers`` buffers. Codecs with random rounding depend on the number ``step``."""

    def start(self, buffer: Buffer, stats: TrainingStats) -> Wait:
        """Start a sum; return a callable that waits for it."""
        started = self._line.allreduce([buffer.wire])
        work = Followed(started, board_of(self._group), "the group's all_reduce of factors")
        stats.calls["all_reduce"] += 1
        nbytes = buffer.wire.numel() * buffer.wire.element_size()
        stats.wire_nbytes += round(2 * (self.ranks - 1) / self.ranks * nbytes)
        return work.wait

    def free(self) -> None:
        """Release threads and communicators. Collective."""
        self.jobs.close()


class CodedSums(Sums):
    """Sums by compcoll's allreduce in a thread of its own: factors with a codec, everything else exactly.

    The codec's residual of a rank's factors is in the buffer's `feedback`. It is not added to the next sum, because the
    next step sends other factors. Instead, the gradient's residual includes it.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks.
    device : torch.device
        Device of the buffers.
    codec : Codec
        Codec of the factors.
    algorithm : str
        As for `compcoll.allreduce`.
    feedback : bool
        Whether to record the codec's residual.
    timeout, transport
        As for `compcoll.torch.compress`.

    Raises
    ------
    UnsupportedDevice
        If the buffers are not on the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        codec: Codec,
        algorithm: str,
        *,
        feedback: bool,
        timeout: float | None = None,
        transport: str = "auto",
    ) -> None:
        if device.type != "cpu":
            raise UnsupportedDevice(
                f"factors on {device} cannot be encoded, only factors on the CPU: use codec=None, which sums the "
                "factors without encoding them"
            )
        super().__init__(group, device, jobs=False)
        self._communicator = communicator_of(group, device, timeout, transport, measured=algorithm == choose.AUTO)
        self._codec, self._algorithm, self._feedback = codec, algorithm, feedback

    def begin(self, step: int, buffers: int) -> None:
        self._communicator.sequence_number = 2 * buffers * step  # two collectives per buffer: factors, and the rest

    def start(self, buffer: Buffer, stats: TrainingStats) -> Wait:
        values, factors = array_of(buffer.wire), buffer.factors
        if self._feedback and buffer.feedback is None:
            buffer.feedback = ErrorFeedback()
        feedback = buffer.feedback

        def job() -> None:
            if factors:
                part = values[:factors]
                count_calls_with(feedback, self._communicator)
                if feedback is not None and feedback.residual is not None:
                    feedback.residual[...] = 0
                self._communicator.allreduce(
                    part, out=part, feedback=feedback, codec=self._codec, algorithm=self._algorithm
                )
                self._count(stats)
            if factors < values.size:
                part = values[factors:]
                self._communicator.allreduce(part, out=part, codec=None)
                self._count(stats)

        return self.jobs.submit(job).wait

    def free(self) -> None:
        super().free()
        self._communicator.free()

    def _count(self, stats: TrainingStats) -> None:
        one = TrainingStats()
        one.add_last(self._communicator)
        stats.calls += one.calls
        stats.wire_nbytes += one.wire_nbytes
