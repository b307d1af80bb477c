"""Reductions of a process group, on every element type, against NumPy in float64."""

from __future__ import annotations

import itertools
import logging
import os
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from groups import EVERY, FLOATS, INTEGERS, reduce_scatter_single, same, stacked, values, world
from logs import logged
from mpi.tensors import assert_same_bits
from mpi.world import raised
from mpi4py import MPI
from torch.distributed import ReduceOp

from compcoll import ZFP
from compcoll.errors import UnknownAlgorithm
from compcoll.torch import Options
from compcoll.transports.mpi import MPITransport


def check_allreduce(comm: MPI.Intracomm) -> None:
    sums = {ReduceOp.SUM: np.sum, ReduceOp.PRODUCT: np.prod}
    ordered = {ReduceOp.MIN: np.min, ReduceOp.MAX: np.max}
    with world():
        for dtype in EVERY[:-1]:
            for op, oracle in {**sums, **({} if dtype.is_complex else ordered)}.items():
                if dtype.is_complex and op == ReduceOp.PRODUCT:
                    continue
                for asynchronous in (False, True):
                    x = values(comm.rank, dtype)
                    work = dist.all_reduce(x, op=op, async_op=asynchronous)
                    if asynchronous:
                        work.wait()
                    assert same(x, oracle(stacked(comm, dtype), axis=0)), (dtype, op)
                    assert_same_bits(comm, [x])
        for dtype, (op, ufunc) in itertools.product(
            INTEGERS,
            {
                ReduceOp.BAND: np.bitwise_and,
                ReduceOp.BOR: np.bitwise_or,
                ReduceOp.BXOR: np.bitwise_xor,
            }.items(),
        ):
            x = values(comm.rank, dtype)
            dist.all_reduce(x, op=op)
            assert same(x, ufunc.reduce(stacked(comm, dtype).astype(np.int64), axis=0)), (dtype, op)
        for op, oracle in {
            ReduceOp.SUM: np.any,
            ReduceOp.MAX: np.any,
            ReduceOp.BOR: np.any,
            ReduceOp.PRODUCT: np.all,
            ReduceOp.MIN: np.all,
            ReduceOp.BAND: np.all,
        }.items():
            x = values(comm.rank, torch.bool)
            dist.all_reduce(x, op=op)
            assert same(x, oracle(stacked(comm, torch.bool), axis=0)), op


def check_means_and_scaled_sums(comm: MPI.Intracomm) -> None:
    with world():
        for dtype in [*FLOATS, torch.complex64, torch.complex32]:
            x = values(comm.rank, dtype)
            dist.all_reduce(x, op=ReduceOp.AVG)
            assert np.allclose(x.to(torch.complex128), stacked(comm, dtype).mean(axis=0), rtol=1e-2), dtype
        # Neither a sum of halves beyond 65504 nor halves divided to nothing first.
        for value in (60000.0, 6e-8):
            x = torch.full((5,), value, dtype=torch.float16)
            before = x.clone()
            dist.all_reduce(x, op=ReduceOp.AVG)
            assert (x == before).all()
        for factor in (0.5, 2.0):
            x = torch.full((3,), comm.rank + 1.0)
            strided = x.repeat(2, 1).t()  # of the same count, dtype and operation each time, with another factor
            for tensor in (x, strided):
                dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(factor))
                assert (tensor == factor * comm.size * (comm.size + 1) / 2).all(), factor


