"""A rank that is silent: whatever the others wait in, they raise `PeerTimeout`, and it names that rank alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll import Communicator
from compcoll.errors import CollectiveFailed, PeerFailed, PeerTimeout
from compcoll.plan.choose import AUTO, NAMES, SPARSE
from compcoll.torch import failure_detector
from compcoll.torch.failure_detector import Board
from compcoll.torch.groups import transport
from compcoll.transports.base import Wire

LIMIT = timedelta(seconds=4)
SILENT = 1


def only_the_silent_rank_is_named(calls: dict[str, Callable[[], Any]]) -> None:
    """All but one rank make all calls at once, each in a group of its own; they end together."""
    if dist.get_rank() != SILENT:
        works = {name: call() for name, call in calls.items()}
        for name, work in works.items():
            with pytest.raises(PeerTimeout) as raised:
                work.wait()
            assert raised.value.missing == (SILENT,), f"{name}: {raised.value}"
    dist.barrier()


def groups_of(backend: str, names: list[str]) -> dict[str, dist.ProcessGroup]:
    return {name: dist.new_group(backend=backend, timeout=LIMIT) for name in names}


def check_silent_in_every_algorithm() -> None:
    rank = dist.get_rank()
    for hosts in ("shared", "apart"):
        known = transport.host_name
        if hosts == "apart":
            transport.host_name = lambda: f"host {rank}"
        groups = groups_of("gloo", [AUTO, *NAMES["allreduce"]])

        def call(name: str, groups: dict[str, dist.ProcessGroup] = groups) -> Any:
            coding = {"codec": "topk", "density": 0.1} if name in SPARSE else {"codec": "zfp", "rate": 8}
            return compcoll.torch.all_reduce(
                torch.ones(1000), group=groups[name], async_op=True, algorithm=name, **coding
            )

        for name in list(groups):
            try:
                call(name).wait()
            except (compcoll.errors.InvalidArgument, compcoll.errors.CollectiveMismatch):
                del groups[name]  # such as one that only MPI has
        assert {AUTO, "ring", "direct", "sparse_ring"} <= set(groups)
        if hosts == "apart":
            stats = compcoll.torch.stats(groups["auto"])
            assert stats is not None and stats.algorithm == "native", stats  # the group's own
        only_the_silent_rank_is_named({name: (lambda name=name, call=call: call(name)) for name in groups})
        transport.host_name = known


def check_silent_in_the_backend() -> None:
    ranks = dist.get_world_size()
    one, all_ = torch.ones(30), [torch.ones(30) for _ in range(ranks)]
    whole = torch.ones(30 * ranks)
    calls: dict[str, Callable[[dist.ProcessGroup], Any]] = {
        "all_reduce": lambda g: dist.all_reduce(one.clone(), group=g, async_op=True),
        "broadcast": lambda g: dist.broadcast(one.clone(), SILENT, group=g, async_op=True),
        "all_gather": lambda g: dist.all_gather(all_, one, group=g, async_op=True),
        "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(whole.clone(), one, group=g, async_op=True),
        "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(one.clone(), whole, group=g, async_op=True),
        "all_to_all_single": lambda g: dist.all_to_all_single(whole.clone(), whole, group=g, async_op=True),
        "scatter": lambda g: dist.scatter(one.clone(), None, SILENT, group=g, async_op=True),
        "barrier": lambda g: dist.barrier(group=g, async_op=True),
        "recv": lambda g: dist.irecv(one.clone(), SILENT, group=g),
    }
    groups = groups_of("compcoll", list(calls))
    for group in groups.values():
        dist.all_reduce(torch.ones(1), group=group)
    future = groups_of("compcoll", ["future"])["future"]
    if dist.get_rank() != SILENT:
        beside = dist.all_reduce(torch.ones(1), group=future, async_op=True).get_future()
    only_the_silent_rank_is_named({name: (lambda name=name: calls[name](groups[name])) for name in calls})
    if dist.get_rank() != SILENT:
        with pytest.raises(RuntimeError, match=rf"PeerTimeout: .*rank {SILENT} did not answer"):
            beside.wait()


def _wrapped(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group)


def _dgc(model: nn.Module, group: dist.ProcessGroup) -> Any:
    wrapped = _wrapped(model, group)
    return wrapped, compcoll.torch.DGC(wrapped, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0.1)


def _compressed(wrapped: nn.Module) -> Any:
    return wrapped, compcoll.torch.compress(wrapped, "zfp", rate=8)


def _low_rank(kind: Any, wraps: bool) -> Callable[[nn.Module, dist.ProcessGroup], Any]:
    def make(model: nn.Module, group: dist.ProcessGroup) -> Any:
        if wraps:
            wrapped = _wrapped(model, group)
            return wrapped, kind(wrapped, 1)
        return model, kind(model, 1, process_group=group)

    return make


def check_all_ranks_hear_of_a_death_before_their_time_is_up() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2. Rank 2 loses all connections, as a killed process does."""
    rank, dead, group = dist.get_rank(), 2, dist.group.WORLD
    known = transport.host_name
    transport.host_name = lambda: f"host {rank}"
    waits, posts = (transport.GroupTransport(group, torch.device("cpu"), 300.0) for _ in range(2))
    communicator = Communicator(posts, timeout=300.0)
    transport.host_name = known
    communicator.allreduce(np.ones(1000, np.float32), codec="zfp", rate=8, algorithm="ring")
    dist.barrier()
    if rank == dead:
        failure_detector._disconnect(posts._gloo)
        time.sleep(1)
        failure_detector._disconnect(waits._gloo)
    else:
        started = time.monotonic()
        message = waits.irecv(Wire(np.empty(8, np.uint8)), rank + 1, 0)
        with pytest.raises(PeerFailed) as raised:
            message.Test()
        assert raised.value.failed == (dead,)
        with pytest.raises(PeerFailed) as raised:
            communicator.allreduce(np.ones(1000, np.float32), codec="zfp", rate=8, algorithm="ring")
        assert raised.value.failed == (dead,)
        assert time.monotonic() - started < 60
    dist.barrier()


