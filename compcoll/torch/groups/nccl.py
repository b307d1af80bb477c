"""A transport from GPU to GPU in stream order, over a NCCL process group that only compcoll uses.

That group has the ranks of the caller's group, which itself is not used: NCCL requires the same order of operations on
all ranks. compcoll launches nonblocking operations in its own thread, so their order among the caller's operations
could differ between ranks.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...gpu.watchdog import Message, NCCLBase
from .. import private

_NEVER = timedelta(days=3650)
"""A time-out that is never reached. PyTorch's watchdog would end the process; compcoll's ends only the collective."""

_LEFT_TO_US = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""Settings that PyTorch reads when a group is made. With others, an error of NCCL could end the process."""


class TorchNCCLTransport(NCCLBase):
    """One rank's part of a NCCL process group.

    Parameters
    ----------
    runtime : CudaRuntime
        Runtime of this rank's GPU.
    group : torch.distributed.ProcessGroupNCCL
        Group of all ranks.
    device : torch.device
        The GPU.
    """

    def __init__(self, runtime: Any, group: Any, device: torch.device) -> None:
        super().__init__(runtime)
        self._group = group
        self._device = device
        self._works: deque[dist.Work] = deque()

    def exchange(self, leaving: Sequence[Message], arriving: Sequence[Message], stream: Any) -> None:
        sent, came = _rounds(leaving), _rounds(arriving)
        with self._launching(stream):
            empty = _tensor((*leaving, *arriving)[0][0])[:0]  # for ranks without a message: nothing is sent
            for number in range(max(len(sent), len(came))):
                outputs, inputs = self._by_rank(came, number, empty), self._by_rank(sent, number, empty)
                self._put(self._group.alltoall(outputs, inputs))

    def allreduce(self, x: Any, out: Any, dtype: str, *, mean: bool, stream: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        kind = getattr(torch, dtype)
        with self._launching(stream):
            result = _tensor(out).view(kind)
            if x is not out:
                result.copy_(_tensor(x).view(kind))
            self._put(self._group.allreduce([result], options))

    def _by_rank(self, rounds: list[dict[int, Any]], number: int, otherwise: Tensor) -> list[Tensor]:
        contents = rounds[number] if number < len(rounds) else {}
        return [_tensor(contents[rank]) if rank in contents else otherwise for rank in range(self._group.size())]

    @contextmanager
    def _launching(self, stream: Any) -> Iterator[None]:
        """Make a stream PyTorch's current stream."""
        with self._runtime.current, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, device=self._device)):
            yield

    def _put(self, work: dist.Work) -> None:
        """Make the current stream wait for NCCL work. ``work.wait()`` would do this, too, but raise its errors here."""
        work.synchronize()
        self._works.append(work)

    def _look(self) -> None:
        while self._works and self._works[0].is_completed():  # true also if it has failed
            if error := _error_of(self._works.popleft()):
                raise RuntimeError(str(error))

    def _abort(self) -> None:
        self._group.abort()

    def _leave(self) -> None:
        self._group.shutdown()


class TorchNCCL:
    """Makes the transport of a GPU over PyTorch's NCCL. Implements `compcoll.gpu.stream_transport.Bootstrap`.

    Parameters
    ----------
    runtime : CudaRuntime
        Runtime of this rank's GPU.
    index : int
        CUDA's index of the GPU.
    store : torch.distributed.Store
        Store through which the ranks find each other.
    """

    name = "PyTorch's NCCL"

    def __init__(self, runtime: Any, index: int, store: dist.Store) -> None:
        self._runtime = runtime
        self._device = torch.device("cuda", index)
        self._store = store

    def identity(self) -> tuple[int, bytes]:
        major, minor, patch = torch.cuda.nccl.version()[:3]
        return 10_000 * major + 100 * minor + patch, self._runtime.place()

    def unique_id(self) -> bytes:
        return secrets.token_hex(64).encode()

    def join(self, ranks: int, unique_id: bytes, rank: int) -> TorchNCCLTransport:
        options = private.nccl_options(_NEVER)
        options.is_high_priority_stream = True
        store = dist.PrefixStore(f"nccl/{unique_id.decode()}", self._store)
        with self._runtime.current:
            group = _with(_LEFT_TO_US, lambda: dist.ProcessGroupNCCL(store, rank, ranks, options))
            group.eager_connect_single_device(self._device)
        return TorchNCCLTransport(self._runtime, group, self._device)


def _rounds(messages: Sequence[Message]) -> list[dict[int, Any]]:
    """Split messages into rounds of at most one message for each other rank, since an all_to_all has no more."""
    rounds: list[dict[int, Any]] = []
    for content, rank in messages:
        free = next((each for each in rounds if rank not in each), None)
        if free is None:
            rounds.append(free := {})
        free[rank] = content
    return rounds


def _tensor(array: Any) -> Tensor:
    """View GPU memory as a tensor without synchronization: the caller has put the launch into stream order."""
    return torch.from_dlpack(array.__dlpack__(stream=-1))


def _error_of(work: dist.Work) -> object:
    """Return the error of completed work, or None.

    It is also None if this PyTorch cannot return the error to Python; then the time-out reports the failure.
    """
    try:
        return work.exception()
    except TypeError:
        return None


def _with(settings: dict[str, str], work: Callable[[], Any]) -> Any:
    """Run some work while environment variables are set."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        return work()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