def check_sizes_and_strides(comm: MPI.Intracomm) -> None:
    with world():
        for n, dtype in [
            (0, torch.float32),
            (1, torch.float32),
            (300_001, torch.float32),
            *((20_001, t) for t in EVERY[:-1]),
        ]:
            x = values(comm.rank, dtype, (n,))
            dist.all_reduce(x)
            assert same(x, stacked(comm, dtype, (n,)).sum(axis=0)), (n, dtype)
        x = values(comm.rank, torch.float64, (6, 4)).t()
        assert not x.is_contiguous()
        dist.all_reduce(x)
        assert same(x, stacked(comm, torch.float64, (6, 4)).sum(axis=0).T)
        y = values(comm.rank, torch.int32, (6, 4))[:, 1:3]
        dist.broadcast(y, comm.size - 1)
        assert same(y, stacked(comm, torch.int32, (6, 4))[-1][:, 1:3])
        leaf = torch.nn.Parameter(values(comm.rank, torch.float32))
        dist.broadcast(leaf, 0)
        assert same(leaf.detach(), stacked(comm, torch.float32)[0]) and leaf.requires_grad
        leaf.untyped_storage().resize_(0)  # numpy() would have forbidden that


def check_reduce_and_scatter(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world():
        for dtype in [*FLOATS, *INTEGERS]:
            x = values(r, dtype)
            dist.reduce(x, dst=p - 1)
            assert r != p - 1 or same(x, stacked(comm, dtype).sum(axis=0)), dtype
            assert r == p - 1 or same(x, stacked(comm, dtype)[r]), dtype
            expected = stacked(comm, dtype, (p, 5)).sum(axis=0)[r]
            for form in ("single", "list"):
                out = torch.empty(5, dtype=dtype)
                source = values(r, dtype, (p, 5))
                if form == "single":
                    reduce_scatter_single(out, source)
                else:
                    dist.reduce_scatter(out, list(source.unbind()))
                assert same(out, expected), (dtype, form)


def check_sparse(comm: MPI.Intracomm) -> None:
    with world():
        places = torch.tensor([[comm.rank, comm.size], [0, 1]])
        x = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (comm.size + 1, 2))
        dist.all_reduce(x)
        expected = torch.zeros(comm.size + 1, 2)
        expected[: comm.size, 0], expected[comm.size, 1] = 1, 2 * comm.size
        assert (x.to_dense() == expected).all()


