"""Stream order of jobs on GPU tensors: after their caller's earlier launches, before launches that need the result.

Another thread than the caller's may launch a job while the caller launches more work. So jobs launch on a separate
stream, which first waits for the work that the caller had launched when it submitted the job. A thread that waits for
the job makes its current stream wait for the job's stream; the host does not block.
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
        The GPU, as the argument of futures whose values are on it.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, tensors: Sequence[Tensor]) -> None:
        self.devices = [device]
        self._stream = stream
        self._before = torch.cuda.current_stream(device).record_event()
        self._behind: torch.cuda.Event | None = None
        for tensor in tensors:
            tensor.record_stream(stream)  # a caller that does not wait may free the tensor early

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
        """Return the stream order of a job that is submitted now; None for tensors in host memory, or no tensors."""
        if not tensors or not tensors[0].is_cuda:
            return None
        return StreamOrder(tensors[0].device, self.on(tensors[0].device), tensors)

    def fetch(self, array: Array) -> HostArray:
        """Return a NumPy array as it is; copy a GPU tensor to host memory after all jobs submitted so far."""
        if not isinstance(array, Tensor):
            return array
        with torch.cuda.stream(self.on(array.device)):
            return array.cpu().numpy()
