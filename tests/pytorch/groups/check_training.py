"""Training over a group: the hooks of DDP and FSDP2, low-rank factors, and the backend that wraps PyTorch's."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from check_collectives import bytes_of, standing
from fakes.loopback import World
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll import ErrorFeedback
from compcoll.errors import CollectiveMismatch, InvalidArgument, MPIMissing
from compcoll.torch import Options
from compcoll.torch.backend.wrapping import WrappingGroup
from compcoll.torch.gradients import ddp
from compcoll.torch.gradients.ddp import GradientCompression
from compcoll.torch.groups import membership, transport


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 32, bias=False))


def backward(model: nn.Module, step: int) -> None:
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    model.zero_grad()
    model(inputs).square().mean().backward()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def check_gradients_have_the_bits_of_loopback() -> None:
    rank, size = standing()
    alone, model = model_of(), DistributedDataParallel(model_of(), bucket_cap_mb=100)
    compression = compcoll.torch.compress(model, codec="minmax", bits=2, algorithm="direct")
    assert isinstance(compression, GradientCompression)
    world, feedback = World(size), [ErrorFeedback() for _ in range(size)]
    for step in range(3):
        backward(model, step)
        backward(alone, step)
        # The order in which DDP's buckets hold parameters is that in which gradients came from the second step on.
        order = [gradient.flatten() for gradient in gradients_of(alone)]
        inputs = gathered(torch.cat(order if step == 0 else order[::-1]))
        if step == 0:
            continue  # its buckets are others than the second's, with which is begun anew
        if step == 1:
            compression.reset()
            backward(model, step)
        expected = world.run(
            lambda comm, x: comm.iallreduce(
                x, op="mean", codec="minmax", bits=2, algorithm="direct", feedback=feedback[comm.rank]
            ),
            [part.numpy() for part in inputs],
        )
        own = torch.cat([gradient.flatten() for gradient in gradients_of(model)][::-1])
        assert bytes_of(own) == bytes_of(expected[rank]), step
    assert set(compression.stats.calls) == {"direct, MinMax(bits=2, block=2048)"}, compression.stats.calls
    compression.free()


def trained_between_nodes(averaging: Callable[..., Any] | None, most: int) -> tuple[list[bytes], Counter[str]]:
    """Gradients of some steps in two buckets, of ranks that are on nodes of their own, and what was called."""
    rank, _ = standing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "node_name", lambda: f"host {rank}")
        patch.setattr(ddp, "communicators_of", partial(membership.communicators_of, most=most))
        if averaging is not None:
            patch.setattr(GradientCompression, "_average", averaging)
        model = DistributedDataParallel(model_of(), bucket_cap_mb=0.01)
        compression = compcoll.torch.compress(model, codec="zfp", rate=8, algorithm="direct")
        assert isinstance(compression, GradientCompression)
        bits = []
        for step in range(3):
            backward(model, step)
            bits += [bytes_of(gradient) for gradient in gradients_of(model)]
        compression.free()
    return bits, compression.stats.calls


def check_buckets_between_nodes_do_not_wait_for_each_other() -> None:
    """A first bucket is averaged only when the second has been: which one thread could not do."""
    average, second, order = GradientCompression._average, threading.Semaphore(0), list[int]()

    def after_the_second(self: Any, bucket: Any, *rest: Any) -> Any:
        number = bucket.number
        if number == 0 and order:  # before the first step has ended DDP has one bucket
            assert second.acquire(timeout=60), "the second bucket waits for the first"
        averaged = average(self, bucket, *rest)
        order.append(number)
        if number == 1:
            second.release()
        return averaged

    expected, calls = trained_between_nodes(None, 1)
    found, called = trained_between_nodes(after_the_second, 2)
    assert found == expected and called == calls
    assert order == [0, 1, 0, 1, 0]


def check_what_ranks_disagree_in_is_named() -> None:
    rank, _ = standing()
    model = DistributedDataParallel(model_of())
    with pytest.raises(CollectiveMismatch, match=r"(?s)over auto.*over group"):
        compcoll.torch.compress(model, transport="group" if rank else "auto")
    with pytest.raises(CollectiveMismatch, match="rate=9"):
        compcoll.torch.compress(model, codec="zfp", rate=8 + (rank == 2))
    with pytest.raises(InvalidArgument, match="transport='mail'"):
        compcoll.torch.compress(model, transport="mail")
    with pytest.raises(MPIMissing):
        compcoll.torch.compress(model, transport="mpi")


def check_another_group_keeps_what_was_lost() -> None:
    rank, _ = standing()
    pair = dist.new_group([0, 1])
    model = DistributedDataParallel(model_of())
    compression = compcoll.torch.compress(model, codec="minmax", bits=1, algorithm="direct")
    assert isinstance(compression, GradientCompression)
    for step in range(2):
        backward(model, step)
    lost = {name: part.clone() for name, part in compression.state_dict()["residuals"].items()}
    assert any(bool(part.any()) for part in lost.values())
    if rank == 2:  # as if it had died
        return
    compression.group = pair
    assert compression.group is pair
    kept = compression.state_dict()
    assert kept["size"] == 2 and all(torch.equal(kept["residuals"][name], part) for name, part in lost.items())
    alone = model_of()
    backward(alone, 5)
    own = [gradient.clone() for gradient in gradients_of(alone)]
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(500 + rank))
    model.zero_grad()
    with model.no_sync():
        model.module(inputs).square().mean().backward()
    for ours, theirs in zip(gradients_of(model), own, strict=True):
        assert torch.equal(ours, theirs)
    model.zero_grad()
    model.require_backward_grad_sync = True
    model(inputs).square().mean().backward()
    total = [torch.stack([g, torch.zeros_like(g)]) for g in gradients_of(model)]
    for whole in total:
        dist.broadcast(whole[1].copy_(whole[0]), 0, group=pair)
        assert torch.equal(whole[0], whole[1])  # the same bits on both


def check_shards_and_factors() -> None:
    rank, _ = standing()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(60, 48, bias=False), nn.Tanh(), nn.Linear(48, 30, bias=False))
    exact = copy.deepcopy(model)
    fully_shard(model)
    compression = compcoll.torch.compress(model, codec="cast", dtype="float16", algorithm="direct", feedback=False)
    inputs = torch.randn(9, 60, generator=torch.Generator().manual_seed(7))[3 * rank : 3 * rank + 3]
    model(inputs).square().mean().backward()
    exact(inputs).square().mean().backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        mean = torch.stack(gathered(theirs.grad)).mean(0)
        torch.testing.assert_close(ours.grad.full_tensor(), mean, rtol=2e-3, atol=1e-5)
    assert "direct" in str(compression.stats.calls)
    compression.free()

    torch.manual_seed(2)
    low = nn.Linear(200, 120, bias=False)
    method = compcoll.torch.ACPSGD(low, rank=4, codec="zfp", rate=16)
    for _ in range(3):
        low.zero_grad()
        low(torch.randn(4, 200)).square().mean().backward()
    parts = gathered(low.weight.grad)
    assert all(torch.equal(part, parts[0]) for part in parts)
    method.free()


@contextmanager
def wrapped(**options: Any) -> Iterator[Any]:
    group = dist.new_group(backend="compcoll", pg_options=Options(**options))
    assert isinstance(group, WrappingGroup)
    yield group
    dist.destroy_process_group(group)


def check_a_device_of_another_backend_is_not_compressed() -> None:
    _, size = standing()
    for backend, compresses in (("cpu:gloo,cuda:compcoll", False), ("cpu:compcoll", True)):
        group = dist.new_group(
            backend=backend, pg_options=Options("cast", dtype="float16", min_bytes=0, algorithm="direct")
        )
        tensor = torch.full((100,), 1 / 3)
        dist.all_reduce(tensor, group=group)
        torch.testing.assert_close(tensor, torch.full((100,), size / 3), rtol=1e-3, atol=0)
        assert (group.stats is not None) == compresses
        dist.destroy_process_group(group)


def check_hybrid_shards_of_a_device_mesh() -> None:
    _, size = standing()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    model = model_of()
    exact = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    compression = compcoll.torch.compress(model, codec="cast", dtype="float16", algorithm="direct", feedback=False)
    backward(model, 3)
    backward(exact, 3)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        mean = torch.stack(gathered(theirs.grad)).mean(0)
        torch.testing.assert_close(ours.grad.full_tensor(), mean, rtol=2e-3, atol=1e-5)
    assert any(call.startswith("direct") for call in compression.stats.calls)
    compression.free()


def check_the_backend_wraps_pytorchs() -> None:
    rank, size = standing()
    with wrapped(codec="zfp", rate=8, min_bytes=4096, algorithm="direct") as group:
        inputs = [np.random.default_rng(r).standard_normal(5000).astype(np.float32) for r in range(size)]
        expected = World(size).allreduce(inputs, codec="zfp", rate=8, algorithm="direct")
        for async_op in (False, True):
            tensor = torch.tensor(inputs[rank])
            work = dist.all_reduce(tensor, group=group, async_op=async_op)
            if async_op:
                work.wait()
            assert bytes_of(tensor) == bytes_of(expected[rank])
        assert group.stats is not None and group.stats.codec is not None
        output = torch.empty(5000)
        dist.reduce_scatter_tensor(output, torch.tensor(np.tile(inputs[rank], size)), group=group)
        np.testing.assert_allclose(output, np.sum(inputs, 0), atol=1.0)
        assert group.stats.collective == "reduce_scatter"
        # Small ones, other operations and types, and all other collectives are gloo's.
        for exact, op in ((torch.full((8,), 1.5), dist.ReduceOp.SUM), (torch.arange(5000), dist.ReduceOp.MAX)):
            mine = exact.clone() + rank
            dist.all_reduce(mine, op=op, group=group)
            every = torch.stack([exact + r for r in range(size)])
            assert torch.equal(mine, every.sum(0) if op == dist.ReduceOp.SUM else every.amax(0))
        assert group.stats.collective == "reduce_scatter"
        told = [None] * size
        dist.all_gather_object(told, {"rank": rank}, group=group)
        assert told == [{"rank": r} for r in range(size)]
        # A tensor for each rank, of different lengths, which gloo alone does not have; and several at once.
        sent = [torch.full((dest + 1,), 10 * rank + dest) for dest in range(size)]
        came = [torch.empty(rank + 1, dtype=torch.int64) for _ in range(size)]
        work = dist.all_to_all(came, sent, group=group, async_op=True)
        future = work.get_future()
        work.wait()
        future.wait()
        assert [each.tolist() for each in came] == [[10 * source + rank] * (rank + 1) for source in range(size)]
        wide = [torch.empty(size * n) for n in (1, 2)]
        group.allgather_into_tensor_coalesced(wide, [torch.full((n,), float(rank)) for n in (1, 2)]).wait()
        assert [each.tolist() for each in wide] == [[float(r) for r in range(size) for _ in range(n)] for n in (1, 2)]
        half = group.split_group([0, 2], group_name="half")
        assert (half is None) == (rank == 1)
        if half is not None:
            values = torch.full((4,), float(rank))
            half.allreduce([values]).wait()
            assert torch.equal(values, torch.full((4,), 2.0))
        model = DistributedDataParallel(model_of(), process_group=group)
        backward(model, 0)
        assert all(
            torch.equal(part, parts[0]) for g in gradients_of(model) for parts in [gathered(g)] for part in parts
        )