def check_compression(comm: MPI.Intracomm) -> None:
    """Floating sums and means of some size are compressed, nothing else is; the same bits are on every rank."""
    n = 1 << 18  # 1 MiB of float32
    generator = torch.Generator().manual_seed(comm.rank)
    mine = torch.randn(n, generator=generator)
    every = torch.stack([torch.randn(n, generator=torch.Generator().manual_seed(k)) for k in range(comm.size)]).double()
    # Inside a node nothing is compressed: let all ranks be on nodes of their own.
    own_nodes = lambda self: self.__dict__.update(nodes=(*range(self.size),), cores=1.0)  # noqa: E731
    apart = mock.patch.object(MPITransport, "_find_nodes", own_nodes)
    with apart, world(Options(codec="zfp", rate=16)) as group:
        for op, oracle in ((ReduceOp.SUM, torch.sum), (ReduceOp.AVG, torch.mean)):
            for dtype, bound in ((torch.bfloat16, 0.1), (torch.float16, 2e-2), (torch.float32, 1e-2)):
                x = mine.clone().to(dtype)
                expected = oracle(every.to(dtype).double(), 0)
                dist.all_reduce(x, op=op)
                assert (x.double() - expected).abs().max() < bound, (op, dtype, (x.double() - expected).abs().max())
                assert_same_bits(comm, [x])
            if comm.size > 1:
                assert not (x == expected.to(x.dtype)).all()
                assert group.stats.collective == "allreduce" and "ZFP" in str(group.stats.codec)
        out = torch.empty(n // comm.size)
        reduce_scatter_single(out, mine[: n // comm.size * comm.size].clone())
        part = every.sum(0)[: n // comm.size * comm.size].view(comm.size, -1)[comm.rank]
        assert (out - part).abs().max() < 1e-2
        assert comm.size == 1 or group.stats.collective == "reduce_scatter"
        pieces = list(mine.clone().view(8, -1).unbind())
        dist.all_reduce_coalesced(pieces)
        assert comm.size == 1 or group.stats.collective == "allreduce"
        last = group.stats
        x = mine[:1000].clone()
        dist.all_reduce(x)
        assert np.allclose(x, every.sum(0)[:1000], rtol=1e-5, atol=1e-5)
        for op in (ReduceOp.MAX, ReduceOp.MIN):
            x = mine.clone()
            dist.all_reduce(x, op=op)
            assert (x.double() == (every.max(0) if op == ReduceOp.MAX else every.min(0)).values).all()
        x = mine.mul(1000).long()
        dist.all_reduce(x)
        assert (x == every.float().mul(1000).long().sum(0)).all()
        x = mine.clone()
        dist.broadcast(x, 0)
        assert (x.double() == every[0]).all()
        assert group.stats is last


def check_codec_from_the_environment(comm: MPI.Intracomm) -> None:
    os.environ["COMPCOLL_CODEC"] = "zfp:rate=12"
    try:
        with world() as group:
            assert group.options.codec == ZFP(rate=12)
            x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(comm.rank))
            dist.all_reduce(x)
            assert_same_bits(comm, [x])
            assert comm.size == 1 or group.stats.collective == "allreduce"
    finally:
        del os.environ["COMPCOLL_CODEC"]


def check_algorithm(comm: MPI.Intracomm) -> None:
    """With an algorithm the codec is used where "auto" would not; of a reduce_scatter only if it has that one."""
    for name, scattered in (("ring", "ring"), ("recursive_doubling", None)):
        with world(Options(codec="zfp", rate=16, min_bytes=0, algorithm=name)) as group:
            x = torch.full((64,), float(comm.rank))
            dist.all_reduce(x)
            assert (x - sum(range(comm.size))).abs().max() < 1e-3
            if comm.size > 1:
                assert (group.stats.algorithm, group.stats.codec) == (name, repr(group.options.codec))
            reduce_scatter_single(torch.empty(64), torch.ones(64 * comm.size))
            if comm.size > 1:
                assert group.stats.collective == "reduce_scatter"
                assert scattered is None or group.stats.algorithm == scattered
    os.environ |= {"COMPCOLL_CODEC": "minmax", "COMPCOLL_ALGORITHM": "direct"}
    try:
        assert Options.from_environment().algorithm == "direct"
    finally:
        del os.environ["COMPCOLL_CODEC"], os.environ["COMPCOLL_ALGORITHM"]
    assert isinstance(raised(lambda: Options(codec="zfp", rate=8, algorithm="rong")), UnknownAlgorithm)


def check_unused_codec_is_told(comm: MPI.Intracomm) -> None:
    """One line at the group's end, on one rank; none if anything was compressed."""
    x = torch.ones(1 << 18)
    for options, calls, said in (
        (Options(codec="zfp", rate=8), [], "no sum or mean of floating-point elements had 524288 bytes"),
        (Options(codec="zfp", rate=31), [x, x], "would not have paid for any"),
        (Options(codec="zfp", rate=8, algorithm="ring"), [x], ""),
        (Options(), [x], ""),
    ):
        with logged(logging.WARNING, "compcoll.torch") as records, world(options):
            for tensor in calls:
                dist.all_reduce(tensor)
        lines = [record.getMessage() for record in records]
        told = said and comm.rank == 0 and comm.size > 1
        assert len(lines) == bool(told) and all(said in line for line in lines), (options, lines)


def check_one_handshake(comm: MPI.Intracomm) -> None:
    """What the communicator reduces, compressed or small, has no other handshake than its own."""
    with world(Options(codec="zfp:rate=8", min_bytes=4096, algorithm="ring")) as group:
        communicator = group.channel.communicator
        with mock.patch.object(communicator, "_agree", wraps=communicator._agree) as handshake:
            dist.all_reduce(torch.ones(1024))
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(32, 64).t())
            reduce_scatter_single(torch.empty(1024), torch.ones(1024 * comm.size))
            assert handshake.call_count == (0 if comm.size > 1 else 4)
            dist.barrier()
            assert handshake.call_count == (1 if comm.size > 1 else 5)
