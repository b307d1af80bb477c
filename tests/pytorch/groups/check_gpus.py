"""Tensors on GPUs whose messages go by PyTorch's NCCL, on the stand-ins for both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from check_collectives import standing
from fakes import late_group
from fakes.late_cuda import LateCUDA, OnGPU, Stream, waits
from fakes.late_group import LateNCCLGroup
from fakes.loopback import World, exact_sum, normals
from promises import FIXED, one_of_each

import compcoll.torch
from compcoll.errors import CollectiveFailed, PeerTimeout
from compcoll.gpu.watchdog import NCCLBase
from compcoll.torch.groups import nccl
from compcoll.torch.groups.membership import Member, member_of

N = 3 * 4 * 700
MINMAX: dict[str, Any] = {"codec": "minmax", "block": 64, "algorithm": "direct"}


@contextlib.contextmanager
def gpus(
    *, without: Any = None, early: bool = False, watched: bool = False, seconds: float = 60
) -> Iterator[tuple[LateCUDA, dist.ProcessGroup, list[LateNCCLGroup]]]:
    """A group of its own; no thread looks at what is under way, and so has it done, unless it is ``watched``."""
    cuda = LateCUDA(without, early=early)
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    with late_group.installed(cuda) as made, contextlib.ExitStack() as stack:
        if not watched:
            stack.enter_context(mock.patch.object(NCCLBase, "watch"))
        yield cuda, group, made
        dist.barrier()
    dist.destroy_process_group(group)


def uploaded(cuda: LateCUDA, values: np.ndarray) -> OnGPU:
    return cuda.upload(torch.from_numpy(values.copy()))


def downloaded(cuda: LateCUDA, tensor: OnGPU) -> np.ndarray:
    """When all ranks have launched what they launch."""
    dist.barrier()
    return cuda.download(tensor).numpy()


def check_sums_have_the_bits_of_the_host() -> None:
    """By `direct`: two exchanges of bytes, at the end of which the host has waited for nothing."""
    rank, size = standing()
    inputs, world, on_host = normals(size, N), World(size), dist.new_group()
    with gpus(early=rank == 1) as (cuda, group, made):
        for number, codec in enumerate(one_of_each(FIXED)):  # random numbers go by the number of the call
            op = ("sum", "mean")[number % 2]
            expected = world.allreduce(inputs, codec=codec, algorithm="direct", op=op)[rank]
            tensor, there = torch.from_numpy(inputs[rank].copy()), uploaded(cuda, inputs[rank])
            for each, ranks in ((tensor, on_host), (there, group)):
                compcoll.torch.all_reduce(each, {"mean": "avg"}.get(op, op), ranks, codec=codec, algorithm="direct")
            np.testing.assert_array_equal(tensor.numpy(), expected)
            np.testing.assert_array_equal(downloaded(cuda, there), expected)
            stats = compcoll.torch.stats(group)
            assert stats is not None
            assert (stats.gpu_transport, stats.algorithm, stats.codec) == ("NCCL", "direct", repr(codec))
        (nccls,) = made
        exchange = ("alltoall", size - 1, size - 1)
        assert nccls.calls == [("connect", torch.device("cuda", 0)), *[exchange] * (2 * len(one_of_each(FIXED)))]
    dist.destroy_process_group(on_host)


def check_the_host_waits_for_nothing() -> None:
    """Until somebody looks at a result nothing is done; and whichever stream waits comes after the sum."""
    rank, size = standing()
    batches = [normals(size, N, seed=seed) for seed in range(2)]
    expected = [World(size).allreduce(batch, **MINMAX)[rank] for batch in batches]
    with gpus() as (cuda, group, made):
        blocking, asynchronous = (uploaded(cuda, batch[rank]) for batch in batches)
        compcoll.torch.all_reduce(blocking, "sum", group, **MINMAX)
        work = compcoll.torch.all_reduce(asynchronous, "sum", group, async_op=True, **MINMAX)
        other = Stream(cuda)
        with cuda.stream(other):
            work.wait()
            dist.barrier()
            assert made[0].done == 0 and len(made[0].calls) == 5
            np.testing.assert_array_equal(downloaded(cuda, asynchronous), expected[1])
        np.testing.assert_array_equal(downloaded(cuda, blocking), expected[0])


def check_no_wait_can_be_left_out() -> None:
    rank, size = standing()
    inputs = normals(size, N)
    expected = World(size).allreduce(inputs, **MINMAX)[rank]
    sites = waits(nccl, "synchronize")
    assert sites
    for without in (None, *sorted(sites)):
        with gpus(without=without) as (cuda, group, _):
            tensor = uploaded(cuda, inputs[rank])
            compcoll.torch.all_reduce(tensor, "sum", group, **MINMAX)
            same = [torch.zeros(1) for _ in range(size)]
            right = np.array_equal(downloaded(cuda, tensor), expected)
            assert cuda.sites >= sites
        dist.all_gather(same, torch.tensor([float(right)]))
        assert all(map(bool, same)) == (without is None), without


def check_parts_are_summed_and_gathered_in_one_exchange() -> None:
    rank, size = standing()
    inputs = [values.reshape(size, -1) for values in normals(size, N)]
    with gpus() as (cuda, group, made):
        for function, given, out in (
            (compcoll.torch.reduce_scatter_tensor, inputs[rank], np.empty_like(inputs[0][:1])),
            (compcoll.torch.all_gather_into_tensor, inputs[rank][:1], np.empty_like(inputs[0])),
        ):
            results = []
            for upload in (lambda values: torch.from_numpy(values.copy()), lambda values: uploaded(cuda, values)):
                result = upload(out)
                function(result, upload(given), group=group, codec="zfp", rate=8, algorithm="direct")
                results.append(result)
            np.testing.assert_array_equal(downloaded(cuda, results[1]), results[0].numpy())
        assert [call[0] for call in made[0].calls] == ["connect", "alltoall", "alltoall"]


def check_auto_goes_by_what_carries() -> None:
    """It looks for NCCL first, and then has the group's own, which for 4 MiB takes less time than compression."""
    rank, size = standing()
    inputs = normals(size, 1 << 20)
    with gpus() as (cuda, group, made), mock.patch.object(Member, "all_reduce") as by_group:
        for times in (0, 1, 2):
            tensor = uploaded(cuda, inputs[rank])
            compcoll.torch.all_reduce(tensor, "avg", group, codec="zfp", rate=8)
            assert by_group.call_count == times
            member = member_of(group, tensor.device)
            assert len(member.decided) == min(times, 1) and member.gpu_transport_known
            if not times:
                assert made[0].calls[1:] == [("allreduce", torch.float32, True)]
                assert compcoll.torch.stats(group).algorithm == "native"
                mean = exact_sum(inputs) / size
                np.testing.assert_allclose(downloaded(cuda, tensor), mean, rtol=0, atol=1e-5)


