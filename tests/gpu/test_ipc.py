"""Collectives whose ranks' GPUs read each other's memory, as the deferred device has it."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest
from fakes.deferred import AwareTransport, DeferredWorld, DeviceArray
from fakes.deferred_checks import check_losses_are_fed_back, check_many_under_way
from fakes.late_ipc import SharingWorld
from fakes.loopback import World, exact_sum, normals
from promises import FIXED, FLAT, one_of_each

from compcoll.errors import UnsupportedDevice
from compcoll.execute.gpu import DeviceCollectives
from compcoll.gpu import ipc_transport as ipc
from compcoll.gpu.ipc_transport import Links
from compcoll.plan import choose

N = 9 * 280
OPTIONS: dict[str, Any] = {"codec": "minmax", "block": 64, "algorithm": "direct"}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_SEGMENT", "1024")


WAYS: list[tuple[str, dict[str, Any]]] = [
    *(("iallreduce", {"algorithm": name, "op": "mean"}) for name in choose.ALLREDUCE),
    *(("ireduce_scatter", {"algorithm": name}) for name in choose.REDUCE_SCATTER),
    *(("iallgather", {"algorithm": name}) for name in choose.ALLGATHER),
]


@pytest.mark.parametrize(("method", "options"), WAYS, ids=lambda way: way if isinstance(way, str) else way["algorithm"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_same_bits_as_on_the_host(size: int, method: str, options: dict[str, Any]) -> None:
    """And as by pinned memory; again and again in the same memory."""
    host, staged, world = World(size), DeferredWorld(size, direct=False), SharingWorld(size)
    for seed, codec in enumerate([*one_of_each(FIXED), None] if size < 4 else one_of_each(FIXED)[:4]):
        inputs = normals(size, N // size * size, seed=seed)
        start = lambda comm, x, codec=codec: getattr(comm, method)(x, codec=codec, **options)  # noqa: E731
        expected = host.run(start, inputs)
        got = world.download(world.run(start, world.upload(inputs)))
        np.testing.assert_array_equal(got, expected, err_msg=str(codec))
        np.testing.assert_array_equal(staged.download(staged.run(start, staged.upload(inputs))), expected)
        may_go = codec is not None or method == "iallreduce" or options["algorithm"] == "direct"
        assert world.carriers == ({"late IPC"} if may_go else {""})
    assert not world.ipc.freed_too_early


def test_nothing_waits_on_the_host() -> None:
    """Every rank puts all its work on streams before any of it is done."""
    world = SharingWorld(3, early=False)
    inputs = normals(3, N)
    world.sum_of(inputs, **OPTIONS)
    arrays = world.upload(inputs)
    done = [device.current.done for device in world.devices if device is not None]
    requests = [comm.iallreduce(x, **OPTIONS) for comm, x in zip(world.comms, arrays)]
    while sum(request.test() for request in requests) < 3:
        pass
    assert [device.current.done for device in world.devices if device is not None] == done
    expected = World(3).allreduce(inputs, **OPTIONS)
    np.testing.assert_array_equal(world.download([request.wait() for request in requests]), expected)


@pytest.mark.parametrize("events", [1, 2, 32])
def test_many_under_way(events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which ranks advance, and though the same few events are recorded again and again."""
    monkeypatch.setattr(ipc, "_EVENTS", events)
    monkeypatch.setattr(ipc, "_ENDS", min(events, 2))
    ways: list[dict[str, Any]] = [OPTIONS, {"codec": "zfp", "rate": 8, "algorithm": "ring"}, {**OPTIONS, "op": "mean"}]
    for seed in range(5):
        host, world = World(3), SharingWorld(3, seed=seed)
        check_many_under_way(host, world, N, ways)


def test_a_wire_for_several_ranks_has_one_event() -> None:
    world = SharingWorld(4)
    world.sum_of(normals(4, N), **OPTIONS)
    links, asked = world.comms[0]._gpu._gpu_group.links, []  # type: ignore[union-attr]
    assert links is not None
    links.leaving = (asked.append(1) or event for event in links.leaving)  # type: ignore[assignment]
    world.sum_of(normals(4, 256), **OPTIONS)
    assert len(asked) == 3 + 1  # the other ranks' chunks, and the sum of its own


def test_losses_are_fed_back() -> None:
    host, world = World(3), SharingWorld(3)
    check_losses_are_fed_back(host, world, N, codec="minmax", bits=4, algorithm="ring")
    assert world.carriers == {"late IPC"}


@pytest.mark.parametrize("algorithm", FLAT)
def test_results_in_place(algorithm: str) -> None:
    """Again and again in the same arrays, of halves."""
    host, world = World(3), SharingWorld(3)
    inputs = normals(3, N, np.float16, scale=1e-2)
    arrays = world.upload(inputs)
    for _ in range(4):
        start = lambda comm, x: comm.iallreduce(x, out=x, codec="zfp", rate=8, algorithm=algorithm)  # noqa: E731
        inputs = host.run(start, [x.copy() for x in inputs])
        arrays = world.run(start, arrays)
    np.testing.assert_array_equal(world.download(arrays), inputs)
    assert world.carriers == {"late IPC"}


def test_arrays_here_and_there_go_by_pinned_memory() -> None:
    host, mixed = World(3), SharingWorld(3, on_host=(1,))
    inputs = normals(3, N)
    np.testing.assert_array_equal(mixed.sum_of(inputs, **OPTIONS), host.allreduce(inputs, **OPTIONS))
    assert not mixed.ipc.memory and mixed.carriers == {""}


