"""Sparse methods as DDP's hook, against their papers' arithmetic in NumPy, on gloo's process group."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from check_compress import Given, backward, examples, make_net, relative, total, true_mean, wrapped
from mpi.world import raised
from mpi4py import MPI
from torch import nn

import compcoll.torch
from compcoll import ErrorFeedback
from compcoll.errors import CompcollError, InvalidArgument, UnknownAlgorithm
from compcoll.sparse import DGCFeedback, TopK, warmup_density


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """The k largest magnitudes, others 0."""
    kept = np.zeros_like(values)
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    kept[order] = values[order]
    return kept


def gradient_of(comm: MPI.Intracomm, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + comm.rank)
    return torch.randn(2000, generator=generator) * (3.0 if step % 2 else 0.5)


def check_dgc(comm: MPI.Intracomm) -> None:
    rate, decay, m, clip, steps = 0.1, 0.01, 0.9, 60.0, 6
    model = wrapped(Given(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=m, weight_decay=decay)
    compression = compcoll.torch.DGC(model, optimizer, 0.01, clip=clip, select="exact", algorithm="sparse_ring")
    weight, bias, buffer = np.zeros(2000), np.zeros(10), np.zeros(10)
    u, v = np.zeros(2000), np.zeros(2000)
    clipped = 0
    for step in range(steps):
        compression.density = density = warmup_density(step, 0.01, 4)
        gradient = gradient_of(comm, step)
        model.zero_grad()
        model(gradient).backward()
        optimizer.step()

        g, limit = gradient.double().numpy(), clip / math.sqrt(comm.size)
        factor = min(1.0, limit / np.linalg.norm(g))
        clipped += factor < 1
        u = m * u + g * factor / comm.size
        v = v + u
        sent = largest(v, math.ceil(density * 2000))
        u[sent != 0] = 0
        v[sent != 0] = 0
        weight -= rate * (total(comm, sent) + decay * weight)
        buffer = m * buffer + total(comm, g[:10]) / comm.size + decay * bias
        bias -= rate * buffer
        np.testing.assert_allclose(model.module.weight.detach(), weight, atol=1e-5)
        np.testing.assert_allclose(model.module.bias.detach(), bias, atol=1e-5)
    assert 0 < clipped < steps or comm.size == 1
    assert compression.stats.ratio > 1

    state = compression.state_dict()
    np.testing.assert_allclose(state["residuals"]["weight"], v, atol=1e-5)
    np.testing.assert_allclose(state["velocity"]["weight"], u, atol=1e-5)
    plain = wrapped(Given(torch.float32))
    again = compcoll.torch.DGC(plain, torch.optim.SGD(plain.parameters(), lr=rate, momentum=m), 0.01)
    again.load_state_dict(comm.allgather(state))
    for kind in ("residuals", "velocity"):
        summed = total(comm, again.state_dict()[kind]["weight"].double().numpy())
        np.testing.assert_allclose(summed, total(comm, state[kind]["weight"].double().numpy()), atol=1e-5)
    foreign = wrapped(Given(torch.float32))
    other = compcoll.torch.compress(foreign, "topk", algorithm="sparse_ring")
    assert isinstance(raised(lambda: other.load_state_dict(state)), InvalidArgument)
    for each in (compression, again, other):
        each.free()


class Small(nn.Module):
    """One compressed parameter and an exact one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def each_gradient(module: nn.Module, x: torch.Tensor, targets: torch.Tensor) -> list[np.ndarray]:
    """Of the weight, sample by sample."""
    gradients = []
    for row, target in zip(x, targets, strict=True):
        loss = loss_of(module(row[None]), target[None])
        gradients.append(torch.autograd.grad(loss, [module.layer.weight])[0].double().numpy().reshape(-1))
    return gradients


