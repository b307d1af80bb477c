"""What low-rank averaging gives and what it keeps add up to the gradients, also where ranks have none."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from given import METHODS, SHAPES, backward, draw, group, mean, model
from mpi.tensors import assert_same_bits, digest
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MODES: list[tuple[bool, dict[str, Any]]] = [
    (True, {}),
    (False, {}),
    (False, {"buffer_mb": 0}),
    (False, {"overlap": False}),
]
CODECS: list[dict[str, Any]] = [{}, {"codec": "minmax", "bits": 3, "block": 64, "algorithm": "ring"}]


def missing(step: int, size: int) -> dict[str, set[int]]:
    """The ranks that have no gradient of a parameter."""
    every = set(range(size))
    return [
        {},
        {"square": {size - 1}},
        {"first": {0}, "bias": {0}, "last": every - {0}},
        {"kernels": every},
        {},
        {"square": {size - 1}, "kernels": {0, size - 1}, "norm": every},
        {"square": {size - 1}},
    ][step]


def held(comm: MPI.Intracomm, compression: Any) -> dict[str, np.ndarray]:
    """The mean over the ranks of what they keep."""
    kept = compression.state_dict()["residuals"]
    return {name: mean(comm, values.double().numpy()).reshape(SHAPES[name]) for name, values in kept.items()}


def check_missing_gradients_lose_nothing(comm: MPI.Intracomm) -> None:
    for (at, method), (number, (wrap, options)) in itertools.product(enumerate(METHODS), enumerate(MODES)):
        codec = CODECS[(at + number) % 2]  # with each mode by one of the two methods
        net = model(wrap, **({"find_unused_parameters": True} if wrap else {}))
        compression = method(net, rank=3, min_compression_rate=1, **options, **codec)
        due = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(7):
            told = (method.__name__, wrap, options, codec, step)
            without = missing(step, comm.size)
            own = draw(comm, step)
            before = compression.state_dict()["residuals"]
            got = backward(
                net, {name: values for name, values in own.items() if comm.rank not in without.get(name, ())}
            )
            for name in SHAPES:
                lacking = without.get(name, set())
                if len(lacking) == comm.size:
                    assert name not in got, told
                    if name in before:
                        after = compression.state_dict()["residuals"]
                        assert digest([before[name]]) == digest([after[name]]), told
                    continue
                given = own[name].numpy() * (comm.rank not in lacking)
                due[name] += given - got[name]
            kept = held(comm, compression)
            for name, short in due.items():
                room = 1e-9 if name not in kept or not codec else 2e-5
                assert np.abs(kept.get(name, 0) - mean(comm, short)).max() < room, (*told, name)
        assert all(np.abs(values).max() > 0.1 for values in kept.values()), "nothing was lost: proves nothing"
        compression.free()


EVENTS: list[tuple[bool, dict[str, set[int]] | None, dict[str, set[int]]]] = [
    (True, None, {}),
    (False, None, {"square": {0, 1}, "first": {0}}),
    (True, {"square": {1}, "kernels": {0, 1}}, {"square": {0, 1}, "kernels": {0}, "bias": {0, 1}}),
    (True, None, {"square": {0, 1}, "last": {0, 1}}),
    (False, {"square": {0, 1}}, {"square": {0, 1}, "norm": {0, 1}}),
    (True, None, {}),
]
"""Steps: whether gradients are zeroed first; ranks that lack one in a pass under no_sync, if there is any; and in the
pass after it."""


def check_use_is_counted_from_one_average_to_the_next(comm: MPI.Intracomm) -> None:
    """As DDP does: what no rank used since the last average is left alone, though it has a gradient. All else is
    averaged, as it was accumulated: with a gradient of zeros, too, which a rank without others of its own has.
    """
    for method, wrap, reverse in itertools.product(METHODS, (True, False), (True, False)):
        net = model(wrap, reverse=reverse, **({"find_unused_parameters": True} if wrap else {}))
        compression = method(net, rank=3, min_compression_rate=1)
        module = net.module if wrap else net
        due = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for step, (zeroed, before, without) in enumerate(EVENTS):
            told = (method.__name__, wrap, reverse, step)
            if zeroed:
                net.zero_grad()
            if before is not None:
                with (net if wrap else compression).no_sync():
                    net(lacking(draw(comm, 20 + step), before, comm.rank)).backward()
            own = {name: values * (step < 5) for name, values in draw(comm, step).items()}
            own = lacking(own, without, comm.rank)
            held_then = {
                name: np.zeros(shape) if (now := module.get_parameter(name).grad) is None else now.numpy().copy()
                for name, shape in SHAPES.items()
            }
            net(own).backward()
            for name, values in held_then.items():
                lacked = without.get(name, set()) & (before or without).get(name, set())
                after = module.get_parameter(name).grad
                if lacked.issuperset(range(comm.size)):
                    now = np.zeros(values.shape) if after is None else after.numpy()
                    assert np.array_equal(now, values), (*told, name)
                    continue
                assert_same_bits(comm, [after])
                due[name] += values + (own[name].numpy() if name in own else 0) - after.numpy()
            kept = held(comm, compression)
            for name, short in due.items():
                assert np.abs(kept.get(name, 0) - mean(comm, short)).max() < 1e-9, (*told, name)
        compression.free()


def lacking(gradients: dict[str, torch.Tensor], without: dict[str, set[int]], rank: int) -> dict[str, torch.Tensor]:
    return {name: values for name, values in gradients.items() if rank not in without.get(name, ())}


class Waves(nn.Module):
    """With complex weights: a step's gradient of them is lazily conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.zeros(20, 30))
        self.first = nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.zeros(4, 3, dtype=torch.complex64).t())

    def forward(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        products = ((p.conj() * weights[name]).imag for name, p in self.named_parameters() if name in weights)
        return sum((product.sum() for product in products), self.real.sum())


def check_complex_gradients(comm: MPI.Intracomm) -> None:
    group()
    for wrap in (True, False):
        net = Waves()
        outer = DistributedDataParallel(net) if wrap else net
        compression = METHODS[0](outer, rank=2)
        random = np.random.default_rng(comm.rank)
        weights = {
            name: torch.from_numpy(random.normal(size=(*p.shape, 2)).astype(np.float32)).view(torch.complex64)[..., 0]
            for name, p in net.named_parameters()
            if p.is_complex()
        }
        for _ in range(2):  # DDP makes its buckets anew after the first pass
            net.zero_grad()
            outer(weights).backward()
            for name, values in weights.items():
                # Im(z* w) = re z im w - im z re w; a complex gradient holds the derivatives by both parts of z.
                pairs = torch.view_as_real(values).double().numpy()
                wanted = mean(comm, np.stack([pairs[..., 1], -pairs[..., 0]], axis=-1))
                got = torch.view_as_real(net.get_parameter(name).grad.resolve_conj()).numpy()
                assert np.allclose(got, wanted, atol=1e-6), (wrap, name, got, wanted)
        compression.free()
