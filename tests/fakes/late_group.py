"""PyTorch's NCCL as `late_cuda` has it: work goes to a stream of the group's own, and is done as late as that may be.

Bytes go by gloo when the stream comes to them. What compcoll.torch calls has PyTorch's names and arguments.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from fakes.deferred import BLOCKED, Event
from fakes.late_cuda import LateCUDA, OnGPU, Stream, plain
from torch import Tensor


class LateWork:
    """PyTorch's handle: who synchronizes has the current stream wait."""

    def __init__(self, group: LateNCCLGroup, event: Event) -> None:
        self._group, self._event = group, event

    def synchronize(self) -> None:
        if not self._group.cuda.leaves_out(sys._getframe(1)):
            self._group.cuda.current_stream().add(self._event)

    def is_completed(self) -> bool:
        return bool(self._group.error) or self._event.stream.done >= self._event.place

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def exception(self) -> Any:
        if self._group.error == "unspeakable":
            raise TypeError("Unable to convert a std::exception_ptr to Python")
        return RuntimeError(self._group.error) if self._group.error else None


class LateNCCLGroup:
    """`torch.distributed.ProcessGroupNCCL`.

    Attributes
    ----------
    calls : list of tuple
        What was asked for.
    done : int
        How much of the work that was given to it is done.
    stuck : bool
        Whether nothing more is done, as without the other ranks.
    error : str
        What NCCL has reported.
    """

    Options = SimpleNamespace
    cuda: ClassVar[LateCUDA]
    made: ClassVar[list[LateNCCLGroup]]

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
        assert options.is_high_priority_stream and options._timeout > timedelta(days=365)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("bytes", store), rank, size, timedelta(seconds=60))
        self._stream = Stream(self.cuda)
        self._rank, self._size = rank, size
        self.calls: list[tuple[Any, ...]] = []
        self.done = 0
        self.stuck = False
        self.error = ""
        self.made.append(self)

    def size(self) -> int:
        return self._size

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(("connect", device))
        self._gloo.barrier().wait()

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor]) -> LateWork:
        for tensors in (outputs, inputs):
            assert len(tensors) == self._size and not tensors[self._rank].numel()
            assert all(isinstance(one, OnGPU) and one.dtype == torch.uint8 for one in tensors)
        number = len(self.calls)
        sent = {rank: plain(one) for rank, one in enumerate(inputs) if one.numel()}
        expected = {rank: plain(one) for rank, one in enumerate(outputs) if one.numel()}
        self.calls.append(("alltoall", len(sent), len(expected)))

        def exchange() -> None:
            under_way = [self._gloo.send([one.clone()], rank, number) for rank, one in sent.items()]
            came = {rank: torch.empty_like(one) for rank, one in expected.items()}
            under_way += [self._gloo.recv([one], rank, number) for rank, one in came.items()]
            for each in under_way:
                each.wait()
            for rank, one in came.items():
                expected[rank].copy_(one)

        return self._launched(exchange)

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> LateWork:
        (tensor,) = tensors
        assert isinstance(tensor, OnGPU)
        mean = options.reduceOp == dist.ReduceOp.AVG
        assert mean or options.reduceOp == dist.ReduceOp.SUM
        self.calls.append(("allreduce", tensor.dtype, mean))
        memory = plain(tensor)

        def add() -> None:
            total = memory.clone()
            self._gloo.allreduce([total]).wait()
            memory.copy_(total / self._size if mean else total)

        return self._launched(add)

    def _launched(self, work: Callable[[], None]) -> LateWork:
        """Put work on NCCL's stream, behind the current one's."""
        self._stream.add(self.cuda.current_stream().record_event())

        def run() -> Any:
            if self.stuck:
                return BLOCKED
            work()
            self.done += 1
            return None

        self._stream.add(run)
        return LateWork(self, self._stream.record_event())

    def abort(self) -> None:
        self.calls.append(("abort",))

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


@contextlib.contextmanager
def installed(cuda: LateCUDA) -> Iterator[list[LateNCCLGroup]]:
    """In PyTorch's place, on a GPU of each rank's own; gives the groups that are made."""
    made: list[LateNCCLGroup] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda.installed())
        for owner, name, stand_in in (
            (dist, "is_nccl_available", lambda: True),
            (dist, "ProcessGroupNCCL", LateNCCLGroup),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda.nccl, "version", lambda: (2, 28, 9)),
            (LateNCCLGroup, "cuda", cuda),
            (LateNCCLGroup, "made", made),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        yield made
