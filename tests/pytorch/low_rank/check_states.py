"""States of low-rank gradients belong to parameters: in any memory order, wrapper, and whichever are trained."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from given import METHODS, SHAPES, Reference, backward, draw, gradients_of, group, mean, model
from mpi.tensors import assert_same_bits, digest
from mpi.world import raised
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compcoll.errors import InvalidArgument
from compcoll.torch import ACPSGD

LAYOUTS = tuple(itertools.product((True, False), (True, False)))
"""Whether DDP is around the model, and whether its parameters are reversed in memory."""


def numbers(kept: Any) -> bytes:
    """A digest of residuals, or of both factors."""
    return digest([kept] if isinstance(kept, torch.Tensor) else kept)


def references(comm: MPI.Intracomm, compression: Any) -> dict[str, Reference]:
    factors = compression.state_dict()["factors"]
    return {name: Reference(comm.size, left.numpy(), right.numpy()) for name, (left, right) in factors.items()}


def advance(comm: MPI.Intracomm, method: Any, known: dict[str, Reference], own: dict[str, torch.Tensor]) -> Any:
    """Means by NumPy."""
    every = {name: comm.allgather(values.double().numpy().reshape(len(values), -1)) for name, values in own.items()}
    return {
        name: (known[name].acp(given) if method is ACPSGD else known[name].power(given))
        if name in known
        else np.mean(given, axis=0)
        for name, given in every.items()
    }


def assert_as_known(comm: MPI.Intracomm, known: dict[str, Reference], state: dict[str, Any], told: Any) -> None:
    for name, kept in state["residuals"].items():
        assert kept.shape == SHAPES[name] and kept.is_contiguous(), (*told, name)
        wanted = known[name].errors[comm.rank]
        assert np.allclose(kept.numpy().reshape(wanted.shape), wanted, rtol=0, atol=1e-8), (*told, name)


def check_states_are_in_logical_order(comm: MPI.Intracomm) -> None:
    """Gradients, residuals and factors are those of the parameters' own order; a state goes to the other order."""
    changes = [(first, second) for first, second in itertools.product(LAYOUTS, LAYOUTS) if first[1] != second[1]]
    for method, (first, second) in itertools.product(METHODS, changes):
        told: tuple[Any, ...] = (method.__name__, first, second)
        net = model(first[0], reverse=first[1])
        compression = method(net, rank=3, min_compression_rate=1)
        known = references(comm, compression)
        for step in range(4):
            if step == 2:
                state = compression.state_dict()
                compression.free()
                net = model(second[0], reverse=second[1])
                compression = method(net, rank=3, min_compression_rate=1)
                compression.load_state_dict(state)
            own = draw(comm, step)
            got = backward(net, own)
            for name, wanted in advance(comm, method, known, own).items():
                assert np.allclose(got[name].reshape(wanted.shape), wanted, rtol=0, atol=1e-8), (*told, step, name)
            assert_as_known(comm, known, compression.state_dict(), (*told, step))
        compression.free()


def check_parameters_that_are_frozen_or_thawed(comm: MPI.Intracomm) -> None:
    for method, wrap, thaw in itertools.product(METHODS, (True, False), (True, False)):
        told = (method.__name__, wrap, thaw)
        group()
        nets: list[nn.Module] = []
        for frozen in (thaw, not thaw):
            net = model(False)
            net.square.requires_grad_(not frozen)
            nets.append(DistributedDataParallel(net, bucket_cap_mb=0.02) if wrap else net)
        before, after = (method(net, rank=3, min_compression_rate=1) for net in nets)
        for step in range(3):
            backward(nets[0], draw(comm, step))
        state = before.state_dict()
        after.load_state_dict(state)
        now = after.state_dict()
        for part, left_out in (("residuals", set()), ("factors", {"square"})):
            shared = set(state[part]) & set(now[part])
            assert shared == set(state[part]) - left_out, told
            for name in shared:
                assert numbers(state[part][name]) == numbers(now[part][name]), (*told, part, name)
        assert not thaw or not now["residuals"]["square"].any()
        due = {name: mean(comm, kept.numpy()) for name, kept in now["residuals"].items() if name in now["factors"]}
        for step in range(3, 5):
            own = draw(comm, step)
            got = backward(nets[1], own)
            kept = after.state_dict()["residuals"]
            for name in due:
                due[name] += mean(comm, own[name].numpy()) - got[name]
                assert np.abs(mean(comm, kept[name].numpy()) - due[name]).max() < 1e-9, (*told, step, name)
        before.free()
        after.free()


