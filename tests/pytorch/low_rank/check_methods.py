"""ACP-SGD and Power-SGD against their published arithmetic in NumPy's float64."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from given import METHODS, SHAPES, Reference, backward, draw, gradients_of, group, mean, model
from mpi.tensors import assert_same_bits, digest
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compcoll.errors import InvalidArgument
from compcoll.torch import ACPSGD, PowerSGD


def compare(
    comm: MPI.Intracomm, method: Any, wrap: bool, dtype: torch.dtype, bound: float, steps: int = 5, **options: Any
) -> None:
    net = model(wrap, dtype)
    compression = method(net, min_compression_rate=1, **options)
    factors = compression.state_dict()["factors"]
    feedback = options.get("feedback", True)
    references = {
        name: Reference(comm.size, left.numpy(), right.numpy(), feedback) for name, (left, right) in factors.items()
    }
    assert sorted(references) == sorted(name for name, exact in compression.exact.items() if not exact)
    for step in range(steps):
        own = draw(comm, step, dtype)
        got = backward(net, own)
        for name, gradient in own.items():
            every = comm.allgather(gradient.double().numpy().reshape(gradient.shape[0], -1))
            if name in references:
                reference = references[name]
                wanted = reference.acp(every) if method is ACPSGD else reference.power(every)
            else:
                wanted = np.mean(every, axis=0)
            error = np.linalg.norm(got[name].reshape(wanted.shape) - wanted) / np.linalg.norm(wanted)
            assert error <= bound, (method, wrap, dtype, options, step, name, error)
    kept = compression.state_dict()["residuals"]
    assert sorted(kept) == (sorted(references) if feedback else [])
    for name, values in kept.items():
        wanted = references[name].errors[comm.rank]
        error = np.linalg.norm(values.double().numpy().reshape(wanted.shape) - wanted) / np.linalg.norm(wanted)
        assert error <= bound * 10, (method, name, error)
    compression.free()


def check_against_numpy(comm: MPI.Intracomm) -> None:
    for method in METHODS:
        for wrap in (True, False):
            for rank in (1, 2, 7):
                compare(comm, method, wrap, torch.float64, 1e-9, rank=rank)
            compare(comm, method, wrap, torch.float32, 1e-3, rank=4)
            compare(comm, method, wrap, torch.float64, 1e-9, rank=3, feedback=False)


def check_buffers_and_overlap_change_nothing(comm: MPI.Intracomm) -> None:
    for method in METHODS:
        for options in ({"buffer_mb": 0}, {"buffer_mb": 0.02}, {"overlap": False}, {"buffer_mb": 1500}):
            compare(comm, method, False, torch.float64, 1e-9, steps=3, rank=3, **options)


def check_halves(comm: MPI.Intracomm) -> None:
    """Factors and losses are in float32; gradients are rounded once."""
    for method in METHODS:
        for wrap in (True, False):
            compare(comm, method, wrap, torch.bfloat16, 8e-3, rank=4)
            compare(comm, method, wrap, torch.float16, 1e-3, rank=4)


def check_nothing_is_lost(comm: MPI.Intracomm) -> None:
    """The sum of all steps' gradients, and what the ranks hold on average, is the sum of the means."""
    codecs: list[dict[str, Any]] = [
        {},
        {"codec": "minmax", "bits": 3, "block": 64},
        {"codec": "zfp", "rate": 6, "algorithm": "ring"},
    ]
    for method in METHODS:
        for wrap in (True, False):
            for options in codecs:
                net = model(wrap, torch.float32)
                compression = method(net, rank=3, **{"algorithm": "ring", **options})
                due = {name: np.zeros(shape) for name, shape in SHAPES.items()}
                for step in range(6):
                    own = draw(comm, step, torch.float32)
                    for name, values in backward(net, own).items():
                        due[name] += mean(comm, own[name].double().numpy()) - values
                    for name, kept in compression.state_dict()["residuals"].items():
                        held = mean(comm, kept.double().numpy()).reshape(due[name].shape)
                        assert np.abs(held - due[name]).max() < 2e-4, (method, wrap, options, step, name)
                        assert np.abs(due[name]).max() > 0.1, "nothing was lost: this check proves nothing"
                if options and comm.size > 1:
                    assert any("," in call for call in compression.stats.calls), compression.stats.calls
                compression.free()


def check_same_bits_after_every_step(comm: MPI.Intracomm) -> None:
    for method in METHODS:
        for wrap in (True, False):
            for options in ({}, {"codec": "minmax", "bits": 4, "algorithm": "direct"}):
                group()
                torch.manual_seed(comm.rank)  # the ranks begin with different parameters
                net: nn.Module = nn.Sequential(
                    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(1152, 20)
                )
                if wrap:
                    net = DistributedDataParallel(net, bucket_cap_mb=0.02, gradient_as_bucket_view=True)
                compression = method(net, rank=4, **options)
                assert_same_bits(comm, net.parameters())
                optimizer = torch.optim.Adam(net.parameters())
                for step in range(4):
                    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + comm.rank))
                    optimizer.zero_grad()
                    net(x).square().mean().backward()
                    optimizer.step()
                    assert_same_bits(comm, net.parameters())
                compression.free()


def check_exact_steps(comm: MPI.Intracomm) -> None:
    for method in METHODS:
        for wrap in (True, False):
            net = model(wrap)
            compression = method(net, rank=2, exact_steps=2)
            for step in range(3):
                own = draw(comm, step)
                got = backward(net, own)
                errors = {name: np.abs(got[name] - mean(comm, own[name].numpy())).max() for name in SHAPES}
                exact = [name for name, error in errors.items() if error < 1e-12]
                assert (len(exact) == len(SHAPES)) == (step < 2), (method, wrap, step, errors)
            compression.free()


