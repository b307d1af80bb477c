"""Sparse methods select from each parameter's gradient, or from DDP's buckets: against NumPy."""

from __future__ import annotations

import math

import numpy as np
import torch
from check_compress import total, wrapped
from mpi.world import raised
from mpi4py import MPI
from torch import nn

import compcoll.torch
from compcoll.errors import CollectiveMismatch, InvalidArgument

SCALES = {"strong": 1.0, "weak": 1e-3}


class Layers(nn.Module):
    """Two layers' weights and biases, whose gradients are what is given: the weak one's are a thousandth as large."""

    def __init__(self) -> None:
        super().__init__()
        for name in SCALES:
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.zeros(64, 64))
            layer.bias = nn.Parameter(torch.zeros(64))
            self.add_module(name, layer)

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def draw(comm: MPI.Intracomm, step: int) -> dict[str, torch.Tensor]:
    random = np.random.default_rng((step, comm.rank))
    gradients = {}
    for name, scale in SCALES.items():
        for kind, shape in (("weight", (64, 64)), ("bias", (64,))):
            values = scale * random.choice([-1.0, 1.0], shape) * random.uniform(0.5, 1.5, shape)
            gradients[f"{name}.{kind}"] = torch.from_numpy(values).float()
    return gradients


def largest(values: np.ndarray, k: int) -> np.ndarray:
    kept = np.zeros_like(values)
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    kept[order] = values[order]
    return kept


def check_largest_elements(comm: MPI.Intracomm) -> None:
    """1 % of each layer in every step, 41 elements; or 1 % of both, of which the weak one has none."""
    for selection in ("parameter", "bucket"):
        model = wrapped(Layers(), bucket_cap_mb=25)
        compression = compcoll.torch.compress(
            model, "topk", density=0.01, select="exact", algorithm="sparse_ring", selection=selection
        )
        residual = {name: np.zeros(4096) for name in SCALES}
        for step in range(8):
            own = draw(comm, step)
            model.zero_grad()
            model(own).backward()
            for name in SCALES:
                residual[name] += own[f"{name}.weight"].double().numpy().reshape(-1) / comm.size
            if selection == "parameter":
                sent = {name: largest(values, 41) for name, values in residual.items()}
            else:
                # The exact bias between the weights leaves zeros, which count.
                both = largest(np.concatenate(list(residual.values())), math.ceil(0.01 * (2 * 4096 + 64)))
                sent = dict(zip(SCALES, np.split(both, 2), strict=True))
            assert (np.count_nonzero(sent["weak"]) == 41) == (selection == "parameter")
            for name, values in sent.items():
                residual[name] -= values
                layer = getattr(model.module, name)
                got = layer.weight.grad.double().numpy().reshape(-1)
                np.testing.assert_allclose(got, total(comm, values), atol=1e-6 * SCALES[name])
                exact = total(comm, own[f"{name}.bias"].double().numpy()) / comm.size
                np.testing.assert_allclose(layer.bias.grad, exact, rtol=1e-5)
        compression.free()


def check_powers_of_two_below_the_largest(comm: MPI.Intracomm) -> None:
    """The largest magnitude that codes refer to is the layer's, or the bucket's: a thousandth of that has no code."""
    for selection in ("parameter", "bucket"):
        model = wrapped(Layers(), bucket_cap_mb=25)
        compression = compcoll.torch.compress(model, "variance", algorithm="sparse_ring", selection=selection)
        compression.observe({f"{name}.weight": torch.zeros(64, 64) for name in SCALES})
        model(draw(comm, 0)).backward()
        strong, weak = (float((layer.weight.grad != 0).float().mean()) for layer in model.module.children())
        assert strong > 0.5  # where the ranks' powers do not cancel
        assert weak > 0.5 if selection == "parameter" else weak == 0, (selection, weak)
        compression.free()


def check_small_parameters_go_with_the_next(comm: MPI.Intracomm) -> None:
    model = wrapped(Layers(), bucket_cap_mb=25)
    compression = compcoll.torch.compress(
        model, "topk", density=0.01, exclude=[], min_numel=1, algorithm="sparse_ring", feedback=False
    )
    for step in range(2):
        model(draw(comm, step)).backward()
        (bucket,) = compression._buckets.values()
        assert (
            sorted(sorted(part.name for part in span.parts) for span in bucket.spans)
            == [
                ["strong.bias", "strong.weight"],
                ["weak.bias", "weak.weight"],
            ]
            or step == 0
        )
    compression.free()


def check_refusals(comm: MPI.Intracomm) -> None:
    model = wrapped(Layers())
    error = raised(lambda: compcoll.torch.compress(model, "topk", selection="layer"))
    assert isinstance(error, InvalidArgument) and "parameter, bucket" in str(error), error
    if comm.size > 1:
        odd = comm.rank == comm.size - 1
        error = raised(lambda: compcoll.torch.compress(model, "topk", selection="bucket" if odd else "parameter"))
        assert isinstance(error, CollectiveMismatch) and "selection" in str(error), error
