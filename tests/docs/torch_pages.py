"""Runs the examples of pages about PyTorch on each rank of torchrun: ``torch_pages.py docs/torch/ddp.md …``.

An example gets what the page leaves to the reader: a model, an optimizer, data, and states of a training so far.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compcoll
import compcoll.torch
from osu_like_bench.training.processes import leave

WIDTH = 64
IMPORTED = {
    "torch": torch,
    "nn": nn,
    "dist": dist,
    "dcp": dcp,
    "dcp_to_torch_save": dcp_to_torch_save,
    "init_device_mesh": init_device_mesh,
    "fully_shard": fully_shard,
    "DistributedDataParallel": DistributedDataParallel,
    "compcoll": compcoll,
}
WRAPS = ("DistributedDataParallel(", "fully_shard(", "ACPSGD(", "OneBitAdam(", "ZeroOneAdam(", "DiLoCo(")
"""An example with one of these makes of a bare model what it needs."""
ELSEWHERE = ("torch.optim.Muon(", "diloco.group", 'init_process_group("compcoll"')
"""Examples with other tests: check_optimizers.py, check_silence.py, and those of the backend."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(torch.relu(self.mlp(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(page: str) -> tuple[nn.Module, Any]:
    """A model after two steps, and what averages its gradients or steps on this page."""
    model: nn.Module = Model()
    subject: Any
    inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if page == "adam":
        inner = subject = compcoll.torch.OneBitAdam(model, 1e-3, warmup=1)
    elif page == "local-steps":
        subject = compcoll.torch.DiLoCo(model, inner, every=2, codec="int8")
    elif page == "low-rank":
        subject = compcoll.torch.ACPSGD(model)
    else:
        model = DistributedDataParallel(model)
        subject = compcoll.torch.compress(model, algorithm="ring")
    for _ in range(2):
        inner.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        inner.step()
    return model, subject


def given(page: str, text: str) -> dict[str, Any]:
    """What an example reads and does not make."""
    ranks = dist.get_world_size()
    loads = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {**IMPORTED, "group": None, "epochs": 2, "folder": Path("checkpoint")}
    names |= {"rank": dist.get_rank(), "former_ranks": ranks}
    names |= {"rows_in": [4] * ranks, "rows_out": [4] * ranks, "expert": nn.Linear(WIDTH, WIDTH)}
    names |= {"tokens": torch.randn(4 * ranks, WIDTH, requires_grad=True), "tensor": torch.randn(100_000)}
    names |= {"loss": torch.ones((), requires_grad=True).square(), "loss_of": nn.functional.mse_loss}
    names |= {"inputs": torch.randn(8, WIDTH), "targets": torch.randn(8, WIDTH)}
    names |= {"batches": [(names["inputs"], names["targets"])] * 2}
    if "state_dict" in text or "stats" in text or "compression.error" in text:
        names["model"], subject = trained(page)
        states = [None] * ranks
        dist.all_gather_object(states, subject.state_dict())
        names |= {
            "compression": subject,
            "diloco": subject,
            "optimizer": subject,
            "states": states,
            "state": states[dist.get_rank()],
        }
    elif "model" in loads:
        bare = any(wrap in text for wrap in WRAPS)
        names["model"] = Model() if bare else DistributedDataParallel(Model())
    if "optimizer" in loads and "optimizer" not in names:
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1, momentum=0.9)
    return names


def examples(page: Path) -> Iterator[str]:
    """The page's blocks, without the group that the ranks have already."""
    for text in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if not any(other in text for other in ELSEWHERE):
            yield re.sub(r"^dist\.init_process_group.*\n", "", text, flags=re.MULTILINE)


def alternatives(text: str) -> Iterator[str]:
    """Lines that all make the same object of the same model are examples of their own."""
    lines = text.splitlines(keepends=True)
    made = [line for line in lines if re.match(r"(compression|optimizer) = compcoll\.torch\.\w+\(", line)]
    yield from ("".join(line for line in lines if line not in made or line == each) for each in made or [""])


def run(page: Path) -> int:
    """Run the examples of a page, and return how many there are."""
    count = 0
    for text in (each for example in examples(page) for each in alternatives(example)):
        names = given(page.stem, text)
        exec(compile(text, f"{page.name}: {text}", "exec"), names)
        if "step" in names and callable(names["step"]):
            names["step"](torch.randn(WIDTH))
        dist.barrier()
        count += 1
    return count


def main(pages: list[Path]) -> None:
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.chdir(folder[0])
    for page in pages:
        count = run(page)
        if dist.get_rank() == 0:
            print(f"{page.name}: {count} examples", file=sys.stderr)
    leave()


if __name__ == "__main__":
    main([Path(word).absolute() for word in sys.argv[1:]])
