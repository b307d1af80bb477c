"""Tensors of a GPU in calls of MPI: a GPU-aware MPI takes their memory, others take copies in pinned host memory.

MPI knows no streams. So the thread that runs a call, not its caller, waits for what the caller had launched, and
`operations.memory_of` and `GPUPacked` wait for what the call itself has launched, before MPI is given memory. When MPI
is through, so is what it wrote. Copies that follow have an event, and the current stream of whoever waits for the call
comes after that event: the host does not wait.

MPI makes the same calls with copies as without them. So each rank decides for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from ...transports.library import gpu_awareness
from ..buffers import Packed, check
from ..streams import StreamOrder


def streams() -> Callable[[torch.device], torch.cuda.Stream]:
    """Make streams for one group, whose work never waits for another's: one for each GPU, when it is needed."""
    return lru_cache(maxsize=None)(lambda gpu: torch.cuda.Stream(gpu))


def gpu_of(tensors: Sequence[Tensor]) -> torch.device:
    """Find the GPU on which all tensors of a call are.

    Raises
    ------
    InvalidBuffer
        If one is no dense tensor.
    UnsupportedDevice
        If they are not all on one GPU.
    """
    devices = {t.device if isinstance(t, Tensor) and t.is_cuda and t.layout is torch.strided else None for t in tensors}
    gpu = devices.pop()
    if devices or gpu is None:
        for tensor in tensors:
            check(tensor)
    assert gpu is not None
    return gpu


class CallOrder(StreamOrder):
    """A call of MPI's on tensors of a GPU: the host waits for what its caller had launched, and then begins.

    Parameters
    ----------
    stream : callable
        The group's stream on a GPU, as `streams` gives it.
    tensors : sequence of torch.Tensor
        All of the call's.
    direct : bool
        Whether the host reads and writes their memory by nothing but MPI.

    Attributes
    ----------
    staged : bool
        Whether MPI is given copies.
    """

    def __init__(
        self, stream: Callable[[torch.device], torch.cuda.Stream], tensors: Sequence[Tensor], *, direct: bool = True
    ) -> None:
        gpu = gpu_of(tensors)
        super().__init__(gpu, stream(gpu), tensors)
        self.staged = not (direct and gpu_awareness().aware)

    def _begin(self) -> None:
        self._before.synchronize()  # before the ranks agree: this one may be late, or its GPU may have failed

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Make the context of calls of MPI in any thread."""
        with torch.cuda.stream(self._stream):
            self._stream.query()  # a thread has a GPU's context once it has asked it something
            yield

    def finish(self) -> None:
        """Have the host wait for what was launched."""
        self._stream.synchronize()


def pinned(tensor: Tensor) -> Tensor:
    """Allocate pinned host memory for what is in a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


class GPUPacked(Packed):
    """Tensors of a GPU as one contiguous piece of pinned host memory: what it is filled with has come."""

    def __init__(self, tensors: Sequence[Tensor], *, filled: bool) -> None:
        super().__init__(tensors, filled=filled)
        self._there, self.memory = self.memory, pinned(self.memory)
        if filled:
            self.memory.copy_(self._there, non_blocking=True)
            torch.cuda.current_stream(self._there.device).synchronize()

    def unpack(self) -> None:
        """Have the current stream copy what has come to the tensors."""
        self._there.copy_(self.memory, non_blocking=True)
        self.memory = self._there
        super().unpack()


def packed(order: StreamOrder | None, tensors: Sequence[Tensor], *, filled: bool) -> Packed:
    """Pack tensors of a call: where they are, or where its order has copies."""
    staged = isinstance(order, CallOrder) and order.staged
    return (GPUPacked if staged else Packed)(tensors, filled=filled)
