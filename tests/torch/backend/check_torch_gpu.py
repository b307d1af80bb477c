"""Tensors of a GPU in a process group, on a stand-in whose copies are made as late as its events allow."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fakes import deferred
from fakes.late_cuda import LateCUDA, waits
from groups import FLOATS, INTEGERS, same, stacked, values, world
from mpi.world import raised
from mpi4py import MPI

from compcoll.devices import captures
from compcoll.errors import UnsupportedDevice
from compcoll.torch import Options, streams
from compcoll.torch.backend import messages, process_group

LOCK = threading.RLock()


class OnGPU(torch.Tensor):
    """Says that it is a GPU's."""

    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))


class Event(deferred.Event):
    def synchronize(self) -> None:
        with LOCK:
            self.stream.run_up_to(self.place)


class LateCopies:
    """The contract is `compcoll.torch.backend.gpu_copies.StagingStreams`."""

    devices: tuple[torch.device, ...] = ()

    def __init__(self) -> None:
        self.caller, self.outward, self.inward = (deferred.Stream() for _ in range(3))

    @staticmethod
    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        return plain(tensor).clone().zero_()

    def now(self) -> Event:
        return Event(self.caller)

    def fetch(self, pairs: Any, before: Event) -> Event:
        return self._copied(self.outward, [(here, there) for there, here in pairs], before)

    def store(self, pairs: Any, before: Event) -> Event:
        return self._copied(self.inward, pairs, before)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def order(self, event: Event) -> None:
        with LOCK:
            self.caller.add(event)

    @staticmethod
    def _copied(stream: deferred.Stream, pairs: Any, before: Event) -> Event:
        with LOCK:
            stream.add(before)
            for target, source in pairs:
                stream.add(lambda target=target, source=source: plain(target).copy_(plain(source)))
            return Event(stream)

    # The caller's side.

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        there = torch.zeros_like(tensor).as_subclass(OnGPU)
        with LOCK:
            self.caller.add(lambda: plain(there).copy_(tensor))
        return there

    def download(self, there: torch.Tensor) -> torch.Tensor:
        with LOCK:
            self.caller.run_up_to(self.caller.added)
        return plain(there).clone()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


