"""Training on compcoll: the same as on gloo or in one process, and the same bits on every rank."""

from __future__ import annotations

import copy
import gc
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from groups import world
from mpi.tensors import assert_same_bits
from mpi.world import raised
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from compcoll.torch import ACPSGD, Options, PowerSGD, compress

STEPS = 3


class Forked(nn.Module):
    """Some parameters are used by rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(8, 32)
        self.rare = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.common(x))
        return self.last(self.rare(x) if dist.get_rank() == 0 else x)


def mlp(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def train(model: nn.Module, optimizer: Any = None, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parameters after some steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        x, y = batch(number, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(size: int, model: nn.Module) -> list[torch.Tensor]:
    """What one process gets from all ranks' batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            x, y = batch(number, rank)
            (nn.functional.mse_loss(model(x), y) / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], **tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


def check_ddp(comm: MPI.Intracomm) -> None:
    with world():
        expected = alone(comm.size, mlp())
        for options in (
            {},
            {"bucket_cap_mb": 0.001},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"find_unused_parameters": True},
        ):
            found = train(DistributedDataParallel(mlp(), **options))
            assert_close(found, expected)
            assert_same_bits(comm, found)


def check_ddp_as_on_gloo(comm: MPI.Intracomm) -> None:
    """Unused parameters, gradients accumulated without synchronisation, mixed precision."""
    with world():
        gloo = dist.new_group(backend="gloo")

        def forked(group: Any) -> list[torch.Tensor]:
            torch.manual_seed(1)
            return train(DistributedDataParallel(Forked(), process_group=group, find_unused_parameters=True))

        def accumulated(group: Any) -> list[torch.Tensor]:
            model = DistributedDataParallel(mlp(), process_group=group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(STEPS):
                x, y = batch(number, dist.get_rank())
                with model.no_sync():
                    nn.functional.mse_loss(model(x), y).backward()
                nn.functional.mse_loss(model(x * 2), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [parameter.detach() for parameter in model.parameters()]

        def autocast(group: Any) -> list[torch.Tensor]:
            model = DistributedDataParallel(mlp(), process_group=group)
            with torch.autocast("cpu", torch.bfloat16):
                return train(model)

        def half(group: Any) -> list[torch.Tensor]:
            return train(DistributedDataParallel(mlp().bfloat16(), process_group=group), dtype=torch.bfloat16)

        for way in (forked, accumulated, autocast, half):
            found = way(None)
            assert_same_bits(comm, found)
            # gloo adds halves one by one, rounding each time.
            assert_close(found, way(gloo), **({"rtol": 5e-2, "atol": 1e-2} if way is half else {}))


def check_hooks_of_pytorch(comm: MPI.Intracomm) -> None:
    """Several buckets in flight; PowerSGD chains collectives by callbacks, which must keep one order on all ranks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    with world():
        expected = alone(comm.size, mlp(64))
        for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
            model = DistributedDataParallel(mlp(64), bucket_cap_mb=0.005)
            model.register_comm_hook(None, hook)
            found = train(model)
            assert_same_bits(comm, found)
            assert_close(found, expected, rtol=2e-2, atol=2e-3)
        for options in ({}, {"batch_tensors_with_same_shape": True}):
            model = DistributedDataParallel(mlp(64), bucket_cap_mb=0.005)
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, **options)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            found = train(model)
            assert_same_bits(comm, found)


def check_compressed_ddp(comm: MPI.Intracomm) -> None:
    with world(Options(codec="minmax", bits=8, min_bytes=1024)) as group:
        found = train(DistributedDataParallel(mlp(64)))
        assert_same_bits(comm, found)
        assert_close(found, alone(comm.size, mlp(64)), rtol=0.1, atol=1e-2)
        assert comm.size == 1 or group.stats.collective == "allreduce"


def check_compressed_gradients(comm: MPI.Intracomm) -> None:
    """`compress` over compcoll's process group, by a dense codec and by a sparse one that sends every element."""
    with world():
        expected = alone(comm.size, mlp(64))
        for codec, tolerance in (
            ({"codec": "minmax", "bits": 8}, {"rtol": 0.1, "atol": 1e-2}),
            ({"codec": "topk", "density": 1.0}, {"rtol": 1e-4, "atol": 1e-6}),
        ):
            model = DistributedDataParallel(mlp(64))
            compression = compress(model, min_numel=1, exclude=(), **codec)
            found = train(model)
            assert_same_bits(comm, found)
            assert_close(found, expected, **tolerance)
            assert compression.stats.wire_nbytes > 0 or comm.size == 1
            compression.free()


def check_low_rank(comm: MPI.Intracomm) -> None:
    """What was given and what the ranks still hold, in the mean, is the sum of the means; factors by a codec, too."""
    with world():
        for method, options in ((ACPSGD, {}), (PowerSGD, {}), (ACPSGD, {"codec": "minmax", "bits": 8})):
            model, own = mlp(), mlp()
            compression = method(model, rank=2, **options)
            names = [name for name, exact in compression.exact.items() if not exact]
            assert {"0.weight", "2.weight"} <= set(names)
            given = {name: np.zeros(own.get_parameter(name).numel()) for name in names}
            wanted = {name: np.zeros_like(total) for name, total in given.items()}
            for number in range(STEPS):
                x, y = batch(number, comm.rank)
                for module, sums in ((model, given), (own, wanted)):
                    module.zero_grad()
                    nn.functional.mse_loss(module(x), y).backward()
                    for name in names:
                        gradient = module.get_parameter(name).grad
                        assert gradient is not None
                        sums[name] += gradient.double().numpy().ravel()
                assert_same_bits(comm, [parameter.grad for parameter in model.parameters()])
            kept = compression.state_dict()["residuals"]
            for name in names:
                held = comm.allreduce(kept[name].double().numpy().ravel()) / comm.size
                np.testing.assert_allclose(given[name] + held, comm.allreduce(wanted[name]) / comm.size, atol=1e-5)
            compression.free()


def check_fsdp1(comm: MPI.Intracomm) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with world():
        model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
        train(model)
        with FullyShardedDataParallel.summon_full_params(model):
            found = [parameter.detach().clone().view(-1) for parameter in model.parameters()]
        assert_same_bits(comm, found)
        assert_close([torch.cat(found)], [torch.cat([p.reshape(-1) for p in alone(comm.size, mlp())])])


def check_fsdp2(comm: MPI.Intracomm) -> None:
    from torch.distributed.fsdp import fully_shard

    with world():
        model = mlp()
        mesh = dist.init_device_mesh("cpu", (comm.size,))
        fully_shard(model, mesh=mesh)
        train(model)
        found = [parameter.full_tensor() for parameter in model.parameters()]
        assert_same_bits(comm, found)
        assert_close(found, alone(comm.size, mlp()))


def check_zero(comm: MPI.Intracomm) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with world():
        model = DistributedDataParallel(mlp())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        found = train(model, optimizer)
        assert_same_bits(comm, found)
        assert_close(found, alone(comm.size, mlp()))


def check_tensor_parallel(comm: MPI.Intracomm) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with world():
        mesh = dist.init_device_mesh("cpu", (comm.size,))
        plain = mlp()[:3]
        model = copy.deepcopy(plain)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x, y = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)), torch.zeros(6, 32)
        for one in (plain, model):
            nn.functional.mse_loss(one(x), y).backward()
        gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        assert_close(gradients, [parameter.grad for parameter in plain.parameters()])
        whole = torch.arange(comm.size * 12.0).view(-1, 3)
        part = distribute_tensor(whole, mesh, [Shard(0)])
        assert (part.redistribute(mesh, [Shard(1)]).full_tensor() == whole).all()
        assert ((part @ part.T).redistribute(mesh, [Replicate()]).to_local() == whole @ whole.T).all()


