"""Low-rank gradients as training meets them: loss scaling, unused parameters, checkpoints, mistakes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from given import METHODS, SHAPES, backward, draw, gradients_of, group, mean, model
from mpi.tensors import assert_same_bits, digest
from mpi.world import raised
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll.errors import CollectiveMismatch, GradientsPending, HookTaken, InvalidArgument
from compcoll.torch import ACPSGD, PowerSGD


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [*state["residuals"].values(), *(factor for pair in state["factors"].values() for factor in pair)]


def settle(comm: MPI.Intracomm, net: nn.Module, compression: Any) -> None:
    """Have DDP make its buckets anew, which it does after the first pass."""
    for _ in range(2):
        backward(net, draw(comm, 0, torch.float32))
    compression.reset()


def check_steps_that_are_not_finite(comm: MPI.Intracomm) -> None:
    """One rank's Inf or NaN is in everybody's gradient, and leaves nothing behind anywhere."""
    for method in METHODS:
        for wrap in (True, False):
            nets = [model(wrap, torch.float32) for _ in range(2)]
            disturbed, undisturbed = (method(net, rank=3) for net in nets)
            for net, compression in zip(nets, (disturbed, undisturbed)):
                settle(comm, net, compression)
            for step in range(5):
                before = digest(tensors_of(disturbed.state_dict()))
                for name, bad in (("first", float("inf")), ("kernels", float("nan")), ("bias", float("inf"))):
                    own = draw(comm, 50 + step, torch.float32)
                    if comm.rank == comm.size - 1:
                        own[name].view(-1)[5] = bad
                    got = backward(nets[0], own)
                    assert not np.isfinite(got[name]).all(), (method, wrap, name)
                    assert_same_bits(comm, [torch.from_numpy(np.isfinite(values)) for values in got.values()])
                    assert digest(tensors_of(disturbed.state_dict())) == before, (method, wrap, name)
                own = draw(comm, step, torch.float32)
                one, other = backward(nets[0], own), backward(nets[1], own)
                for name in SHAPES:
                    assert np.array_equal(one[name], other[name]), (method, wrap, step, name)
            disturbed.free()
            undisturbed.free()


def check_loss_scaling(comm: MPI.Intracomm) -> None:
    """A GradScaler skips the same steps on all ranks, though only one overflows."""
    net = model(False, torch.float32)
    compression = ACPSGD(net, rank=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(4):
        own = draw(comm, step, torch.float32)
        if step == 1 and comm.rank == 0:
            own["square"] *= 1e38
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        scaler.scale(net(own)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert_same_bits(comm, net.parameters())
        assert torch.equal(before[0], net.first) == (step == 1)
        assert all(p.isfinite().all() for p in net.parameters())
    assert scaler.get_scale() == 2.0**7
    compression.free()


class Forked(nn.Module):
    """`rare` is used by rank 0 only, `never` by nobody, `frozen` has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(20, 30)
        self.rare = nn.Linear(30, 30)
        self.never = nn.Linear(30, 30)
        self.frozen = nn.Linear(30, 20)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(20, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.common(x))
        x = self.rare(x) if dist.get_rank() == 0 else x
        return self.last(self.frozen(x))


def check_unused_and_frozen(comm: MPI.Intracomm) -> None:
    for method in METHODS:
        for wrap in (True, False):
            group()
            torch.manual_seed(3)
            net: nn.Module = Forked()
            if wrap:
                net = DistributedDataParallel(net, find_unused_parameters=True)
            compression = method(net, rank=2, min_compression_rate=1)
            inner: Any = net.module if wrap else net
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            for step in range(5):
                x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + comm.rank))
                optimizer.zero_grad()
                net(x).square().mean().backward()
                assert inner.never.weight.grad is None and inner.frozen.weight.grad is None
                assert inner.rare.weight.grad is not None and inner.rare.weight.grad.abs().max() > 0
                optimizer.step()
                assert_same_bits(comm, net.parameters())
            assert "frozen.weight" not in compression.exact
            compression.free()


def check_ranks_that_have_made_other_numbers_of_groups(comm: MPI.Intracomm) -> None:
    """By a name that depends on that number they would not find each other."""
    group()
    if comm.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    for method in METHODS:
        compression = method(net := model(False), rank=3)
        assert_same_bits(comm, [torch.from_numpy(values) for values in backward(net, draw(comm, 0)).values()])
        compression.free()
    if comm.rank != 0:  # after other numbers of groups, PyTorch 2.14 itself cannot make any of all ranks
        dist.new_group([comm.rank], use_local_synchronization=True)


