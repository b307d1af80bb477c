"""Allreduces that entry points of the group `GROUP` name, as contenders; gloo's and nonblocking ones are defined here.

An entry point names a function of (comm, x, out) that returns the call to time, which adds all ranks' x, a flat NumPy
array, into out. If the call compresses, the function has an attribute ``codec``: the compcoll codec whose error bound
holds for each of its steps. Otherwise results must be exact but for rounding.
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
"""The function that an entry point names: prepares buffers and returns the call."""


@lru_cache
def names() -> tuple[str, ...]:
    """The installed peers' names."""
    return tuple(sorted(point.name for point in entry_points(group=GROUP)))


@lru_cache
def load(name: str) -> Peer:
    """Load the installed peer of one of `names`; raise `UsageError` if it cannot be imported."""
    (found,) = entry_points(group=GROUP, name=name)
    try:
        peer: Peer = found.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"contender {name}: {found.value} cannot be loaded: {error}") from error
    return peer


def codec_of(peer: Peer) -> Codec | None:
    """The codec whose error bound a peer keeps at each step; None if it is exact."""
    codec = getattr(peer, "codec", None)
    if codec is not None and not isinstance(codec, Codec):
        raise UsageError(f"a contender's codec is one of compcoll's, not {codec!r}")
    return codec


def native_nonblocking(comm: MPI.Intracomm, x: Array, out: Array) -> Callable[[], Any]:
    """Add up by MPI's own nonblocking allreduce."""
    _check_dtype("native_nonblocking", x, ("float32", "float64"))
    return lambda: comm.Iallreduce(x, out).Wait()


def auto_nonblocking(comm: MPI.Intracomm, x: Array, out: Array) -> Callable[[], Any]:
    """Add up, uncompressed, by what `compcoll.iallreduce` chooses: a rank must not block in MPI then."""

    def call() -> None:
        compcoll.iallreduce(x, out=out, comm=comm).wait()

    for _ in range(1 + AT_ONCE):  # each call under way has memory of its own, which is allocated at first use
        call()
    return call


def gloo(comm: MPI.Intracomm, x: Array, out: Array) -> Callable[[], Any]:
    """Add up by PyTorch's gloo, which does it in place, so that copying the input counts."""
    _check_dtype("gloo", x, ("float16", "float32", "float64"))
    _start_gloo()
    import torch

    sums = torch.from_numpy(out)

    def call() -> None:
        np.copyto(out, x)
        torch.distributed.all_reduce(sums)

    return call


def gloo_fp16(comm: MPI.Intracomm, x: Array, out: Array) -> Callable[[], Any]:
    """Add up in halves over gloo, as PyTorch's `fp16_compress_hook` does with gradients."""
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
        raise UsageError(f"{name} adds {', '.join(dtypes)} only, not {x.dtype.name}: choose another --dtype")


def _start_gloo() -> None:
    """Make gloo PyTorch's default process group, of MPI's ranks, unless there is one."""
    if find_spec("torch") is None:
        raise UsageError("gloo's contenders need PyTorch: pip install 'compcoll[torch]'")
    import torch.distributed as dist

    from .training.processes import start

    if not dist.is_initialized():
        start("gloo")


def leave_groups() -> None:
    """End the process group of gloo's contenders, if there is one; all ranks together."""
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        from .training.processes import leave

        leave()