def assert_exact_means(comm: MPI.Intracomm, net: nn.Module, names: tuple[str, ...]) -> None:
    own = draw(comm, 0)
    got = backward(net, own)
    for name in names:
        assert np.abs(got[name] - mean(comm, own[name].numpy())).max() < 1e-12, name


def check_small_gradients_are_exact(comm: MPI.Intracomm) -> None:
    net = model(False)
    # 40×60 is 6 times 4×(40+60), 48×54 is 6.4, 50×50 is 6.3, 90×30 is 5.6: so for both factors, twice that for one.
    for method, sent in ((ACPSGD, 0.5), (PowerSGD, 1)):
        compression = method(net, rank=4, min_compression_rate=5.5 / sent)
        assert [name for name, exact in compression.exact.items() if exact] == ["bias", "norm"]
        compression.free()
        compression = method(net, rank=4, min_compression_rate=6.1 / sent)
        assert [name for name, exact in compression.exact.items() if not exact] == ["kernels", "square"]
        assert_exact_means(comm, net, ("first", "last", "bias", "norm"))
        compression.free()


def check_excluded_gradients_are_exact(comm: MPI.Intracomm) -> None:
    net = model(False)
    compression = ACPSGD(net, rank=4, exclude=["first", "la*"])
    assert [name for name, exact in compression.exact.items() if not exact] == ["kernels", "square"]
    assert_exact_means(comm, net, ("first", "last", "bias", "norm"))
    compression.free()
    with pytest.raises(InvalidArgument, match="exclude: 'nothing'"):
        ACPSGD(net, rank=4, exclude=["nothing"])


def check_dead_layers_give_zeros(comm: MPI.Intracomm) -> None:
    """Zero gradients on all ranks stay zeros, and a layer that comes alive is approximated as any other."""
    for method in METHODS:
        net = model(False)
        compression = method(net, rank=3)
        for step in range(3):
            own = draw(comm, step)
            own["square"].zero_()
            got = backward(net, own)
            assert not got["square"].any() and np.isfinite(got["first"]).all()
        own = draw(comm, 3)
        # Where units are dead, the first columns of an identity, which a QR of zeros gives, would see nothing.
        own["square"][:6] = 0
        own["square"][:, :6] = 0
        alive = [backward(net, own)["square"] for _ in range(4)]
        wanted = mean(comm, own["square"].numpy())
        assert np.linalg.norm(alive[-1]) > 0.5 * np.linalg.norm(wanted), method
        compression.free()


def check_factors_are_drawn_for_each_step(comm: MPI.Intracomm) -> None:
    """Without reuse: other ones in every step, the same on all ranks, and again with the same seed."""
    for method in METHODS:
        runs = []
        for seed in (5, 5, 6):
            net = model(False)
            compression = method(net, rank=3, reuse=False, seed=seed)
            drawn = []
            for step in range(4):
                left, right = compression.state_dict()["factors"]["square"]
                assert_same_bits(comm, (left, right))
                assert torch.allclose(left.t() @ left, torch.eye(3, dtype=left.dtype), atol=1e-9)
                assert torch.allclose(right @ right.t(), torch.eye(3, dtype=right.dtype), atol=1e-9)
                drawn += [digest([left]), digest([right])]
                backward(net, draw(comm, step))
            assert len(set(drawn)) == len(drawn), method
            runs.append(drawn)
            compression.free()
        assert runs[0] == runs[1] and not set(runs[0]) & set(runs[2])


def check_sends_during_back_propagation(comm: MPI.Intracomm) -> None:
    """With overlap, buffers are on their way before the last gradient is there, Power-SGD's right factors, too."""
    group()
    for method, factors in ((ACPSGD, 1), (PowerSGD, 2)):
        for overlap in (True, False):
            net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
            compression = method(net, rank=4, buffer_mb=0.016, overlap=overlap)
            calls, sent = compression.stats.calls, [0]
            due = 3 * factors if overlap else 0

            def look(gradient: torch.Tensor, calls: Any = calls, sent: list[int] = sent, due: int = due) -> None:
                patience = time.monotonic() + 20.0
                while calls["all_reduce"] < due and time.monotonic() < patience:
                    time.sleep(0.001)
                sent[0] = calls["all_reduce"]

            net[0].weight.register_hook(look)
            net(torch.ones(2, 64)).sum().backward()
            assert sent == [due] and calls["all_reduce"] == 4 * factors, (method, overlap, sent, calls)
            compression.free()


def check_account(comm: MPI.Intracomm) -> None:
    net = model(False, torch.float32)
    compression = ACPSGD(net, rank=2)
    low = [(shape[0], int(np.prod(shape[1:]))) for shape in SHAPES.values() if len(shape) > 1]
    raw = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    for step in range(2):
        before = compression.stats.wire_nbytes
        backward(net, draw(comm, step, torch.float32))
        numbers = sum(2 * pair[step] for pair in low) + 60 + 7 + len(SHAPES)
        sent = compression.stats.wire_nbytes - before
        assert abs(sent - 4 * numbers * 2 * (comm.size - 1) / comm.size) <= 4, (step, sent)
    assert compression.stats.raw_nbytes == 2 * raw
    assert comm.size == 1 or compression.stats.ratio > 15
    assert compression.stats.encode_seconds > 0 and compression.stats.decode_seconds > 0
    compression.free()
    assert dist.is_initialized() and gradients_of(net)
