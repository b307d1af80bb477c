"""Peers: contenders from entry points of the group `GROUP`. Those for gloo and nonblocking allreduces are defined here.

An entry point names a function of (comm, x, out). It returns the call to time, which adds the flat NumPy arrays x of
all ranks and stores the sum in out. If the call compresses, the function has an attribute ``codec``: the compcoll codec
whose error bound holds for each step of the call. Otherwise results must be exact up to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import numpy as np
from mpi4py import MPI

import compcoll
from compcoll.codecs import Cast, Codec
from compcoll.execute.slots import AT_ONCE

from . import UsageError
from .data import Array

GROUP = "osu_like_bench.contenders"


Peer = Callable[[MPI.Intracomm, Array, Array], Callable[[], Any]]
"""The function that an entry point names. It prepares buffers and returns the call."""


@lru_cache
def names() -> tuple[str, ...]:
    """Return the names of the installed peers."""
    return tuple(sorted(point.name for point in entry_points(group=GROUP)))


@lru_cache
def load(name: str) -> Peer:
    """Load an installed peer by its name; raise `UsageError` if it cannot be imported."""
    (found,) = entry_points(group=GROUP, name=name)
    try:
        peer: Peer = found.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"contender {name}: {found.value} cannot be loaded: {error}") from error
    return peer


def codec_of(peer: Peer) -> Codec | None:
    """Return the codec whose error bound holds for each step of a peer; None if the peer is exact."""
    codec = getattr(peer, "codec", None)
    if codec is not None and not isinstance(codec, Codec):
        raise UsageError(f"a contender's attribute codec must be one of compcoll's, not {codec!r}")
    return codec


def native_nonblocking(comm: MPI.Intracomm, x: Array, out: Array) -> Callable[[], Any]:
    """Prepare MPI's own nonblocking allreduce."""
    _check_dtype("native_nonblocking", x, ("float32", "float64"))
    return lambda: comm.Iallreduce(x, out).Wait()


def auto_nonblocking(comm: MPI.Intracomm, x: Array, out: Array) -> Callable[[], Any]:
    """Prepare an uncompressed `compcoll.iallreduce`. Its choice of algorithm excludes those that block in MPI."""

    def call() -> None:
        compcoll.iallreduce(x, out=out, comm=comm).wait()

    for _ in range(1 + AT_ONCE):  # allocate the memory of all calls that can be in flight
        call()
    return call


def gloo(comm: MPI.Intracomm, x: Array, out: Array) -> Callable[[], Any]:
    """Prepare an allreduce by PyTorch's gloo. It works in place, so the copy of the input is timed, too."""
    _check_dtype("gloo", x, ("float16", "float32", "float64"))
    _start_gloo()
    import torch

    sums = torch.from_numpy(out)

    def call() -> None:
        np.copyto(out, x)
        torch.distributed.all_reduce(sums)

    return call


def gloo_fp16(comm: MPI.Intracomm, x: Array, out: Array) -> Callable[[], Any]:
    """Prepare an allreduce in float16 over gloo, as PyTorch's `fp16_compress_hook` does for gradients."""
    _check_dtype("gloo_fp16", x, ("float32", "float64"))
    _start_gloo()
    import torch

    values, sums = torch.from_numpy(x), torch.from_numpy(out)

    def call() -> None:
        halves = values.half()
        torch.distributed.all_reduce(halves)
        sums.copy_(halves)

    return call


gloo_fp16.codec = Cast("float16")  # type: ignore[attr-defined]


def _check_dtype(name: str, x: Array, dtypes: Sequence[str]) -> None:
    if x.dtype.name not in dtypes:
        raise UsageError(f"{name} can only add {', '.join(dtypes)}, not {x.dtype.name}: choose another --dtype")


def _start_gloo() -> None:
    """Initialize PyTorch's default process group with gloo, unless it is initialized."""
    if find_spec("torch") is None:
        raise UsageError("contenders gloo and gloo_fp16 need PyTorch: pip install torch")
    import torch.distributed as dist

    from .training.processes import start

    if not dist.is_initialized():
        start("gloo")


def leave_groups() -> None:
    """End the process group of the gloo contenders, if there is one. Collective."""
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        from .training.processes import leave

        leave()