def check_checkpoint(comm: MPI.Intracomm) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    with world():
        folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
        model, other = mlp(), mlp()
        for one in (model, other):
            fully_shard(one, mesh=dist.init_device_mesh("cpu", (comm.size,)))
        train(model)
        for kind in ("sync", "async"):
            place = f"{folder}/{kind}"
            if kind == "sync":
                checkpoint.save(get_model_state_dict(model), checkpoint_id=place)
            else:
                checkpoint.async_save(get_model_state_dict(model), checkpoint_id=place).result()
            dist.barrier()
            state = get_model_state_dict(other)
            checkpoint.load(state, checkpoint_id=place)
            set_model_state_dict(other, state)
            assert_close(
                [parameter.full_tensor() for parameter in other.parameters()],
                [parameter.full_tensor() for parameter in model.parameters()],
            )


def check_compiled_ddp(comm: MPI.Intracomm) -> None:
    with world():
        torch._dynamo.reset()
        found = train(torch.compile(DistributedDataParallel(mlp()), backend="aot_eager"))
        assert_same_bits(comm, found)
        assert_close(found, alone(comm.size, mlp()))


def check_different_models(comm: MPI.Intracomm) -> None:
    if comm.size == 1:
        return
    with world():
        try:
            DistributedDataParallel(mlp(32 if comm.rank == 0 else 16))
        except Exception as error:
            text = str(error)
        else:
            text = ""
        assert "do not belong together" in text or "appears not to match" in text, text
        if comm.rank != 0 and "appears not to match" in text:
            # PyTorch tells these ranks only; whatever they call next frees rank 0, which waits for its parameters.
            assert "rank 0: broadcast" in str(raised(dist.barrier))


def check_joining_ranks_divide_by_those_that_have_not(comm: MPI.Intracomm) -> None:
    """The reducer waits for a handle that C++ alone holds, and asks for its future."""
    with world():
        rank, size = dist.get_rank(), dist.get_world_size()
        model = DistributedDataParallel(nn.Linear(8, 8))
        seen = []
        with Join([model], divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                model.zero_grad()
                loss = model((rank + 1) * torch.ones(1, 8)).sum()
                gc.collect()
                loss.backward()
                seen.append(float(model.module.weight.grad[0, 0]))
        expected = [np.mean(range(step + 1, size + 1)) for step in range(1 + rank)]
        np.testing.assert_allclose(seen, expected, rtol=1e-6)  # each is divided before they are added