def test_ranks_of_several_nodes_and_checksums_go_by_pinned_memory() -> None:
    inputs = normals(4, N)
    for settings in ({"ranks_per_node": 2}, {"checksum": True}):
        host, world = World(4, **settings), SharingWorld(4, **settings)
        np.testing.assert_array_equal(world.sum_of(inputs, **OPTIONS), host.allreduce(inputs, **OPTIONS))
        assert not world.ipc.memory and world.carriers == {""}


# What is chosen.


def test_what_is_explained_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wires need not be copied to the host: so our own algorithms gain, and may send values as they are."""
    monkeypatch.delenv("COMPCOLL_SEGMENT")
    linked, staged = SharingWorld(4, mpi=True), DeferredWorld(4, direct=False, mpi=True)
    large = DeviceArray(np.empty(1 << 24, np.float32))
    for world in (linked, staged):
        world.download(world.allreduce(world.upload(normals(4, N)), **OPTIONS))
    for codec in (None, "zfp"):
        plan, other = (world.comms[0].explain(large, codec=codec) for world in (linked, staged))
        chosen = [
            min(option.seconds for option in choose.options(each.call, each.setting) if option.algorithm == "direct")
            for each in (plan, other)
        ]
        assert chosen[0] < chosen[1] and "read each other's memory" in str(plan) and "read each other" not in str(other)
        assert plan.algorithm not in choose.ON_THE_HOST and (plan.codec is None) == (codec is None)
    assert staged.comms[0].explain(large).algorithm in choose.ON_THE_HOST
    inputs = normals(4, 1 << 16)
    for asked in ({}, {"codec": "zfp", "rate": 8}, {"codec": "auto", "tolerance": 1e-2}):
        plan = linked.comms[0].explain(DeviceArray(inputs[0]), **asked)
        got = linked.sum_of(inputs, **asked)
        stats = linked.comms[0].stats
        assert stats is not None and (stats.algorithm, stats.codec) == (plan.algorithm, plan.codec_text)
        assert np.abs(got[0] - exact_sum(inputs)).max() < 0.1


def test_nccl_comes_first() -> None:
    from fakes.late_nccl import LateJoining, LateNCCL

    nccl = LateNCCL(2)
    world = SharingWorld(2, bootstrap=[LateJoining(nccl, rank) for rank in range(2)].__getitem__)
    world.loopback.run = partial(world.loopback.run, patience=60_000)  # type: ignore[method-assign]
    world.sum_of(normals(2, N), **OPTIONS)
    assert world.carriers == {"late NCCL"} and not world.ipc.memory


# Ranks that cannot.


@pytest.mark.parametrize("reason", ["nothing", "aware", "refused", "other bytes", "hangs", "fails"])
def test_ranks_that_cannot_share_go_by_pinned_memory(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, and they know why."""
    host, world = World(3), SharingWorld(3)
    way, device, gpu = world.ways[2], world.devices[2], world.comms[2]._gpu
    assert device is not None and gpu is not None
    last: list[Links | None] = [None]
    said = {
        "nothing": "rank 2: the deferred device shares nothing",
        "aware": "rank 2: MPI takes the GPU's memory itself",
        "refused": "rank 2: peer access is not supported",
        "other bytes": "rank 2: this rank reads other bytes from the GPU memory of rank 0 than that rank wrote",
        "hangs": "rank 2: the GPU has not read others' memory within 0.05 s",
        "fails": "rank 2: an illegal memory access was encountered",
    }[reason]

    class Never:
        def Test(self) -> bool:
            if reason == "fails":
                raise RuntimeError("an illegal memory access was encountered")
            return False

    if reason == "nothing":
        device.shares = None
    elif reason == "aware":
        aware = AwareTransport(world.loopback, 2, 3, list(world.comms[2].nodes))
        world.comms[2]._gpu = DeviceCollectives(device, world.comms[2]._collectives, aware, direct=True)
    elif reason == "refused":
        way.refused = UnsupportedDevice("peer access is not supported")
    elif reason == "other bytes":
        monkeypatch.setattr(way, "open_memory", lambda handle, nbytes: DeviceArray(np.zeros(nbytes, np.uint8)))
    else:
        gpu._gpu_group._seconds = 0.05 if reason == "hangs" else 60.0
        accept, shares = Links.accept, gpu._links

        def shared() -> Links:
            last[0] = shares()
            return last[0]

        def accepted(links: Links, *given: Any) -> list[Any]:
            return [Never()] if links is last[0] else accept(links, *given)

        monkeypatch.setattr(gpu._gpu_group, "_shares", shared)
        monkeypatch.setattr(Links, "accept", accepted)
        world.loopback.run = partial(world.loopback.run, patience=10**7)  # type: ignore[method-assign]
    inputs = normals(3, N)
    for _ in range(2):
        np.testing.assert_array_equal(world.sum_of(inputs, **OPTIONS), host.allreduce(inputs, **OPTIONS))
    assert world.carriers == {""} and len(world.reasons) == 1 and world.reasons.pop().endswith(said)
    last[0] = way.refused = None
    gc.collect()
    assert not world.ipc.freed_too_early and not +world.ipc.opened and not world.ipc.memory
