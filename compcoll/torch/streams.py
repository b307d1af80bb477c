"""The order of jobs on a GPU's tensors: behind what their caller has launched, in front of what comes after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class StreamOrder:
    """A job on tensors of a GPU: after what its caller had launched, and before what whoever waits will launch.

    Parameters
    ----------
    device : torch.device
        The GPU.
    stream : torch.cuda.Stream
        Where the job launches.
    tensors : sequence of torch.Tensor
        What it works on.

    Attributes
    ----------
    devices : list of torch.device
        Of futures whose values are there.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, tensors: Sequence[Tensor]) -> None:
        self.devices = [device]
        self._stream = stream
        self._before = torch.cuda.current_stream(device).record_event()
        self._behind: torch.cuda.Event | None = None
        for tensor in tensors:
            tensor.record_stream(stream)  # for who does not wait, and frees it

    def around(self, job: Callable[[], Value]) -> Value:
        """Do the job, in the thread that comes to it."""
        with torch.cuda.stream(self._stream):
            self._begin()
            value = job()
        self._behind = self._stream.record_event()
        return value

    def order(self) -> None:
        """Let what the caller launches next come after the job, which has been done."""
        assert self._behind is not None
        torch.cuda.current_stream(self.devices[0]).wait_event(self._behind)

    def _begin(self) -> None:
        self._stream.wait_event(self._before)
