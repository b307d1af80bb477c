"""Bad input over a group: named errors before anything is sent, and a group that stays usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import compcoll.torch
from compcoll.errors import (
    CollectiveMismatch,
    InvalidArgument,
    InvalidBuffer,
    UnknownAlgorithm,
    UnknownCodec,
    UnsupportedDevice,
    UnsupportedDType,
)


def check_what_cannot_be_compressed_is_named() -> None:
    x: Any = torch.ones(100)
    all_reduce = compcoll.torch.all_reduce
    meta = torch.ones(100, device="meta")
    for error, text, call in (
        (UnsupportedDType, "int64", lambda: all_reduce(torch.ones(3, dtype=torch.int64), codec="zfp")),
        (InvalidArgument, "sum and avg", lambda: all_reduce(x, "max", codec="zfp")),
        (InvalidArgument, "sum and avg", lambda: all_reduce(x, dist.ReduceOp.MAX, codec="zfp")),
        (InvalidArgument, "codec=None", lambda: all_reduce(x, codec=None)),
        (UnknownCodec, "zap", lambda: all_reduce(x, codec="zap")),
        (InvalidArgument, "rate", lambda: all_reduce(x, codec="zfp", rate=99)),
        (UnknownAlgorithm, "rung", lambda: all_reduce(x, codec="zfp", algorithm="rung")),
        (InvalidBuffer, "sparse", lambda: all_reduce(x.to_sparse(), codec="zfp")),
        (InvalidBuffer, "list", lambda: all_reduce([x], codec="zfp")),
        (UnsupportedDevice, "one device", lambda: compcoll.torch.all_reduce_coalesced([x, meta], codec="zfp")),
        (UnsupportedDevice, "meta", lambda: all_reduce(meta, codec="zfp")),
        (InvalidBuffer, "one element type", lambda: compcoll.torch.all_reduce_coalesced([x, x.double()], codec="zfp")),
        (InvalidBuffer, "no tensor", lambda: compcoll.torch.all_reduce_coalesced([], codec="zfp")),
        (InvalidArgument, "group=", lambda: all_reduce(x, group=object(), codec="zfp")),
        (InvalidBuffer, "elements", lambda: compcoll.torch.reduce_scatter_tensor(x, x, codec="zfp")),
        (InvalidBuffer, "elements", lambda: compcoll.torch.all_gather_into_tensor(x, x, codec="zfp")),
        (InvalidArgument, "give one of them", lambda: compcoll.torch.broadcast(x)),
        (InvalidArgument, "give one of them", lambda: compcoll.torch.broadcast(x, 0, group_src=0)),
        (InvalidArgument, "src=99", lambda: compcoll.torch.broadcast(x, 99)),
        (InvalidArgument, "allreduce cannot use Delta", lambda: all_reduce(x, codec="delta")),
        (InvalidArgument, "sizes that receivers", lambda: compcoll.torch.all_to_all_single(x, x, codec="delta")),
        (InvalidArgument, "whose sum", lambda: compcoll.torch.all_to_all_single(x.clone(), x, [1], [1], codec="zfp")),
        (InvalidArgument, "sizes", lambda: compcoll.torch.all_to_all_single(x.clone(), x, codec="zfp", tolerance=1e-3)),
    ):
        with pytest.raises(error, match=text):
            call()
    assert torch.equal(x, torch.ones(100))
    all_reduce(x, codec="zfp", rate=16)
    assert x[0] == dist.get_world_size()


def check_a_group_of_nccl_takes_no_tensors_on_the_cpu(monkeypatch: Any = None) -> None:
    known = dist.get_backend_config
    try:
        dist.get_backend_config = lambda group=None: "cuda:nccl"
        with pytest.raises(UnsupportedDevice, match="cuda:nccl"):
            compcoll.torch.all_reduce(torch.ones(10), codec="zfp")
    finally:
        dist.get_backend_config = known


def check_different_calls_are_named_on_every_rank() -> None:
    rank = dist.get_rank()
    x = torch.ones(64 + (rank == 1))
    with pytest.raises(CollectiveMismatch, match="65 float32"):
        compcoll.torch.all_reduce(x, codec="zfp", rate=8, algorithm="direct")
    work = compcoll.torch.all_reduce(x, codec="zfp", rate=8, algorithm="direct", async_op=True)
    assert work is not None
    with pytest.raises(CollectiveMismatch, match="65 float32"):
        work.wait()
    assert bool((x == 1).all())
    size = dist.get_world_size()
    output = torch.empty(size + (rank == 2))
    expected = [1] * (size - 1) + [1 + (rank == 2)]
    with pytest.raises(CollectiveMismatch, match="rank 2 sends 1 elements to rank 2, which expects 2"):
        compcoll.torch.all_to_all_single(output, torch.ones(size), expected, [1] * size, codec="zfp")
    y = torch.ones(64)
    with pytest.raises(InvalidBuffer if rank == 0 else CollectiveMismatch, match="as reference="):
        compcoll.torch.broadcast(y, 0, codec="delta")
    for refused, kept in ((InvalidArgument, y), (InvalidBuffer, y.double()), (InvalidBuffer, y[:1])):
        codec = "int8" if refused is InvalidArgument else "delta"
        with pytest.raises(refused if rank == 0 else CollectiveMismatch):
            compcoll.torch.broadcast(y, 0, codec=codec, reference=kept if rank == 0 else None)
    parts = torch.ones(size, 64)
    with pytest.raises(InvalidBuffer, match="memory of its own"):
        compcoll.torch.all_gather_into_tensor(parts, parts[rank], codec="delta")
    compcoll.torch.all_reduce(y, codec="zfp", rate=8, algorithm="direct")
    assert y[0] == size