@contextlib.contextmanager
def gpu() -> Iterator[LateCopies]:
    late = LateCopies()
    with (
        mock.patch.object(process_group, "staging_streams", return_value=late),
        mock.patch.object(messages, "staging_streams", return_value=late),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        yield late


def check_collectives_of_a_gpu(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world(), gpu() as there:
        for dtype in [*FLOATS, *INTEGERS, torch.bool]:  # of others PyTorch sends views, which the stand-in has not
            every = stacked(comm, dtype)
            x = there.upload(values(r, dtype))
            dist.broadcast(x, src=p - 1)
            assert isinstance(x, OnGPU) and same(there.download(x), every[-1]), dtype

            parts = [there.upload(torch.zeros(7, dtype=dtype)) for _ in range(p)]
            dist.all_gather(parts, there.upload(values(r, dtype)))
            assert all(same(there.download(part), every[k]) for k, part in enumerate(parts)), dtype

            root = [there.upload(torch.zeros(7, dtype=dtype)) for _ in range(p)] if r == 1 % p else None
            dist.gather(there.upload(values(r, dtype)), root, dst=1 % p)
            assert root is None or all(same(there.download(part), every[k]) for k, part in enumerate(root)), dtype

            given = there.upload(values(r, dtype).repeat(p).view(p, 7))
            out = there.upload(torch.zeros((p, 7), dtype=dtype))
            dist.all_to_all_single(out, given)
            assert same(there.download(out), every), dtype
        x = torch.arange(p * 3.0) + r
        share = there.upload(torch.zeros(3))
        dist.reduce_scatter_single(share, there.upload(x))
        torch.testing.assert_close(there.download(share), (p * torch.arange(p * 3.0) + sum(range(p))).view(p, 3)[r])


def check_sums_of_a_gpu(comm: MPI.Intracomm) -> None:
    """Ordered after the copies: who waits, the caller of a blocking operation, and what a future calls."""
    p, r = comm.size, comm.rank
    with world(Options(codec="cast", dtype="bfloat16", min_bytes=40_000)), gpu() as there:
        for n in (1, 1000, 50_000):
            total = torch.full((n,), float(p + sum(range(p))))
            x = there.upload(torch.full((n,), 1.0 + r))
            dist.all_reduce(x)
            assert torch.equal(there.download(x), total), n
            works = []
            for _ in range(3):
                x = there.upload(torch.full((n,), 1.0 + r))
                works.append((dist.all_reduce(x, async_op=True), x))
            for work, x in works:
                work.wait()
                assert torch.equal(there.download(x), total), n
            x = there.upload(torch.full((n,), 1.0 + r))
            (got,) = dist.all_reduce(x, async_op=True).get_future().wait()
            assert got is x and torch.equal(there.download(x), total), n
        rows = there.upload(torch.ones(3, 4).mul(r + 1).t().contiguous())
        dist.all_reduce(rows.t())
        assert (there.download(rows) == sum(range(p + 1))).all()
        mixed = raised(lambda: dist.all_gather([torch.ones(2)] * p, there.upload(torch.ones(2))))
        assert isinstance(mixed, UnsupportedDevice) and "cuda" in str(mixed)


def check_messages_of_a_gpu(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world(), gpu() as there:
        x, y = there.upload(torch.full((5,), float(r))), there.upload(torch.zeros(5))
        works = [dist.isend(x, (r + 1) % p), dist.irecv(y, (r - 1) % p)]
        for work in works:
            work.wait()
        assert (there.download(y) == (r - 1) % p).all()


def check_messages_use_thread_local_capture_mode(comm: MPI.Intracomm) -> None:
    """Their thread changes its mode of captures once, before it looks at any."""
    calls: list[object] = []

    class Ended:
        done = False

        def test(self) -> bool:
            calls.append("test")
            self.done = True
            return True

    with (
        mock.patch.object(captures, "_exchange", return_value=lambda mode: calls.append(mode._obj.value) or 0),
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
    ):
        progress, deadline = messages._Progress(), time.monotonic() + 60
        for number in (1, 2):
            progress.add(Ended())  # type: ignore[arg-type]
            while len(calls) <= number and time.monotonic() < deadline:
                time.sleep(0.001)
    assert calls == [1, "test", "test"]


def all_reduce(x: torch.Tensor, op: Any, *, async_op: bool = False) -> Any:
    """As `dist.all_reduce`, which would keep the stand-in's tensors from being asked themselves."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, async_op
    return dist.group.WORLD.allreduce([x], options)


def compressed_sums(cuda: LateCUDA | None, rank: int) -> list[torch.Tensor]:
    """In every way to wait, of tensors on the host or on a GPU."""
    upload = torch.clone if cuda is None else cuda.upload
    download = torch.clone if cuda is None else cuda.download
    x = torch.randn(60_000, generator=torch.Generator().manual_seed(rank))
    sums = []
    for op, dtype in ((dist.ReduceOp.SUM, torch.float32), (dist.ReduceOp.AVG, torch.bfloat16)):
        blocking, strided = upload(x.to(dtype)), upload(x.to(dtype).view(300, 200))
        all_reduce(blocking, op)
        all_reduce(strided.t(), op)
        pairs = [(there, all_reduce(there, op, async_op=True)) for there in (upload(x.to(dtype)), upload(-x))]
        for _, work in pairs:
            work.wait()
        sums += [download(there) for there in (blocking, strided, *(there for there, _ in pairs))]
        (got,) = all_reduce(upload(2 * x), op, async_op=True).get_future().wait()
        sums.append(download(got))
        part = upload(torch.zeros(60_000 // dist.get_world_size(), dtype=dtype))
        options = dist.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, True
        dist.group.WORLD.reduce_scatter_single(part, upload(x.to(dtype)), options).wait()
        sums.append(download(part))
    return sums


def check_sums_that_a_gpu_compresses(comm: MPI.Intracomm) -> None:
    """The bits of tensors on the host, and no wait too few."""
    options = Options(codec="minmax", bits=4, min_bytes=100_000, algorithm="ring")
    with world(options):
        expected = compressed_sums(None, comm.rank)
        assert dist.group.WORLD.stats.codec is not None and dist.group.WORLD.stats.collective == "reduce_scatter"
    sites = waits(streams, "wait_event")
    for without in (None, *sorted(sites)):
        cuda = LateCUDA(without, early=without is None and comm.rank % 2 == 1)
        with world(options), cuda.installed():
            got = compressed_sums(cuda, comm.rank)
            assert dist.group.WORLD.stats.device == "deferred"
        same = all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
        assert cuda.sites == sites and all(comm.allgather(same)) == (without is None), without
