"""The means of fusion buffers, by a process group of PyTorch's or by compcoll's collectives with a codec."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...codecs.base import Codec
from ...collectives import choose
from ...communicator import Communicator
from ...errors import InvalidArgument, UnsupportedDevice
from ...feedback import ErrorFeedback
from ..account import Account
from ..buffers import array_of
from ..groups.membership import communicator_of
from ..handles import Followed
from ..job_queue import JobQueue
from ..membership import gathered, timeout_of
from ..roll_call import board_of, store_of
from ..states import draw_as_begun
from .fusion import Buffer, Wait


class Sums(Protocol):
    """Adds up buffers' wires, asynchronously and in the order of the calls.

    Attributes
    ----------
    jobs : JobQueue
        Runs jobs of several sums, one job after another.
    """

    jobs: JobQueue

    def begin(self, step: int, buffers: int) -> None:
        """Begin a step, of so many buffers at most: by its number draw codecs that round at random."""

    def start(self, buffer: Buffer, account: Account) -> Wait:
        """Begin; the result waits for the end."""

    def free(self) -> None:
        """Give back what it has. Collective."""


def _line_beside(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Make a connection of a group's ranks that only jobs use. Collective.

    Under a key that rank 0 draws: names that PyTorch gives to groups which some ranks make on their own are others on
    ranks that have made more groups before, and such ranks would wait for each other for ever.
    """
    store = store_of(group)
    if store is None:
        raise InvalidArgument(f"group={group!r} is no group of init_process_group or new_group, and has no store")
    key = gathered(secrets.token_hex(8).encode(), group, device)[0].decode()
    own = dist.PrefixStore(f"compcoll/low-rank/{key}", store)
    limit = timedelta(seconds=timeout_of(group, device))
    if dict(each.split(":") for each in dist.get_backend_config(group).split(","))[device.type] != "nccl":
        return dist.ProcessGroupGloo(own, group.rank(), group.size(), limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(own, group.rank(), group.size(), options)


class GroupSums:
    """Sums by a process group's own all_reduce.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Any backend's.
    device : torch.device
        Where buffers are.
    jobs : bool
        Whether sums are started by jobs of the queue. They go over a connection of their own then: ranks match a
        group's collectives by their order, and the caller's thread starts more of them meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, jobs: bool) -> None:
        self.jobs, self._group = JobQueue("low-rank"), group
        self._line = _line_beside(group, device) if jobs else group

    def begin(self, step: int, buffers: int) -> None:
        """There is nothing to be drawn."""

    def start(self, buffer: Buffer, account: Account) -> Wait:
        work = Followed(
            self._line.allreduce([buffer.wire]),
            board_of(self._group).under_way("the group's all_reduce of factors"),
        )
        account.calls["all_reduce"] += 1
        nbytes = buffer.wire.numel() * buffer.wire.element_size()
        account.wire_nbytes += round(2 * (self._group.size() - 1) / self._group.size() * nbytes)

        def wait() -> None:
            work.wait()

        return wait

    def free(self) -> None:
        self.jobs.close()


class CodedSums:
    """Sums by compcoll's allreduce, in a thread of its own: factors with a codec, all else exactly.

    What the codec loses of a rank's factors is the buffer's `losses`: it is not fed back here, since it
    belongs to this step's other factors.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Whose ranks take part.
    device : torch.device
        Where buffers are.
    codec : Codec
        For factors.
    algorithm : str
        As for `compcoll.allreduce`.
    feedback : bool
        Whether to know what was lost.
    timeout, over
        As of `compcoll.torch.compress`.

    Raises
    ------
    UnsupportedDevice
        If they are not on the CPU.
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
        over: str = "auto",
    ) -> None:
        if device.type != "cpu":
            raise UnsupportedDevice(
                f"factors on {device} cannot be encoded: only those on the CPU; codec=None sums them on the GPU's "
                "process group as they are"
            )
        self._communicator: Communicator = communicator_of(
            *(group, device, timeout, over), measured=algorithm == choose.AUTO
        )
        self._codec, self._algorithm = codec, algorithm
        self.jobs = JobQueue("low-rank")
        self._feedback = feedback

    def begin(self, step: int, buffers: int) -> None:
        self._communicator.begun = 2 * buffers * step  # a buffer's factors, and the rest of it

    def start(self, buffer: Buffer, account: Account) -> Wait:
        values, factors = array_of(buffer.wire), buffer.factors
        if self._feedback and buffer.losses is None:
            buffer.losses = ErrorFeedback()
        losses = buffer.losses
        least = 2 * (self._communicator.size - 1) / self._communicator.size

        def job() -> None:
            if factors:
                part = values[:factors]
                draw_as_begun(losses, self._communicator)
                if losses is not None and losses.residual is not None:
                    losses.residual[...] = 0
                self._communicator.allreduce(
                    part, out=part, feedback=losses, codec=self._codec, algorithm=self._algorithm
                )
                self._count(account, least)
            if factors < values.size:
                part = values[factors:]
                self._communicator.allreduce(part, out=part, codec=None)
                self._count(account, least)

        work = self.jobs.submit(job)

        def wait() -> None:
            work.wait()

        return wait

    def free(self) -> None:
        self.jobs.close()
        self._communicator.free()

    def _count(self, account: Account, least: float) -> None:
        one = Account()
        one.add_last(self._communicator, least)
        account.calls += one.calls
        account.wire_nbytes += one.wire_nbytes
