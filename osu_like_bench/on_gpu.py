"""Buffers in GPU memory, and how calls and kernels are timed there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compcoll.gpu.discovery import gpus

from . import UsageError
from .data import Array

_IN_A_ROW = 10


def check(command: str, contenders: str = "") -> str:
    """The name of the GPU.

    Raises
    ------
    UsageError
        If there is none, or if that cannot be measured there.
    """
    if command == "allgatherv" or "p2p" in contenders:
        raise UsageError("--device cuda: allgatherv and the p2p contenders are for host memory")
    names, why = gpus()
    if not names:
        raise UsageError(f"--device cuda: {why}")
    return names[0]


class Buffers:
    """A collective's input and output in GPU memory, beside those on the host where values come from and go to.

    Parameters
    ----------
    x, out : numpy.ndarray
        On the host, of shape (parts, m).
    """

    def __init__(self, x: Array, out: Array) -> None:
        import cupy

        self._cupy = cupy
        self._host_out = out
        self.x, self.out = (cupy.asarray(array) for array in (x, out))
        self.seconds = 0.0

    def upload(self) -> None:
        """Let the output be what it is on the host."""
        self.out.set(self._host_out)

    def download(self) -> None:
        """Take the output to the host."""
        self._host_out[...] = self.out.get()

    def fetch(self, x: Array) -> None:
        """Take the input to the host."""
        self.x.get(out=x)

    def timed(self, run: Callable[[], Any]) -> Callable[[], None]:
        """A call that ends when the GPU is done; ``seconds`` is what its events say that the last one took."""
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
    """Time kernels by the GPU's events: several in a row, so that launching one is hidden behind another."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(_IN_A_ROW):
        work()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / _IN_A_ROW
