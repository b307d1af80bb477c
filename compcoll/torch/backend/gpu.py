"""GPU tensors in MPI calls: a GPU-aware MPI gets their memory, other MPIs get copies in pinned host memory.

MPI does not know streams. So the thread that runs a call, not its caller, waits until the GPU has done what the caller
launched before. `operations.memory_of` and `GPUPacked` wait for the call's own kernels and copies before MPI gets
memory. When MPI returns, its writes are complete. Copies from host memory to the tensors may follow; an event is
recorded after them. A thread that waits for the call makes its current stream wait for that event; the host does not
block.

Each rank decides for itself whether it copies: the MPI calls are the same either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...transports.library import gpu_awareness
from ..buffers import Packed, check
from ..streams import JobStreams, StreamOrder


def gpu_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the GPU on which all tensors of a call are.

    Raises
    ------
    InvalidBuffer
        If one of them is not a dense tensor.
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
    """The stream order of an MPI call on GPU tensors: the host waits for the caller's launches, then the call begins.

    Parameters
    ----------
    streams : JobStreams
        The group's own streams, so that groups never wait for each other's work.
    tensors : sequence of torch.Tensor
        All tensors of the call.
    direct : bool
        Whether only MPI and GPUs access their memory. A GPU-aware MPI then needs no copies in host memory.

    Attributes
    ----------
    staged : bool
        Whether MPI gets copies in host memory.
    """

    def __init__(self, streams: JobStreams, tensors: Sequence[Tensor], *, direct: bool = True) -> None:
        gpu = gpu_of(tensors)
        super().__init__(gpu, streams.on(gpu), tensors)
        self.staged = not (direct and gpu_awareness().aware)

    def _begin(self) -> None:
        # Wait before the handshake, which has a time-out: this rank may be late, or its GPU may have failed.
        self._before.synchronize()

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Enclose MPI calls of any thread in a `with` block, which selects the GPU and the call's stream."""
        with torch.cuda.stream(self._stream):
            self._stream.query()  # a thread has a GPU's context only after its first query
            yield

    def finish(self) -> None:
        """Make the host wait for all work on the call's stream."""
        self._stream.synchronize()


def pinned(tensor: Tensor) -> Tensor:
    """Allocate pinned host memory of a tensor's shape and element type."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


class GPUPacked(Packed):
    """GPU tensors in one contiguous block of pinned host memory. If `filled`, the constructor waits for the values."""

    def __init__(self, tensors: Sequence[Tensor], *, filled: bool) -> None:
        super().__init__(tensors, filled=filled)
        self._there, self.memory = self.memory, pinned(self.memory)
        if filled:
            self.memory.copy_(self._there, non_blocking=True)
            torch.cuda.current_stream(self._there.device).synchronize()

    def unpack(self) -> None:
        """Make the current stream copy the block to the tensors."""
        self._there.copy_(self.memory, non_blocking=True)
        self.memory = self._there
        super().unpack()


def packed(order: StreamOrder | None, tensors: Sequence[Tensor], *, filled: bool) -> Packed:
    """Pack the tensors of a call: in host memory if the order is staged, and otherwise on their own device."""
    staged = isinstance(order, CallOrder) and order.staged
    return (GPUPacked if staged else Packed)(tensors, filled=filled)