def check_backward_raises_the_error_itself() -> None:
    methods: dict[str, Callable[[nn.Module, dist.ProcessGroup], Any]] = {
        "compress": lambda model, group: _compressed(_wrapped(model, group)),
        "compress of FSDP2": lambda model, group: _compressed(
            fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        ),
        "DGC": _dgc,
        **{
            f"{name}{' of DDP' * wraps}": _low_rank(getattr(compcoll.torch, name), wraps)
            for name in ("ACPSGD", "PowerSGD")
            for wraps in (False, True)
        },
    }
    x = torch.ones(2, 40)
    groups = groups_of("gloo", list(methods))
    made = {
        name: make(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), groups[name]) for name, make in methods.items()
    }
    for model, compression in made.values():
        for _ in range(2):
            model(x).sum().backward()
        assert compression.error is None
    dist.barrier()

    def fail(name: str) -> None:
        model, compression = made[name]
        with pytest.raises(PeerTimeout) as raised:
            model(x).sum().backward()
        assert raised.value is compression.error, name
        assert raised.value.missing == (SILENT,), f"{name}: {raised.value}"

    if dist.get_rank() != SILENT:
        with ThreadPoolExecutor(len(made)) as together:
            list(together.map(fail, made))
    dist.barrier()


def check_an_error_between_replicas_is_itself() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
    model, compression = _compressed(fully_shard(nn.Linear(40, 40), mesh=mesh))
    meant = PeerFailed("as intended", (SILENT,))

    def fail(*_: Any, **__: Any) -> None:
        raise meant

    compression.meshes[0].communicators["between"].allreduce = fail
    with pytest.raises(PeerFailed, match="as intended") as raised:
        model(torch.ones(2, 40)).sum().backward()
    assert raised.value is meant and compression.error is meant


def check_a_store_that_does_not_answer_names_nobody() -> None:
    board = Board(dist.HashStore(), 0, 2)
    board.look = lambda: None  # type: ignore[method-assign]  # as if the thread still waited for the store
    with pytest.raises(PeerTimeout, match="store does not answer") as late, board.waits("a message"):
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")
    assert late.value.missing == () and isinstance(late.value.__cause__, RuntimeError)
    with pytest.raises(CollectiveFailed, match="no such device") as other, board.waits("a message"):
        raise RuntimeError("no such device")
    assert isinstance(other.value.__cause__, RuntimeError)
