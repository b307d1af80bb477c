"""Compressed Adams and local steps over MPI: by the group's ranks in MPI, and by a communicator."""

from __future__ import annotations

from typing import Any

import torch
from check_compress import wrapped
from mpi.world import raised
from mpi4py import MPI
from torch import nn

import compcoll
from compcoll.errors import InvalidArgument
from compcoll.torch import DiLoCo, OneBitAdam, ZeroOneAdam


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32))


def values_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(comm: MPI.Intracomm, step_by: Any, model: nn.Module) -> torch.Tensor:
    for step in range(9):
        random = torch.Generator().manual_seed(100 * step + comm.rank)
        model.zero_grad()
        model(torch.randn(8, 64, generator=random)).square().mean().backward()
        step_by.step()
    return values_of(model)


def check_the_ways_have_the_same_bits(comm: MPI.Intracomm) -> None:
    wrapped(model_of())  # starts the process group
    for make in (
        lambda model, **way: OneBitAdam(model, 1e-2, warmup=3, **way),
        lambda model, **way: ZeroOneAdam(model, 1e-2, variance_updates=2, freeze=4, local_limit=2, **way),
    ):
        found = []
        for way in ({"over": "mpi"}, {"over": "group"}, {"group": compcoll.Communicator(comm)}):
            model = model_of()
            optimizer = make(model, **way)
            found.append(trained(comm, optimizer, model))
            optimizer.free()
        assert all(torch.equal(values, found[0]) for values in found)
    found = []
    for way in ({"over": "mpi"}, {"over": "group"}, {"group": compcoll.Communicator(comm)}):
        model = model_of()
        inner = torch.optim.AdamW(model.parameters(), 1e-2)
        with DiLoCo(model, inner, every=3, delay=1, codec="minmax", bits=4, **way):
            found.append(trained(comm, inner, model))
    assert all(torch.equal(values, found[0]) for values in found)
    model = model_of()
    given = {"group": compcoll.Communicator(comm), "timeout": 3.0}
    error = raised(lambda: OneBitAdam(model, warmup=1, **given))
    assert isinstance(error, InvalidArgument) and "has its own" in str(error)
