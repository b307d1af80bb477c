"""A rank of tests/launch/test_torchrun.py: trains a model with plain and with compressed DistributedDataParallel.

torchrun … nodes.py FOLDER    writes FOLDER/RANK.json
"""

from __future__ import annotations

import json
import os
import sys
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll.torch.gradients.ddp import GradientCompression

STEPS, FEATURES, BATCH = 40, 256, 8


def trained(*, compressed: bool) -> tuple[nn.Module, tuple[float, float], GradientCompression | None]:
    """Fit a fixed random network; return the model, its losses on new data before and after, and the compression."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, FEATURES)).requires_grad_(False)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.Tanh(), nn.Linear(512, FEATURES))
    wrapped = DistributedDataParallel(model)
    compression = compcoll.torch.compress(wrapped) if compressed else None
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=2.0, momentum=0.9)
    new = torch.randn(1024, FEATURES)
    before = nn.functional.mse_loss(model(new), teacher(new)).item()
    examples = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, FEATURES, generator=examples)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), teacher(inputs)).backward()
        optimizer.step()
    return model, (before, nn.functional.mse_loss(model(new), teacher(new)).item()), compression


def main() -> None:
    """Train both ways and write what was seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _, exact, _ = trained(compressed=False)
    model, losses, compression = trained(compressed=True)
    assert compression is not None
    parameters = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    seen = {
        "losses": losses,
        "exact_losses": exact,
        "nodes": compression._communicator.nodes,
        "calls": compression.stats.calls,
        "ratio": compression.stats.ratio,
        "parameters": sha256(parameters.numpy().tobytes()).hexdigest(),
    }
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
    compression.free()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
