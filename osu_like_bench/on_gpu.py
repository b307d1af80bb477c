"""Buffers in GPU memory, and timing of calls and kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compcoll.gpu.discovery import gpus

from . import UsageError
from .data import Array

_IN_A_ROW = 10


def check(command: str, contenders: str = "") -> str:
    """Return the name of the GPU.

    Raises
    ------
    UsageError
        If there is no GPU, or if the command or a contender does not support GPUs.
    """
    if command.endswith("v") or "p2p" in contenders:
        raise UsageError("--device cuda: allgatherv, alltoallv and the p2p contenders are for host memory")
    names, why = gpus()
    if not names:
        raise UsageError(f"--device cuda: {why}")
    return names[0]


class Buffers:
    """A collective's input and output in GPU memory, which are copies of arrays on the host.

    Parameters
    ----------
    x, out : numpy.ndarray
        Input and output on the host, of shape (parts, m).
    """

    def __init__(self, x: Array, out: Array) -> None:
        import cupy

        self._cupy = cupy
        self._host_out = out
        self.x, self.out = (cupy.asarray(array) for array in (x, out))
        self.seconds = 0.0

    def upload(self) -> None:
        """Copy the output from the host to the GPU."""
        self.out.set(self._host_out)

    def download(self) -> None:
        """Copy the output to the host."""
        self._host_out[...] = self.out.get()

    def fetch(self, x: Array) -> None:
        """Copy the input to ``x`` on the host."""
        self.x.get(out=x)

    def timed(self, run: Callable[[], Any]) -> Callable[[], None]:
        """Wrap a call so that it waits for the GPU, and stores its time by the GPU's events in ``seconds``."""
        cuda = self._cupy.cuda
        begin, end = cuda.Event(), cuda.Event()

        def whole() -> None:
            begin.record()
            run()
            end.record()
            end.synchronize()
            self.seconds = cuda.get_elapsed_time(begin, end) / 1e3

        return whole


def seconds_of_kernels(work: Callable[[], Any]) -> float:
    """Time kernels by the GPU's events, in seconds. Several run in a row, to hide the time of launching them."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(_IN_A_ROW):
        work()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / _IN_A_ROW
