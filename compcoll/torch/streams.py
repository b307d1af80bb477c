"""Stream order of jobs on GPU tensors: after what their caller has launched, before what is launched later.

A thread other than the caller's may launch work on GPU tensors while the caller launches more. So this work goes to a
separate stream, which waits for what the caller had launched before. A thread that waits for the result makes its
current stream wait for it; the host does not block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from .buffers import Array, HostArray

Value = TypeVar("Value")


class StreamOrder:
    """The place of a job in stream order: after its caller's launches, before those of a thread that waits for it.

    Parameters
    ----------
    device : torch.device
        The GPU.
    stream : torch.cuda.Stream
        Stream on which the job launches.
    tensors : sequence of torch.Tensor
        Tensors that it works on.

    Attributes
    ----------
    devices : list of torch.device
        The GPU, for futures whose values are there.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, tensors: Sequence[Tensor]) -> None:
        self.devices = [device]
        self._stream = stream
        self._before = torch.cuda.current_stream(device).record_event()
        self._behind: torch.cuda.Event | None = None
        for tensor in tensors:
            tensor.record_stream(stream)  # a caller that does not wait may free it

    def around(self, job: Callable[[], Value]) -> Value:
        """Run the job on the stream, in the calling thread."""
        with torch.cuda.stream(self._stream):
            self._begin()
            value = job()
        self._behind = self._stream.record_event()
        return value

    def order(self) -> None:
        """Make the current stream wait for the job, which has been launched."""
        assert self._behind is not None
        torch.cuda.current_stream(self.devices[0]).wait_event(self._behind)

    def _begin(self) -> None:
        self._stream.wait_event(self._before)


class JobStreams:
    """The streams of jobs: one for each GPU, made when it is first needed."""

    def __init__(self) -> None:
        self.on = lru_cache(maxsize=None)(lambda gpu: torch.cuda.Stream(gpu))

    def order(self, *tensors: Tensor) -> StreamOrder | None:
        """Record the place of a job that is submitted now; None for tensors in host memory, and for no tensors."""
        if not tensors or not tensors[0].is_cuda:
            return None
        return StreamOrder(tensors[0].device, self.on(tensors[0].device), tensors)

    def fetch(self, array: Array) -> HostArray:
        """Return an array in host memory; a tensor as all jobs leave it."""
        if not isinstance(array, Tensor):
            return array
        with torch.cuda.stream(self.on(array.device)):
            return array.cpu().numpy()