def check_accumulation(comm: MPI.Intracomm) -> None:
    """Gradients of several passes add up before they are averaged, and after that, too."""
    for wrap in (True, False):
        net = model(wrap)
        compression = ACPSGD(net, rank=3)
        owns = [draw(comm, step) for step in range(3)]
        with net.no_sync() if wrap else compression.no_sync():
            net(owns[0]).backward()
        for name, values in gradients_of(net).items():
            assert np.array_equal(values, owns[0][name].numpy()), name
        net(owns[1]).backward()
        first = gradients_of(net)
        net(owns[2]).backward()
        second = gradients_of(net)
        kept = compression.state_dict()["residuals"]
        for name in SHAPES:
            wanted = mean(comm, sum(own[name].numpy() for own in owns))
            if name in kept:
                held = mean(comm, kept[name].double().numpy()).reshape(wanted.shape)
                assert np.allclose(second[name] + held, wanted, atol=1e-9), name
            else:
                both = mean(comm, owns[0][name].numpy() + owns[1][name].numpy())
                assert np.allclose(first[name], both, atol=1e-12) and np.allclose(second[name], wanted, atol=1e-12)
        compression.free()


def check_state(comm: MPI.Intracomm) -> None:
    """A run that goes on from a state has the same bits as one that was not interrupted."""
    for method in METHODS:
        for wrap in (True, False):
            net = model(wrap, torch.float32)
            compression = method(net, rank=3, exact_steps=1)
            for step in range(4):
                backward(net, draw(comm, step, torch.float32))
            state = compression.state_dict()
            held = digest(tensors_of(state))
            wanted = [backward(net, draw(comm, step, torch.float32)) for step in range(4, 7)]
            assert digest(tensors_of(state)) == held, "a state changes with the run that it was taken of"

            for other in (wrap, not wrap):  # the state belongs to parameters, not to buckets
                again = model(other, torch.float32)
                restored = method(again, rank=3, exact_steps=1)
                restored.load_state_dict(state if comm.rank % 2 else comm_states(comm, state))
                for step in range(4, 7):
                    got = backward(again, draw(comm, step, torch.float32))
                    for name in SHAPES:
                        # Where an element lies in a buffer decides the order in which gloo adds it up.
                        room = 0.0 if other == wrap else 1e-4 * np.abs(wanted[step - 4][name]).max()
                        assert np.abs(got[name] - wanted[step - 4][name]).max() <= room, (method, wrap, step, name)
                if other == wrap:
                    restored.free()
            before = digest(tensors_of(restored.state_dict()))
            foreign = {**state, "residuals": {"nobody": torch.zeros(3)}}
            other_rank = {**state, "factors": {name: (p[:, :2], q[:2]) for name, (p, q) in state["factors"].items()}}
            for wrong in (foreign, other_rank, []):
                error = raised(lambda wrong=wrong, to=restored: to.load_state_dict(wrong))
                assert isinstance(error, InvalidArgument), error
            assert digest(tensors_of(restored.state_dict())) == before
            compression.free()
            restored.free()


def check_factors_that_are_rounded_at_random(comm: MPI.Intracomm) -> None:
    codecs: tuple[dict[str, Any], ...] = (
        {"codec": "qsgd", "bits": 4, "algorithm": "ring"},
        {"codec": "randomk", "density": 0.5, "algorithm": "sparse_ring"},
    )
    for method, wrap, options in itertools.product(METHODS, (True, False), codecs):
        nets = [model(wrap, torch.float32) for _ in range(2)]
        compression, restored = (method(net, rank=3, exact_steps=1, **options) for net in nets)
        for step in range(4):
            backward(nets[0], draw(comm, step, torch.float32))
        restored.load_state_dict(compression.state_dict())
        for step in range(4, 7):
            wanted, got = (backward(net, draw(comm, step, torch.float32)) for net in nets)
            for name in SHAPES:
                assert np.array_equal(got[name], wanted[name]), (method, wrap, options, step, name)
        compression.free()
        restored.free()


