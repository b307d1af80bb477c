"""Compressed collectives of FSDP2's modules on a GPU, on a stand-in whose work is done late: the host's bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from check_compress import make_net
from check_compress_gpu import LateCUDA, OnGPU, waits
from check_shards import sharded
from mpi4py import MPI
from torch import Tensor

import compcoll.torch
from compcoll import Cast
from compcoll.torch import streams

Collective = Callable[..., Any]


def collectives(compression: Any, model: Any) -> list[tuple[Collective, Collective, list[bool]]]:
    """Of each module: its reduce-scatter, its all-gather, and whether a column of its rows is compressed."""
    states = [model._get_fsdp_state(), *(part._get_fsdp_state() for part in (model.late, model.middle))]
    found = []
    for group in (group for state in states for group in state._fsdp_param_groups):
        scatter = group._reduce_scatter_comm
        columns = group._all_gather_comm.columns
        coded = {c.name for c in columns.compressed}
        lossy = [c.name in coded for c in columns.all for _ in range(c.begin, c.end)]
        found.append((scatter, group._all_gather_comm, lossy))
    return found


def results(comm: MPI.Intracomm, cuda: LateCUDA | None, dtype: torch.dtype) -> list[tuple[Tensor, list[bool] | None]]:
    """What each collective gives, which columns of that are compressed, and what is kept at the end."""
    upload, download = (torch.clone, torch.clone) if cuda is None else (cuda.upload, cuda.download)
    with contextlib.ExitStack() as stack:
        model = sharded(make_net())
        if cuda is not None:
            stack.enter_context(cuda.installed())
        compression = compcoll.torch.compress(
            model,
            {"head.*": "onebit", "*": "minmax:bits=4"},
            param_codec=Cast("bfloat16"),
            algorithm="ring",
            exclude=["norms", "biases"],
        )
        given: list[tuple[Tensor, list[bool] | None]] = []
        for step in range(4):
            for number, (scatter, gather, lossy) in enumerate(collectives(compression, model)):
                width, asynchronous = len(lossy), step % 2 == 1
                generator = torch.Generator().manual_seed(100 * step + 10 * number + comm.rank)
                rows = upload(torch.randn(comm.size * width, generator=generator).to(dtype))
                own, every = upload(torch.zeros(width, dtype=dtype)), upload(torch.zeros_like(rows))
                op = dist.ReduceOp.AVG if step % 3 else dist.ReduceOp.SUM
                work = scatter(own, rows, dist.group.WORLD, op, asynchronous)
                if asynchronous:
                    work.wait()
                work = gather(every, own, dist.group.WORLD, asynchronous)
                if asynchronous:
                    work.wait()
                assert isinstance(own, OnGPU) == (cuda is not None)
                given += [(download(own), lossy), (download(every), lossy * comm.size)]
            if step == 1:
                compression.load_state_dict(compression.state_dict())
        given += [(losses, None) for losses in compression.state_dict()["residuals"].values()]
        compression.free()
    return given


def same(one: list[tuple[Tensor, list[bool] | None]], other: list[tuple[Tensor, list[bool] | None]]) -> bool:
    for (expected, lossy), (got, _) in zip(one, other, strict=True):
        if not torch.allclose(got, expected, rtol=1e-2 if expected.dtype.itemsize == 2 else 1e-5, atol=1e-6):
            return False
        chosen = slice(None) if lossy is None else torch.tensor(lossy)
        if not torch.equal(got[chosen], expected[chosen]):
            return False
    return len(one) > 8


def check_the_hosts_shards(comm: MPI.Intracomm) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        expected = results(comm, None, dtype)
        assert same(expected, results(comm, LateCUDA(early=comm.rank == 1), dtype)), dtype
    for site in sorted(waits(streams, "wait_event")):
        got = results(comm, LateCUDA(without=site), dtype)
        assert not all(comm.allgather(same(expected, got))), f"nothing shows that the wait in {site} is needed"