def check_what_nccl_reports_is_an_error_of_ours() -> None:
    """In time, with NCCL's communicator aborted: at the next call, and from then on."""
    rank, size = standing()
    inputs = normals(size, N)
    for way, error, said in (
        ("remote process exited", CollectiveFailed, "allreduce by direct by NCCL: RuntimeError: remote process exited"),
        ("unspeakable", PeerTimeout, "has not ended within 2 s"),
        ("stuck", PeerTimeout, "has not ended within 2 s"),
    ):
        with gpus(watched=True, seconds=2) as (cuda, group, made):
            compcoll.torch.all_reduce(uploaded(cuda, inputs[rank]), "sum", group, **MINMAX)
            deadline = time.monotonic() + 60
            while made[0].done < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            dist.barrier()
            made[0].stuck, made[0].error = True, "" if way == "stuck" else way
            compcoll.torch.all_reduce(uploaded(cuda, inputs[rank]), "sum", group, **MINMAX)
            while ("abort",) not in made[0].calls and time.monotonic() < deadline:
                time.sleep(0.01)
            dist.barrier()
            with pytest.raises(error, match=said):
                compcoll.torch.all_reduce(uploaded(cuda, inputs[rank]), "sum", group, **MINMAX)
            member_of(group, torch.device("cuda", 0)).communicator.free()
            assert ("shutdown",) not in made[0].calls


def check_it_is_left_together() -> None:
    rank, size = standing()
    with gpus(watched=True) as (cuda, group, made):
        tensor = uploaded(cuda, normals(size, N)[rank])
        compcoll.torch.all_reduce(tensor, "sum", group, **MINMAX)
        downloaded(cuda, tensor)
        member_of(group, tensor.device).communicator.free()
        assert made[0].calls[-1] == ("shutdown",)
