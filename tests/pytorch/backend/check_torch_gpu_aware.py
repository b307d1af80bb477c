"""Tensors of a GPU whose memory MPI takes, on a stand-in whose work is done as late as its events allow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fakes.late_cuda import LateCUDA, waits
from groups import values, world
from mpi.world import raised
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from compcoll.algorithms.shared_memory import STREAMED_NBYTES
from compcoll.errors import CommunicatorBroken, PeerTimeout, UnsupportedDevice
from compcoll.torch import Options, streams
from compcoll.torch.backend import gpu, operations

OPTIONS = {
    "broadcast": dist.BroadcastOptions,
    "gather": dist.GatherOptions,
    "scatter": dist.ScatterOptions,
    "alltoall": dist.AllToAllOptions,
    "all_to_all_single": dist.AllToAllOptions,
    "allreduce": dist.AllreduceOptions,
    "allreduce_coalesced": dist.AllreduceCoalescedOptions,
    "reduce": dist.ReduceOptions,
    "reduce_scatter": dist.ReduceScatterOptions,
    "reduce_scatter_single": dist.ReduceScatterOptions,
    "reduce_scatter_single_coalesced": dist.ReduceScatterOptions,
}
SUM, AVG, MAX, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT
N = 12_000
"""Elements that do not travel while the ranks agree, and are too few for memory that ranks have in common."""


class Caller:
    """Calls a process group's operations on tensors of a GPU, or of the host for comparison.

    Methods of torch.distributed would keep the stand-in's tensors from being asked themselves.
    """

    def __init__(self, cuda: LateCUDA | None, *, asynchronous: bool = False) -> None:
        self.group: Any = dist.group.WORLD
        self.rank, self.size = self.group.rank(), self.group.size()
        self.upload: Any = torch.clone if cuda is None else cuda.upload
        self.download: Any = torch.clone if cuda is None else cuda.download
        self._asynchronous = asynchronous

    def call(self, name: str, *arguments: Any, **settings: Any) -> Any:
        options = OPTIONS.get(name, AllgatherOptions)()
        for key, value in settings.items():
            setattr(options, key, value)
        options.asyncOp = self._asynchronous
        work = getattr(self.group, name)(*arguments, options)
        work.wait()
        return work

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return self.upload(torch.zeros(shape, dtype=dtype))

    def moved(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """What the operations that move elements give."""
        p, r, call, up, down = self.size, self.rank, self.call, self.upload, self.download
        rows = values(r, dtype, (4, 3))
        x, strided = up(rows), up(rows).t()
        before = x + x  # which reads what the next operation writes
        for tensor in (x, strided):
            call("broadcast", [tensor], rootRank=p - 1)
        yield from map(down, (x, strided, before))
        parts = [self.empty(3, 4, dtype=dtype) for _ in range(p)]
        call("allgather", [parts], [up(rows).t()])
        yield from map(down, parts)
        outputs = [[self.empty(n, dtype=dtype) for n in (2, 5)] for _ in range(p)]
        call("allgather_coalesced", outputs, [up(values(r, dtype, (n,))) for n in (2, 5)])
        yield from (down(tensor) for part in outputs for tensor in part)
        whole = self.empty(p, 4, 3, dtype=dtype)
        whole[r] = rows
        call("all_gather_single", whole, whole[r])
        yield down(whole)
        tall = self.empty(6, p, dtype=dtype).t()
        call("all_gather_single", tall, up(rows[:2].reshape(-1)))
        yield down(tall)
        root = [self.empty(3, 4, dtype=dtype) for _ in range(p)] if r == 1 % p else None
        call("gather", [] if root is None else [root], [up(rows).t()], rootRank=1 % p)
        yield from map(down, root or [])
        mine = self.empty(3, 4, dtype=dtype).t()
        call("scatter", [mine], [[up(values(k, dtype, (4, 3))) for k in range(p)]] if r == 0 else [], rootRank=0)
        yield down(mine)
        parts = [self.empty(r + k, dtype=dtype) for k in range(p)]
        call("alltoall", parts, [up(values(k, dtype, (r + k,))) for k in range(p)])
        yield from map(down, parts)
        both = up(values(r, dtype, (p, 5)))
        call("all_to_all_single", both, both, [], [])
        yield down(both)
        strided = self.empty(5, p, dtype=dtype).t()
        call("all_to_all_single", strided, up(values(r, dtype, (5, p))).t(), [], [])
        yield down(strided)

    def reduced(self) -> Iterator[Tensor]:
        """What the operations that reduce give, of elements that MPI knows."""
        p, r, call, up, down = self.size, self.rank, self.call, self.upload, self.download
        generator = torch.Generator().manual_seed(r)
        for op, dtype in ((SUM, torch.float32), (AVG, torch.float32), (AVG, torch.int32), (MAX, torch.int64)):
            x = (100 * torch.randn(N, generator=generator)).to(dtype)
            whole, strided = up(x), up(x.view(100, -1)).t()
            before = whole + whole
            for tensor in (whole, strided):
                work = call("allreduce", [tensor], reduceOp=op)
            yield from map(down, (whole, strided, before))
            if self._asynchronous:
                (got,) = self.group.allreduce([up(x)], work_options(op)).get_future().wait()
                yield down(got)
                assert work.is_success()
            tensors = [up(x[:100]), up(x[100:300].view(2, -1)).t()]
            call("allreduce_coalesced", tensors, reduceOp=op)
            yield from map(down, tensors)
            x = x[: 600 * p]
            strided = up(x.view(100, -1)).t()
            call("reduce", [strided], reduceOp=op, rootRank=p - 1)
            if r == p - 1:  # of others it is not defined
                yield down(strided)
            parts = [up(x[k : 2 * k + 3]) for k in range(p)]
            total = self.empty(r + 3, dtype=dtype)
            call("reduce_scatter", [total], [parts], reduceOp=op)
            yield down(total)
            total = self.empty(20, 30, dtype=dtype).t()
            call("reduce_scatter_single", total, up(x), reduceOp=op)
            yield down(total)
            own = up(x)
            totals = [own[:600], self.empty(6, dtype=dtype)]
            call("reduce_scatter_single_coalesced", totals, [own, up(x[: 6 * p])], reduceOp=op)
            yield from map(down, totals)
        flags = up(torch.rand(4 * N, generator=generator) < 0.3)
        call("allreduce", [flags], reduceOp=PRODUCT)
        yield down(flags)

    def exchanged(self) -> Iterator[Tensor]:
        """What messages bring."""
        p, r = self.size, self.rank
        for n in (5, 300):
            x, y = self.upload(torch.full((n, 40), float(r))), self.empty(n, 40)
            before = y + 1
            works = [self.group.recv([y], (r - 1) % p, 3), self.group.send([x], (r + 1) % p, 3)]
            strided, there = self.upload(torch.full((n, 40), 2.0 + r)).t(), self.empty(40, n).t()
            works += [self.group.recv_anysource([there], 4), self.group.send([strided.t()], (r + 1) % p, 4)]
            for work in works:
                work.wait()
            yield from map(self.download, (y, there, before))

    def results(self) -> list[Tensor]:
        moved = (x for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool) for x in self.moved(dtype))
        return [*moved, *self.reduced(), *self.exchanged()]


def work_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True
    return options


def equal(expected: list[Tensor], got: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


def assert_the_hosts_results(comm: MPI.Intracomm, *, aware: bool) -> None:
    """In every operation, with every wait, and without any that are not needed."""
    for asynchronous in (False, True):
        with world():
            expected = Caller(None, asynchronous=asynchronous).results()
        cuda = LateCUDA(aware=aware)
        with world(), cuda.installed():
            got = Caller(cuda, asynchronous=asynchronous).results()
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(one, other), (number, one, other)
        assert (cuda.pinned == 0) == aware
        (after,) = cuda.sites - waits(gpu, "synchronize") - waits(operations, "synchronize")
        assert after in waits(streams, "wait_event")  # what the current stream waits for
    for site in sorted(cuda.sites):
        late = LateCUDA(site, aware=aware)
        with world(), late.installed():
            got = Caller(late, asynchronous=True).results()
        assert not all(comm.allgather(equal(expected, got))), f"nothing shows that the wait in {site} is needed"


def check_every_operation_gives_mpi_the_memory(comm: MPI.Intracomm) -> None:
    assert_the_hosts_results(comm, aware=True)


def check_every_operation_by_way_of_pinned_memory(comm: MPI.Intracomm) -> None:
    assert_the_hosts_results(comm, aware=False)


def check_memory_is_the_tensors_own(comm: MPI.Intracomm) -> None:
    """And a rank whose MPI takes it works with one whose MPI does not, or whose tensors are on the host."""
    p, r = comm.size, comm.rank
    addresses: list[int] = []
    original = operations._from_address

    def seen(address: int, nbytes: int) -> Any:
        addresses.append(address)
        return original(address, nbytes)

    cuda = LateCUDA(aware=r % 2 == 0)
    with world(), cuda.installed(), mock.patch.object(operations, "_from_address", seen):
        there = Caller(cuda if r != 3 else None)
        x, y = there.upload(torch.full((N,), 1.0 + r)), there.empty(p, 50)
        there.call("allreduce", [x], reduceOp=SUM)
        there.call("all_gather_single", y, there.upload(torch.full((50,), float(r))))
        assert (there.download(x) == p * (p + 1) / 2).all()
        assert (there.download(y) == torch.arange(p)[:, None]).all()
        own = {x.data_ptr(), y.data_ptr()} <= set(addresses)
        assert own == (r % 2 == 0 or r == 3) and cuda.pinned == (3 if r % 2 and r != 3 else 0)


def check_what_goes_through_pinned_memory(comm: MPI.Intracomm) -> None:
    """What the host's code adds up, or takes along while the ranks agree, though MPI takes a GPU's memory."""
    p, r = comm.size, comm.rank
    cuda = LateCUDA(aware=True)
    with world(), cuda.installed():
        there = Caller(cuda)
        large = STREAMED_NBYTES // 4
        product = dist._make_nccl_premul_sum(2.0)
        for n, dtype, op in (
            (5, torch.float32, SUM),
            (N, torch.bfloat16, SUM),
            (N, torch.float16, AVG),
            (N, torch.float32, product),
            *([(large, torch.float32, SUM)] if p > 1 and there.group.channel.one_node else []),
        ):
            before = cuda.pinned
            x = there.upload(torch.full((n,), 1 + r, dtype=dtype))
            there.call("allreduce", [x], reduceOp=op)
            assert cuda.pinned == before + (p > 1 or n > 5), (n, dtype)
            total = torch.full((n,), p * (p + 1) / 2 * (2 if op is product else 1) / (p if op is AVG else 1))
            assert torch.equal(there.download(x).float(), total), (n, dtype)
    with world(Options(codec="cast", dtype="bfloat16", min_bytes=1000)), cuda.installed():
        there, before = Caller(cuda), cuda.pinned
        tensors = [there.upload(torch.full((N,), 1.0 + r)) for _ in range(2)]
        there.call("allreduce_coalesced", tensors, reduceOp=SUM)
        assert all((there.download(x) == p * (p + 1) / 2).all() for x in tensors)
        assert cuda.pinned == before + (p > 1)


def check_errors_of_memory_that_mpi_takes(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank

    def fail(*_: Any) -> None:
        raise MPI.Exception(MPI.ERR_TRUNCATE)

    def crash() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda = LateCUDA(aware=True)
    with world(), cuda.installed():
        there = Caller(cuda, asynchronous=True)
        x = there.upload(torch.arange(12.0).view(3, 4))
        mixed = raised(lambda: there.call("all_to_all_single", torch.zeros(3, 4), x, [], []))
        assert isinstance(mixed, UnsupportedDevice) and "cuda" in str(mixed)
        # A kernel of the caller's that fails: told before the ranks agree, so that none is in MPI.
        place = cuda.current_stream()
        place.add(crash)
        error = raised(lambda: there.call("broadcast", [x.t()], rootRank=0))
        assert "illegal memory access" in str(error)
        there.call("broadcast", [x.t()], rootRank=0)
        with mock.patch.object(there.group._collectives, "comm", SimpleNamespace(Bcast=fail)):
            error = raised(lambda: there.call("broadcast", [x.t()], rootRank=0))
        assert isinstance(error, CommunicatorBroken) and "broadcast" in str(error)
        assert torch.equal(there.download(x), torch.arange(12.0).view(3, 4))
    if p == 1:
        return
    comm.Barrier()  # the making of the group has the same time-out
    with world(seconds=1.0), cuda.installed():
        there = Caller(cuda, asynchronous=True)
        x = there.upload(torch.full((N,), 1.0 + r))
        if r == 0:
            started = time.monotonic()
            error = raised(lambda: there.call("allreduce", [x], reduceOp=SUM))
            assert isinstance(error, PeerTimeout) and time.monotonic() - started < 10
            assert (there.download(x) == 1).all()
        comm.Barrier()