def comm_states(comm: MPI.Intracomm, state: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks' states, of which only this rank's is real: with the same number of ranks others' do not matter."""
    return [{**state, "rank": rank} for rank in range(comm.size)]


def check_other_number_of_ranks(comm: MPI.Intracomm) -> None:
    """The mean of what was lost stays."""
    group()
    net = model(False, torch.float32)
    compression = ACPSGD(net, rank=3)
    for step in range(3):
        backward(net, draw(comm, step, torch.float32))
    states = comm.allgather(compression.state_dict())
    held = {name: mean(comm, kept.double().numpy()) for name, kept in states[comm.rank]["residuals"].items()}
    compression.free()
    fewer = list(range(max(comm.size - 1, 1)))
    smaller = dist.new_group(fewer)
    few = comm.Split(0 if comm.rank in fewer else MPI.UNDEFINED)
    if few != MPI.COMM_NULL:
        resized = ACPSGD(net, rank=3, process_group=smaller)
        if comm.size > 1:
            error = raised(lambda: resized.load_state_dict(states[comm.rank]))
            assert isinstance(error, InvalidArgument) and "all ranks" in str(error)
        resized.load_state_dict(states)
        for name, kept in resized.state_dict()["residuals"].items():
            assert np.allclose(mean(few, kept.double().numpy()), held[name], rtol=1e-5, atol=1e-6), name
        resized.free()
        few.Free()


def check_refusals(comm: MPI.Intracomm) -> None:
    odd = comm.rank == comm.size - 1
    net, wrapped = model(False), model(True)
    vectors = nn.Sequential(nn.LayerNorm(50), nn.LayerNorm(50))
    refused = [
        (InvalidArgument, "rank=0", lambda: ACPSGD(net, rank=0)),
        (InvalidArgument, "rank=2.5", lambda: PowerSGD(net, rank=2.5)),
        (InvalidArgument, "50 × 50", lambda: ACPSGD(net, rank=51, min_compression_rate=1e-6)),
        (InvalidArgument, "two or more dimensions", lambda: ACPSGD(vectors)),
        (InvalidArgument, "min_compression_rate=0", lambda: ACPSGD(net, min_compression_rate=0)),
        (InvalidArgument, "exact_steps=-1", lambda: ACPSGD(net, exact_steps=-1)),
        (InvalidArgument, "buffer_mb=-1", lambda: ACPSGD(net, buffer_mb=-1)),
        (InvalidArgument, "seed=-1", lambda: ACPSGD(net, seed=-1)),
        (InvalidArgument, "bucket_cap_mb", lambda: ACPSGD(wrapped, buffer_mb=5)),
        (InvalidArgument, "sparse", lambda: ACPSGD(nn.Embedding(100, 100, sparse=True))),
        (InvalidArgument, "rate", lambda: ACPSGD(net, codec="zfp", rate=1)),
    ]
    if comm.size > 1:
        refused += [
            (CollectiveMismatch, "rank 3", lambda: ACPSGD(net, rank=3 if odd else 4)),
            (CollectiveMismatch, "seed", lambda: PowerSGD(wrapped, seed=int(odd))),
            (CollectiveMismatch, "PowerSGD", lambda: (PowerSGD if odd else ACPSGD)(net)),
        ]
    for kind, words, call in refused:
        error = raised(call)
        assert isinstance(error, kind) and words in str(error), (words, error)
    compression, hook = ACPSGD(net), ACPSGD(wrapped)
    for call in (
        lambda: PowerSGD(net),
        lambda: PowerSGD(wrapped),
        lambda: compcoll.torch.compress(wrapped),
        lambda: ACPSGD(DistributedDataParallel(net)),
    ):
        error = raised(call)
        assert isinstance(error, HookTaken) and "ACPSGD" in str(error), error
    assert isinstance(raised(lambda: hook.no_sync().__enter__()), InvalidArgument)
    for one in (net, wrapped):
        assert np.isfinite(backward(one, draw(comm, 0))["first"]).all()
    compression.free()
    PowerSGD(net).free()
    hook.free()


def check_optimizers_that_do_not_wait(comm: MPI.Intracomm) -> None:
    """A step in a hook on a gradient, while others are still to come, is refused; one after backward() is not."""
    net = model(False)
    compression = ACPSGD(net, rank=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = net.last.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    before = [p.detach().clone() for p in net.parameters()]
    error = raised(lambda: backward(net, draw(comm, 0)))
    assert isinstance(error, GradientsPending) and "after backward()" in str(error), error
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))
    handle.remove()
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    handle = net.last.register_post_accumulate_grad_hook(lambda parameter: other.step())
    fresh_net = model(False)
    fresh = ACPSGD(fresh_net, rank=3)
    for step in range(3):  # what the interrupted pass began is forgotten
        got, wanted = backward(net, draw(comm, step)), backward(fresh_net, draw(comm, step))
        for name in SHAPES:
            assert np.array_equal(got[name], wanted[name]), (step, name)
        optimizer.step()
    assert_same_bits(comm, net.parameters())
    handle.remove()
    compression.free()
    fresh.free()


def check_on_other_backends(comm: MPI.Intracomm) -> None:
    """The same on a group of compcoll's as on gloo's."""
    group()
    ours = dist.new_group(backend="compcoll")
    for method in METHODS:
        results = []
        for chosen in (None, ours):
            net = model(False)
            compression = method(net, rank=3, process_group=chosen)
            results.append([backward(net, draw(comm, step)) for step in range(4)])
            compression.free()
        for one, other in zip(*results):
            for name in SHAPES:
                assert np.allclose(one[name], other[name], rtol=1e-9, atol=1e-10), (method, name)
