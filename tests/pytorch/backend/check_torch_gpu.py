"""Tensors of a GPU in a process group, on a stand-in whose copies are made as late as its events allow."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fakes.late_cuda import LateCUDA, waits
from groups import world
from mpi4py import MPI

from compcoll.gpu import captures
from compcoll.torch import Options, streams
from compcoll.torch.backend import messages, reductions


def check_messages_use_thread_local_capture_mode(comm: MPI.Intracomm) -> None:
    """Their thread changes its mode of captures once, before it looks at any."""
    calls: list[tuple[threading.Thread, object]] = []

    class Ended:
        done = False

        def test(self) -> bool:
            calls.append((threading.current_thread(), "test"))
            self.done = True
            return True

    def exchange(mode: Any) -> int:
        calls.append((threading.current_thread(), mode._obj.value))
        return 0

    progress, deadline = messages._Progress(), time.monotonic() + 60
    with (
        mock.patch.object(captures, "_exchange", return_value=exchange),
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
    ):
        for number in (1, 2):
            progress.add(Ended())  # type: ignore[arg-type]
            while [what for _, what in calls].count("test") < number and time.monotonic() < deadline:
                time.sleep(0.001)
        progress._background.close(60)
    assert [what for thread, what in calls if thread is progress._background._thread] == [1, "test", "test"]


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


def check_sums_that_the_host_compresses_for_a_gpu(comm: MPI.Intracomm) -> None:
    """Where codecs cannot run on the GPU, copies in pinned memory are compressed: the same bits."""
    options = Options(codec="minmax", bits=4, min_bytes=100_000, algorithm="ring")
    with world(options):
        expected = compressed_sums(None, comm.rank)
    cuda = LateCUDA()
    with world(options), cuda.installed(), mock.patch.object(reductions, "gpu_can_encode", return_value=False):
        got = compressed_sums(cuda, comm.rank)
        assert dist.group.WORLD.stats.codec is not None and dist.group.WORLD.stats.device == "host"
    assert cuda.pinned and all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
