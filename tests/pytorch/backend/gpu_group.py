"""The process group "compcoll" on CUDA tensors, all ranks on one GPU."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compcoll.torch import Options
from compcoll.torch.backend import gpu
from compcoll.transports.library import gpu_awareness


class Mapped:
    """Pinned host memory as a GPU has it: MPI can take it, too, whether it is GPU-aware or not."""

    def __init__(self, *shape: int) -> None:
        self._host = torch.zeros(shape, pin_memory=True)
        data = self._host.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": data, "strides": None, "version": 2}


def empty(*shape: int) -> torch.Tensor:
    if gpu_awareness().aware:
        return torch.zeros(shape, device="cuda")
    return torch.as_tensor(Mapped(*shape), device="cuda")


def without_copies(rank: int, size: int) -> None:
    """MPI is given memory of the GPU's: once it holds what kernels shall put there, and before others read it."""
    n, total = 50_000, size * (size + 1) / 2
    heavy = torch.ones(2048, 2048, device="cuda")
    for asynchronous in (False, True):
        x, gathered, exchanged, part, received = empty(n), empty(size, n), empty(size, n), empty(n), empty(n)
        for _ in range(20):
            heavy = heavy @ heavy * 1e-4
        x.fill_(rank + 1.0)
        before = x + heavy[0, 0] * 0
        works = [
            dist.all_reduce(x, async_op=asynchronous),
            dist.all_gather_into_tensor(gathered, x, async_op=asynchronous),
            dist.all_to_all_single(exchanged, gathered, async_op=asynchronous),
            dist.reduce_scatter_tensor(part, exchanged, op=dist.ReduceOp.AVG, async_op=asynchronous),
        ]
        for work in works if asynchronous else ():
            work.wait()
        sending = dist.isend(part, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        assert (before == rank + 1).all()
        for tensor in (x, gathered, exchanged, part, received):
            assert (tensor == total).all()


def main() -> None:
    dist.init_process_group("compcoll", pg_options=Options(codec="cast", dtype="bfloat16", min_bytes=2**20))
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, size + 1))
    side = torch.cuda.Stream()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.complex64):
        with torch.cuda.stream(side):  # what a long kernel will make
            heavy = torch.ones(2048, 2048, device="cuda")
            for _ in range(20):
                heavy = heavy @ heavy * 1e-4
            x = torch.full((100_003,), rank + 1, dtype=dtype, device="cuda")
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            doubled = x * 2
        side.synchronize()
        assert (doubled == 2 * total).all(), dtype
    large = torch.full((1_000_000,), float(rank + 1), device="cuda")  # which is compressed
    work = dist.all_reduce(large, async_op=True)
    work.wait()
    assert (large * 2 == 2 * total).all()
    (got,) = dist.all_reduce(torch.ones(1000, device="cuda"), async_op=True).get_future().wait()
    assert (got == size).all() and got.is_cuda
    gathered = torch.empty(size, 3, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.full((3,), float(rank), device="cuda"))
    assert (gathered == torch.arange(size, device="cuda")[:, None]).all()
    received = torch.empty(5, device="cuda")
    sending = dist.isend(torch.full((5,), float(rank), device="cuda"), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    sending.wait()
    assert (received == (rank - 1) % size).all()

    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(32, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own)
    assert all(torch.equal(own, other) for other in every) and own.isfinite().all()

    with (
        mock.patch.object(gpu, "pinned", side_effect=AssertionError("a pinned copy")),
        mock.patch.object(gpu, "gpu_awareness", return_value=SimpleNamespace(aware=True)),
    ):
        without_copies(rank, size)
    dist.destroy_process_group()


main()
