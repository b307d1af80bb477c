"""Compressed gradients of DistributedDataParallel on CUDA, all ranks on one GPU: the bits of the same on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from osu_like_bench.training.processes import start

WAYS: list[dict[str, Any]] = [
    {"codec": None},
    {"codec": "zfp", "rate": 8, "algorithm": "ring"},
    {"codec": "minmax", "bits": 4, "algorithm": "direct"},
    {"codec": "onebit", "algorithm": "ring"},
    {"codec": "intsum", "algorithm": "ring"},
    {"codec": "minmax", "algorithm": "recursive_doubling"},
    {"codec": "topk", "density": 0.01, "algorithm": "sparse_ring"},
    {"codec": {"layers.1": "onebit", "*": "minmax:bits=4"}, "algorithm": "direct"},
]


class Given(nn.Module):
    """Its parameters' gradients are what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(size) for size in (3000, 500_000, 7, 70_000))

    def forward(self, values: Tensor) -> Tensor:
        parts = values.split([layer.numel() for layer in self.layers])
        return torch.stack([(layer * part).sum() for layer, part in zip(self.layers, parts, strict=True)]).sum()


def trained(device: str, way: dict[str, Any], steps: int = 3) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradients of each step, and what is kept at the end."""
    model = DistributedDataParallel(Given().to(device), bucket_cap_mb=1)
    compression = compcoll.torch.compress(model, **way)
    gradients = []
    heavy = torch.ones(2048, 2048, device=device) if device == "cuda" else None
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        values = torch.randn(573_007, generator=generator).to(device)
        if heavy is not None:  # the hooks come long before the gradients
            for _ in range(20):
                heavy = heavy @ heavy * 1e-4
            values = values + heavy[0, 0] * 0
        model.zero_grad()
        model(values).backward()
        gradients.append(torch.cat([parameter.grad for parameter in model.parameters()]).cpu())
    state = compression.state_dict()
    compression.free()
    return gradients, state["residuals"]


def main() -> None:
    start(sys.argv[1])
    for way in WAYS:
        (expected, losses), (got, kept) = trained("cpu", way), trained("cuda", way)
        for step, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(one, other), (way, step)
        assert losses.keys() == kept.keys() and all(torch.equal(losses[name], kept[name]) for name in losses), way
    dist.destroy_process_group()


main()