def check_states_of_something_else_are_refused(comm: MPI.Intracomm) -> None:
    for method in METHODS:
        net = model(False)
        compression = method(net, rank=3)
        backward(net, draw(comm, 0))
        state = compression.state_dict()
        flat = {name: kept.reshape(-1) for name, kept in state["residuals"].items()}
        for wrong, words in (
            ({**state, "residuals": flat}, "no parameter of that shape"),
            ({**state, "residuals": {"nobody": torch.zeros(3)}}, "nobody"),
            ({**state, "factors": {**state["factors"], "nobody": state["factors"]["first"]}}, "nobody"),
            ({**state, "version": state["version"] - 1}, "version"),
        ):
            error = raised(lambda wrong=wrong, to=compression: to.load_state_dict(wrong))
            assert isinstance(error, InvalidArgument) and words in str(error), (words, error)
        compression.free()


def check_one_gradient_that_is_not_finite(comm: MPI.Intracomm) -> None:
    """It is not finite anywhere; the others are what they would be beside a finite one; and nothing is kept of it."""
    for method, wrap, bad in itertools.product(METHODS, (True, False), ("first", "kernels", "bias")):
        told = (method.__name__, wrap, bad)
        net = model(wrap)
        compression = method(net, rank=3, min_compression_rate=1)
        known = references(comm, compression)
        for step in range(4):
            own = draw(comm, step)
            before = compression.state_dict()
            poisoned = {name: values.clone() for name, values in own.items()}
            if comm.rank == comm.size - 1:
                poisoned[bad].view(-1)[7] = float("inf") if step % 2 else float("nan")
            disturbed = backward(net, poisoned)
            now = compression.state_dict()
            for part in ("residuals", "factors"):
                for name, kept in before[part].items():
                    assert numbers(kept) == numbers(now[part][name]), (*told, step, part, name)
            got = backward(net, own)
            wanted = advance(comm, method, known, own)
            for name in SHAPES:
                assert np.isfinite(disturbed[name]).all() == (name != bad), (*told, step, name)
                for values in (got, disturbed) if name != bad else (got,):
                    close = np.allclose(values[name].reshape(wanted[name].shape), wanted[name], rtol=0, atol=1e-8)
                    assert close, (*told, step, name)
            assert_same_bits(comm, [torch.from_numpy(np.isfinite(values)) for values in disturbed.values()])
        compression.free()


def check_products_that_halves_cannot_hold(comm: MPI.Intracomm) -> None:
    """They are Inf in the gradient, and so a step that is not finite."""
    for method, wrap in itertools.product(METHODS, (True, False)):
        net = model(wrap, torch.float16)
        compression = method(net, rank=1)
        overflowed = 0
        halves = torch.eye(2).repeat_interleave(25, 0).repeat_interleave(25, 1)
        for step in range(6):
            own = draw(comm, step, torch.float16)
            # One direction is given at a time, and the other adds up.
            noise = torch.randn(50, 50, generator=torch.Generator().manual_seed(step))
            own["square"] = (4e4 * halves + 5e3 * noise).to(torch.float16)
            before = compression.state_dict()
            got = backward(net, own)
            if not all(np.isfinite(values).all() for values in got.values()):
                overflowed += 1
                now = compression.state_dict()
                for name, kept in before["residuals"].items():
                    assert torch.equal(kept, now["residuals"][name]), (method.__name__, wrap, step, name)
        assert overflowed, "nothing was too large: this proves nothing"
        compression.free()


def check_initial_parameters_in_other_memory_orders(comm: MPI.Intracomm) -> None:
    """Rank 0's values reach all ranks, wherever they lie there."""
    group()
    torch.manual_seed(comm.rank)
    net = nn.Conv2d(4, 8, 3, bias=False).to(memory_format=torch.contiguous_format if comm.rank else torch.channels_last)
    net.turned = nn.Parameter(torch.randn(30, 20).t() if comm.rank else torch.randn(20, 30))
    net.register_buffer("apart", torch.randn(6, 8)[:, ::2])
    net.register_buffer("wide", torch.randn(3, 1).expand(3, 5))
    own = {name: values.detach().clone() for name, values in (*net.named_parameters(), *net.named_buffers())}
    compression = ACPSGD(net, rank=2, min_compression_rate=1)
    for name, values in (*net.named_parameters(), *net.named_buffers()):
        wanted = comm.bcast(own[name].numpy())
        assert np.array_equal(values.detach().numpy(), wanted), name
    compression.free()
    assert gradients_of(net) == {}


def check_models_that_average_by_themselves(comm: MPI.Intracomm) -> None:
    net = model(True)
    for method in METHODS:
        error = raised(lambda method=method: method(nn.Sequential(net)))
        assert isinstance(error, InvalidArgument) and "averages gradients itself" in str(error), error
