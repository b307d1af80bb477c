"""Groups, futures, bad input and time-outs of the backend."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from groups import all_gather_single, reduce_scatter_single, world
from mpi.world import raised
from mpi4py import MPI
from torch.distributed import ReduceOp

from compcoll.errors import CollectiveMismatch, InvalidArgument, InvalidBuffer, PeerTimeout, UnsupportedDType
from compcoll.torch import Options


def check_groups(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world() as group:
        for ranks in ([0], list(range(p))[::-1], list(range(0, p, 2)), list(range(p))):
            sub = dist.new_group(ranks)
            if r in ranks:
                x = torch.tensor([float(r)])
                dist.all_reduce(x, group=sub)
                assert x == sum(ranks) and dist.get_world_size(sub) == len(ranks)
                dist.broadcast(x, src=ranks[-1], group=sub)
        parted = group.split_group([0, p - 1] if p > 1 else [0])
        assert (parted is not None) == (r in (0, p - 1))
        if parted is not None:
            x = torch.ones(1)
            parted.allreduce([x]).wait()
            assert x == parted.size()
        if p % 2 == 0:
            mesh = dist.init_device_mesh("cpu", (2, p // 2), mesh_dim_names=("a", "b"))
            x = torch.tensor([float(r)])
            dist.all_reduce(x, group=mesh["a"].get_group())
            assert x == r % (p // 2) * 2 + p // 2
        gloo = dist.new_group(backend="gloo")
        x = torch.ones(1)
        dist.all_reduce(x, group=gloo)
        assert x == p


def check_futures(comm: MPI.Intracomm) -> None:
    with world():
        futures = []
        for k in range(20):
            x = torch.full((100 * k,), 1.0 + k)
            futures.append(dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0].sum()))
        for k, future in enumerate(futures):
            assert future.wait() == comm.size * 100 * k * (1 + k)

        def nested(future: Any) -> torch.Tensor:
            y = future.value()[0] * 2
            return dist.all_reduce(y, async_op=True).get_future().wait()[0]

        chained = [dist.all_reduce(torch.ones(4 + k), async_op=True).get_future().then(nested) for k in range(5)]
        assert all((future.wait() == 2 * comm.size**2).all() for future in chained)


def check_bad_input(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world():
        x = torch.ones(8)

        def usable() -> None:
            y = torch.ones(1)
            dist.all_reduce(y)
            assert y == p and (x == 1).all()

        for kind, call in [
            (UnsupportedDType, lambda: dist.all_reduce(x, op=ReduceOp.BAND)),
            (UnsupportedDType, lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=ReduceOp.AVG)),
            (InvalidArgument, lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), [1] * (p + 1))),
            (InvalidBuffer, lambda: all_gather_single(torch.empty(p + 1), torch.empty(1))),
            (InvalidBuffer, lambda: dist.all_gather([torch.empty(1)] * (p + 1), torch.empty(1))),
            (InvalidBuffer, lambda: reduce_scatter_single(torch.empty(1), torch.empty(p + 1))),
            (InvalidBuffer, lambda: dist.group.WORLD.allreduce([x, x])),
        ]:
            assert isinstance(raised(call), kind), call
            usable()
        assert "device" in str(raised(lambda: dist.all_reduce(torch.ones(1, device="meta"))))
        usable()
        if p == 1:
            return
        for usual, odd in [
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(torch.ones(9))),
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x.double())),
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, op=ReduceOp.MAX)),
            (lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0)),
            (lambda: dist.broadcast(x, 0), lambda: dist.broadcast(x, 1)),
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, op=ReduceOp.BAND)),
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(torch.ones(9), async_op=True).wait()),
        ]:
            error = raised(odd if r == 1 else usual)
            assert isinstance(error, CollectiveMismatch | UnsupportedDType), error
            assert isinstance(error, UnsupportedDType) or "rank 1" in str(error)
            usable()
        splits = [2] * p if r == 1 else [1] * p
        error = raised(lambda: dist.all_to_all_single(torch.empty(p), torch.ones(sum(splits)), [1] * p, splits))
        assert isinstance(error, CollectiveMismatch), error
        usable()
    for wrong in ({"codec": "nope"}, {"codec": "zfp", "rate": 1}, {"codec": "zfp", "min_bytes": -1}, {"rate": 8}):
        assert isinstance(raised(lambda wrong=wrong: Options(**wrong)), InvalidArgument)
    assert isinstance(raised(lambda: dist.init_process_group("compcoll", pg_options=3)), InvalidArgument)


def check_time_out(comm: MPI.Intracomm) -> None:
    comm.Barrier()  # the making of the group has the same time-out
    with world(seconds=1.0):
        if comm.size > 1 and comm.rank == 0:
            started = time.monotonic()
            x = torch.ones(3)
            error = raised(lambda: dist.all_reduce(x))
            assert isinstance(error, PeerTimeout) and " Timed out " in str(error)
            assert 0.9 < time.monotonic() - started < 10 and (x == 1).all()
            assert "cannot be used any more" in str(raised(lambda: dist.all_reduce(x)))
            error = raised(lambda: dist.recv(torch.zeros(1), 1))
            assert isinstance(error, PeerTimeout), error
        comm.Barrier()
    with world():
        dist.barrier()


def check_one_order(comm: MPI.Intracomm) -> None:
    """Compressed operations, small ones and MPI's have one order: every rank is told who called what."""
    if comm.size == 1:
        return
    with world(Options(codec="zfp", rate=8, min_bytes=4096, algorithm="ring"), seconds=20.0):
        x = torch.ones(1024)
        calls = {
            "compressed": (lambda: dist.all_reduce(x), "allreduce(sum of 1024 float32"),
            "small": (lambda: dist.all_reduce(torch.ones(3)), "allreduce(sum of 3 float32"),
            "coalesced": (lambda: dist.all_reduce_coalesced([x[:512], x[512:]]), "allreduce_coalesced of (512, 512)"),
            "scattered": (
                lambda: reduce_scatter_single(torch.empty(1024), torch.ones(1024 * comm.size)),
                f"reduce_scatter(sum of {1024 * comm.size} float32",
            ),
            "MPI's": (lambda: dist.all_reduce(torch.ones(1 << 17, dtype=torch.int64)), "allreduce of 131072"),
            "barrier": (dist.barrier, "barrier"),
        }
        for usual, odd in itertools.permutations(calls, 2):
            error = raised(calls[odd if comm.rank == 1 else usual][0])
            assert isinstance(error, CollectiveMismatch), (usual, odd, error)
            assert calls[usual][1] in str(error) and calls[odd][1] in str(error), (usual, odd, error)
            assert (x == 1).all()
            y = torch.full((1024,), float(comm.rank))
            dist.all_reduce(y)
            assert (y - sum(range(comm.size))).abs().max() < 0.1
