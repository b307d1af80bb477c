"""What the checks of low-rank gradients share: models whose gradients are given, and the methods in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compcoll.torch.low_rank.methods import LowRank
from osu_like_bench.training.processes import start

METHODS = tuple(LowRank.__subclasses__())
SHAPES = {
    "first": (40, 60),
    "bias": (60,),
    "kernels": (48, 6, 3, 3),
    "square": (50, 50),
    "norm": (7,),
    "last": (90, 30),
}


class Given(nn.Module):
    """Its parameters' gradients are what is given. In memory their first dimension comes last, if they are reversed."""

    def __init__(self, dtype: torch.dtype = torch.float64, reverse: bool = False) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            values = torch.zeros(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
            self.register_parameter(name, nn.Parameter(values if reverse else values.contiguous()))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters() if name in gradients)


def group() -> None:
    if not dist.is_initialized():
        start("gloo")
    torch.set_num_threads(1)


def model(wrap: bool, dtype: torch.dtype = torch.float64, reverse: bool = False, **options: Any) -> nn.Module:
    group()
    net = Given(dtype, reverse)
    return DistributedDataParallel(net, bucket_cap_mb=0.02, **options) if wrap else net


def draw(comm: MPI.Intracomm, step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A rank's gradients in a step: a few strong directions that change slowly, and noise."""
    common = np.random.default_rng(7)
    own = np.random.default_rng(1000 * step + comm.rank)
    gradients = {}
    for name, shape in SHAPES.items():
        rows, columns = shape[0], int(np.prod(shape[1:]))
        strong = common.normal(size=(rows, 3)) @ common.normal(size=(3, columns))
        values = strong * (1 + 0.1 * step) + 0.3 * own.normal(size=(rows, columns))
        gradients[name] = torch.from_numpy(values.reshape(shape)).to(dtype)
    return gradients


def backward(net: nn.Module, gradients: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    net.zero_grad()
    net(gradients).backward()
    return gradients_of(net)


def gradients_of(net: nn.Module) -> dict[str, np.ndarray]:
    inner = net.module if isinstance(net, DistributedDataParallel) else net
    return {name: p.grad.double().numpy().copy() for name, p in inner.named_parameters() if p.grad is not None}


def mean(comm: MPI.Intracomm, values: np.ndarray) -> np.ndarray:
    out = np.empty(values.shape)
    comm.Allreduce(np.ascontiguousarray(values, np.float64), out)
    return out / comm.size


def orth(matrix: np.ndarray) -> np.ndarray:
    return np.linalg.qr(matrix)[0]


class Reference:
    """One gradient by METHODS' formulas, in float64, on all ranks' matrices at once."""

    def __init__(self, ranks: int, left: np.ndarray, right: np.ndarray, feedback: bool = True) -> None:
        self.p, self.q = left.astype(np.float64), right.astype(np.float64).T
        self.errors = [np.zeros((len(self.p), len(self.q))) for _ in range(ranks)]
        self.feedback = feedback
        self.steps = 0

    def acp(self, gradients: list[np.ndarray]) -> np.ndarray:
        self.steps += 1
        totals = [g + e for g, e in zip(gradients, self.errors)]
        if self.steps % 2:
            self.q = orth(self.q)
            own = [m @ self.q for m in totals]
            lost = [m - p @ self.q.T for m, p in zip(totals, own)]
            self.p = np.mean(own, axis=0)
        else:
            self.p = orth(self.p)
            own = [m.T @ self.p for m in totals]
            lost = [m - self.p @ q.T for m, q in zip(totals, own)]
            self.q = np.mean(own, axis=0)
        if self.feedback:
            self.errors = lost
        return self.p @ self.q.T

    def power(self, gradients: list[np.ndarray]) -> np.ndarray:
        totals = [g + e for g, e in zip(gradients, self.errors)]
        self.p = orth(np.mean([m @ self.q for m in totals], axis=0))
        self.q = np.mean([m.T @ self.p for m in totals], axis=0)
        if self.feedback:
            self.errors = [m - self.p @ self.q.T for m in totals]
        return self.p @ self.q.T


def raised(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None