def check_variance_and_hybrid(comm: MPI.Intracomm) -> None:
    alpha, zeta, tau, rate = 1.5, 0.99, 2e-3, 0.5
    for name, micro_batches in (("variance", None), ("hybrid", None), ("variance", 16), ("hybrid", 16)):
        torch.manual_seed(0)
        model = wrapped(Small())
        options = {"threshold": tau} if name == "hybrid" else {}
        compression = compcoll.torch.compress(model, name, alpha=alpha, zeta=zeta, algorithm="sparse_ring", **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        r, v = np.zeros(2000), np.zeros(2000)
        counts = []
        for step in range(5):
            x = examples(comm, step)
            targets = torch.randint(50, (16,), generator=torch.Generator().manual_seed(step))
            each = np.array(each_gradient(model.module, x, targets))
            exact = total(comm, _bias_gradient(model.module, x, targets)) / comm.size
            model.zero_grad()
            loss = compression.backward(loss_of, x, targets, micro_batches)
            assert torch.allclose(loss, loss_of(model.module(x), targets), rtol=1e-5)

            r = r + each.mean(axis=0) / comm.size
            v = v + (each**2).sum(axis=0) / (16 * comm.size) ** 2
            chosen = r**2 > alpha * v
            if name == "hybrid":
                chosen &= np.abs(r) > tau
                sent = np.where(chosen, np.sign(r) * tau, 0)
                v = np.where(chosen, np.maximum(v - 2 * np.abs(r) * tau + tau**2, 0), zeta * v)
                r = r - sent
            else:
                top = np.floor(np.log2(np.abs(r[chosen]).max(initial=1e-30)))
                mantissa, exponent = np.frexp(np.abs(r))
                power = np.minimum(np.where(mantissa >= 0.75, exponent, exponent - 1), top)
                chosen &= top - power <= 7
                sent = np.where(chosen, np.sign(r) * 2.0**power, 0)
                r, v = np.where(chosen, 0, r), np.where(chosen, 0, zeta * v)
            counts.append(np.count_nonzero(sent))
            got = model.module.layer.weight.grad.double().numpy().reshape(-1)
            np.testing.assert_allclose(got, total(comm, sent), atol=1e-6, err_msg=f"{name}, step {step}")
            np.testing.assert_allclose(model.module.layer.bias.grad, exact, atol=1e-6)
            optimizer.step()
        assert 0 < sum(counts) < 5 * 2000, counts
        state = compression.state_dict()
        np.testing.assert_allclose(state["residuals"]["layer.weight"].view(-1), r, atol=1e-6)
        np.testing.assert_allclose(state["variance"]["layer.weight"].view(-1), v, atol=1e-9)
        compression.free()


def check_moments_that_are_not_finite_count_as_zero(comm: MPI.Intracomm) -> None:
    """So that their elements are sent; all others here are ambiguous."""
    model = wrapped(Given(torch.float32))
    compression = compcoll.torch.compress(model, "hybrid", threshold=0.1, algorithm="sparse_ring")
    for step, bad in enumerate((math.nan, math.inf)):
        moments = torch.full((2000,), 1e6)
        moments[7 + step] = bad
        compression.reset()
        compression.observe({"weight": moments})
        model.zero_grad()
        model(torch.ones(2000)).backward()
        assert model.module.weight.grad.nonzero().tolist() == [[7 + step]], (step, model.module.weight.grad)
    compression.free()


def _bias_gradient(module: nn.Module, x: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    gradient: np.ndarray = torch.autograd.grad(loss_of(module(x), targets), [module.layer.bias])[0].double().numpy()
    return gradient


def check_gradients_that_are_known_go_through_ddp(comm: MPI.Intracomm) -> None:
    """With nothing compressed `backward` leaves what back-propagation of the mean loss does, also accumulated."""
    model = wrapped(make_net())
    compression = compcoll.torch.compress(model, "variance", exclude=lambda name, parameter: True)
    x = examples(comm)
    wanted = true_mean(comm, model, x)
    model.zero_grad()
    for _ in range(2):
        compression.backward(lambda outputs, _: outputs.square().mean(), x, torch.zeros(len(x)), 2)
    for name, parameter in model.module.named_parameters():
        assert relative(parameter.grad.double().numpy(), 2 * wanted[name]) < 1e-5, name
    assert "forward" not in model.module.__dict__
    compression.free()


def check_nothing_is_lost(comm: MPI.Intracomm) -> None:
    """What all steps were short of is what the ranks hold for the next, for every method with feedback."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"codec": "onebit"}, "ring"),
        ({"codec": "onebit"}, "direct"),
        ({"codec": "sign", "scale": "mean"}, "ring"),
        ({"codec": "qsgd", "bits": 4, "norm": "max"}, "ring"),
        ({"codec": "fp8"}, "direct"),
        ({"codec": "intsum"}, "ring"),
        ({"codec": "topk", "density": 0.01}, "sparse_ring"),
        ({"codec": "topk", "density": 0.01}, "sparse_direct"),
        ({"codec": "topk", "density": 0.01}, "sparse_native"),
        ({"codec": "randomk", "density": 0.05}, "sparse_ring"),
        ({"codec": "strom", "threshold": 1e-3}, "sparse_ring"),
    ]
    for options, algorithm in cases:
        model, x = wrapped(make_net()), examples(comm)
        compression = compcoll.torch.compress(model, **options, algorithm=algorithm)
        wanted = true_mean(comm, model, x)
        sums = {name: np.zeros_like(values) for name, values in wanted.items()}
        for step in range(1, 6):
            for name, values in backward(model, x).items():
                sums[name] += values
            held = compression.state_dict()["residuals"]
            for name, exact in compression.exact.items():
                if exact:
                    continue
                due = step * wanted[name] - sums[name]
                kept = total(comm, held[name].double().numpy()).reshape(due.shape)
                room = 1e-5 * np.abs(step * wanted[name]).max()
                assert np.abs(kept - due).max() <= room, (options, algorithm, step, name)
                assert comm.size == 1 or np.abs(kept).max() > room, (options, algorithm, name, "lost nothing")
        compression.free()


def check_refusals_come_at_once(comm: MPI.Intracomm) -> None:
    """With the error's own type, and so that the model can be compressed otherwise."""
    model = wrapped(make_net())
    sgd = partial(torch.optim.SGD, list(model.parameters()), lr=0.1)
    refused: list[tuple[type[CompcollError], str, Callable[[], Any]]] = [
        (InvalidArgument, "grow without end", lambda: compcoll.torch.compress(model, "terngrad")),
        (InvalidArgument, "vote", lambda: compcoll.torch.compress(model, "sign", algorithm="ring")),
        (UnknownAlgorithm, "sparse_ring", lambda: compcoll.torch.compress(model, "topk", algorithm="ring")),
        (InvalidArgument, "VarianceFeedback", lambda: compcoll.torch.compress(model, "hybrid", feedback=ErrorFeedback)),
        (InvalidArgument, "feedback=3", lambda: compcoll.torch.compress(model, "topk", feedback=3)),  # type: ignore[arg-type]
        (InvalidArgument, "Adam", lambda: compcoll.torch.DGC(model, torch.optim.Adam(model.parameters()))),
        (InvalidArgument, "Nesterov", lambda: compcoll.torch.DGC(model, sgd(momentum=0.9, nesterov=True))),
        (InvalidArgument, "clip=0", lambda: compcoll.torch.DGC(model, sgd(momentum=0.9), clip=0)),
        (InvalidArgument, "density=2", lambda: compcoll.torch.DGC(model, sgd(momentum=0.9), 2)),
        (InvalidArgument, "wrap it", lambda: compcoll.torch.DGC(model.module, sgd(momentum=0.9))),
    ]
    for kind, said, call in refused:
        error = raised(call)
        assert type(error) is kind and said in str(error), (said, error)
    optimizer = sgd(momentum=0.9)
    backward(model, examples(comm))
    optimizer.step()
    error = raised(lambda: compcoll.torch.DGC(model, optimizer))
    assert isinstance(error, InvalidArgument) and "steps already" in str(error)

    compression = compcoll.torch.compress(
        model, "topk", density=0.01, algorithm="sparse_ring", feedback=partial(DGCFeedback, 0.5)
    )
    assert "momentum=0.5" in repr(compression)
    assert isinstance(raised(lambda: setattr(compression, "codec", compcoll.OneBit())), InvalidArgument)
    assert isinstance(raised(lambda: compression.observe({})), InvalidArgument)
    assert isinstance(raised(lambda: compression.backward(loss_of, examples(comm), examples(comm))), InvalidArgument)
    compression.codec = TopK(0.02)
    backward(model, examples(comm))
    compression.free()

    unwatched = wrapped(Small())
    compression = compcoll.torch.compress(unwatched, "variance", algorithm="sparse_ring")
    targets = torch.zeros(16, dtype=torch.int64)
    error = raised(lambda: loss_of(unwatched(examples(comm)), targets).backward())
    assert "second moments" in str(error), error
    assert isinstance(raised(lambda: compression.observe({"layer.weight": torch.ones(3)})), InvalidArgument)
    assert isinstance(raised(lambda: compression.backward(loss_of, examples(comm), targets, 3)), InvalidArgument)
    compression.free()
