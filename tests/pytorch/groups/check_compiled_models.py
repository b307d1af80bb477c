"""Compression of models that torch.compile compiled, and what it refuses of them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._composable.replicate import replicate as replicate_with_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll.errors import InvalidArgument


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))


def sharded() -> torch.nn.Module:
    fully_shard(model := layers())
    return model


def in_place(model: torch.nn.Module) -> torch.nn.Module:
    model.compile(backend="aot_eager")
    return model


def check_compiled_models_are_compressed() -> None:
    wrap = {"codec": "int8", "algorithm": "direct"}
    for make in (
        lambda: DistributedDataParallel(torch.compile(layers(), backend="aot_eager")),
        lambda: torch.compile(DistributedDataParallel(layers()), backend="aot_eager"),
        lambda: in_place(DistributedDataParallel(layers())),
        lambda: torch.compile(sharded(), backend="aot_eager"),
        lambda: in_place(sharded()),
    ):
        torch._dynamo.reset()
        model = make()
        compression = compcoll.torch.compress(model, **wrap)
        for _ in range(2):
            model(torch.ones(8, 64)).square().mean().backward()
        assert compression.stats.calls["direct, Int8(block=256)"] == 2, compression.stats


def check_models_whose_gradients_cannot_be_compressed_are_refused() -> None:
    for method in (compcoll.torch.compress, compcoll.torch.ACPSGD):
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"), pytest.raises(InvalidArgument, match="buckets"):
            method(DistributedDataParallel(layers()))
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(InvalidArgument, match="compiled_autograd"):
        compcoll.torch.compress(sharded())
    for replicate in (replicate_with_ddp, replicate_with_fsdp):
        replicate(model := layers())
        with pytest.raises(InvalidArgument, match="DistributedDataParallel"):
            compcoll.torch.compress(model)
