"""Compressed collectives of FSDP2's modules against the same training in one piece."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
import torch.distributed as dist
from check_compress import examples, make_net, relative, total
from mpi.world import raised
from mpi4py import MPI
from promises import DIFFERENCES
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import compcoll.torch
from compcoll import Cast
from compcoll.errors import HookTaken, InvalidArgument
from osu_like_bench.training.processes import start


def sharded(net: nn.Module, **options: Any) -> nn.Module:
    if not dist.is_initialized():
        start("gloo")
    torch.set_num_threads(1)
    net = copy.deepcopy(net)
    for part in (net.late, net.middle):
        fully_shard(part, **options)
    return fully_shard(net, **options)


def backward(model: nn.Module, x: torch.Tensor) -> dict[str, np.ndarray]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).double().numpy().copy()
        for name, p in model.named_parameters()
    }


def true_mean(comm: MPI.Intracomm, net: nn.Module, x: torch.Tensor) -> dict[str, np.ndarray]:
    return {name: total(comm, values) / comm.size for name, values in backward(copy.deepcopy(net), x).items()}


def check_gradients(comm: MPI.Intracomm) -> None:
    net, x = make_net(), examples(comm)
    wanted = true_mean(comm, net, x)
    for options, bound in (({"codec": "zfp", "rate": 16}, 1e-3), ({"codec": "minmax"}, 0.03), ({"codec": None}, 1e-5)):
        model = sharded(net)
        compression = compcoll.torch.compress(model, **options, algorithm="ring" if options["codec"] else "auto")
        got = backward(model, x)
        for name, excluded in compression.exact.items():
            exact = excluded or options["codec"] is None
            error = relative(got[name], wanted[name])
            assert error <= (1e-5 if exact else bound), (options, name, error)
            assert exact or comm.size == 1 or error > 1e-9, (options, name)
        assert comm.size == 1 or not options["codec"] or compression.stats.ratio > 1.1, compression.stats
        error = raised(lambda model=model: compcoll.torch.compress(model))
        assert isinstance(error, HookTaken) and "keep the object that compress() returned" in str(error), error
        compression.free()


def check_parameters_on_the_way(comm: MPI.Intracomm) -> None:
    net, x = make_net(), examples(comm)
    model = sharded(net)
    compression = compcoll.torch.compress(model, None, param_codec="cast:dtype=bfloat16", algorithm="ring")
    rounded = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if name in ("late.weight", "middle.weight", "head.weight") and comm.size > 1:
                parameter.copy_(parameter.bfloat16().float())
    wanted = true_mean(comm, rounded, x)
    assert torch.equal(model(x), rounded(x))
    for name, values in backward(model, x).items():
        assert relative(values, wanted[name]) < 1e-5, name
    compression.free()

    model = sharded(net)
    compression = compcoll.torch.compress(model, "zfp", rate=32, param_codec=Cast("bfloat16"), algorithm="ring")
    assert torch.equal(model(x), rounded(x))
    for name, values in backward(model, x).items():
        assert relative(values, wanted[name]) < 1e-5, name
    for (name, own), whole in zip(model.named_parameters(), net.parameters()):
        assert torch.equal(own.full_tensor(), whole), name
    compression.free()


def check_no_loss_is_lost(comm: MPI.Intracomm) -> None:
    net, x = make_net(), examples(comm)
    wanted = true_mean(comm, net, x)
    model = sharded(net)
    compression = compcoll.torch.compress(model, "minmax", bits=3, algorithm="ring")
    sums = {name: np.zeros_like(values) for name, values in wanted.items()}
    for step in range(1, 5):
        for name, values in backward(model, x).items():
            sums[name] += values
        held = compression.state_dict()["residuals"]
        assert set(held) == {name for name, exact in compression.exact.items() if not exact}
        for name, kept in held.items():
            due = step * wanted[name] - sums[name]
            all_kept = total(comm, kept.double().numpy())
            assert np.abs(all_kept - due).max() <= 2e-5 * np.abs(step * wanted[name]).max(), (step, name)
    state = compression.state_dict()
    again = compcoll.torch.compress(sharded(net), "minmax", bits=3, algorithm="ring")
    again.load_state_dict(comm.allgather(state))
    for name, kept in again.state_dict()["residuals"].items():
        assert torch.equal(kept, state["residuals"][name]), name
    before = {name: total(comm, kept.double().numpy()) for name, kept in state["residuals"].items()}
    other = sharded(net)
    third = compcoll.torch.compress(other, "minmax", bits=3, algorithm="ring")
    third.load_state_dict(state)
    for name, values in backward(other, x).items():
        if name in before:
            kept = total(comm, third.state_dict()["residuals"][name].double().numpy())
            due = before[name] + wanted[name] - values
            assert np.abs(kept - due).max() <= 2e-5 * np.abs(wanted[name]).max() + 1e-9, name
    for one in (compression, again, third):
        one.free()


def check_a_new_divide_factor_loses_nothing(comm: MPI.Intracomm) -> None:
    """PyTorch divides gradients of float64 after the sums by another part of it then."""
    if comm.size == 1:
        raise SkipTest("on one rank PyTorch divides twice")
    net, x = make_net().double(), examples(comm).double()
    wanted = true_mean(comm, net, x)
    model = sharded(net)
    compression = compcoll.torch.compress(model, "minmax", bits=3, algorithm="ring")
    backward(model, x)
    before = compression.state_dict()["residuals"]
    for module in (model.late, model.middle, model):
        module.set_gradient_divide_factor(16.0)
    got, after = backward(model, x), compression.state_dict()["residuals"]
    for name, kept in after.items():
        mean = wanted[name] * comm.size / 16
        due = total(comm, before[name].numpy()) + mean - got[name]
        assert np.abs(total(comm, kept.numpy()) - due).max() <= 1e-12 * np.abs(wanted[name]).max(), name
    compression.free()


def check_mixed_precision_and_training(comm: MPI.Intracomm) -> None:
    net = make_net()
    for dtype in (torch.float16, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        model = sharded(net, mp_policy=policy)
        compression = compcoll.torch.compress(model, "zfp", rate=12, algorithm="ring")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for step in range(8):
            optimizer.zero_grad()
            loss = model(examples(comm, step)).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0], losses
        compression.free()
    for codec in DIFFERENCES:
        refused = raised(lambda codec=codec: compcoll.torch.compress(sharded(net), param_codec=codec))
        assert isinstance(refused, InvalidArgument) and f"param_codec= cannot use {codec!r}" in str(refused)
    unwrapped = raised(lambda: compcoll.torch.compress(net, param_codec="cast"))
    assert isinstance(unwrapped, InvalidArgument)


class Rows(nn.Module):
    """A weight between parameters that stay exact; gradients are what is given."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("first", (64,)), ("weight", (60, 50)), ("last", (64,))):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def check_exact_gradients_do_not_go_through_the_codec(comm: MPI.Intracomm) -> None:
    """However large they are, compressed ones keep their bits, and so do losses; and NaN stays where it is."""
    if not dist.is_initialized():
        start("gloo")
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(comm.rank)
    weights = [torch.randn(60, 50, generator=random) for _ in range(3)]
    found = []
    for size in (0.0, 1e20, math.nan):
        model = fully_shard(Rows())
        compression = compcoll.torch.compress(model, "minmax", bits=4, algorithm="ring")
        found.append([])
        for weight in weights:
            model.zero_grad()
            model({"first": torch.full((64,), size), "weight": weight, "last": torch.full((64,), -size)}).backward()
            found[-1].append(model.weight.grad.full_tensor())
            exact = model.last.grad.full_tensor()
            assert torch.allclose(exact, torch.full((64,), -size), equal_nan=True), (size, exact)
        found[-1].append(compression.state_dict()["residuals"]["weight"])
        compression.free()
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other)), "exact gradients went through the codec"
