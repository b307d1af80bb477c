"""Collectives of arrays that are all on GPUs: by NCCL as the deferred device has it, and without."""

from __future__ import annotations

import inspect
import threading
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.deferred import DeferredWorld, DeviceArray, Site, Stream
from fakes.deferred_checks import check_losses_are_fed_back, check_many_under_way, downloaded, shows
from fakes.late_nccl import LateCarrier, LateJoining, LateNCCL
from fakes.loopback import World, exact_sum, normals
from promises import FIXED, one_of_each

from compcoll import ErrorFeedback, get_codec
from compcoll.errors import CollectiveFailed, CommunicatorBroken, InvalidArgument, PeerTimeout, UnsupportedDevice
from compcoll.gpu import streams
from compcoll.gpu.watchdog import NCCLBase
from compcoll.plan import choose
from compcoll.plan.plan import Plan

N = 9 * 280


class NCCLWorld(DeferredWorld):
    """Ranks whose GPUs NCCL joins."""

    def __init__(self, size: int, *, gpus: list[int] | None = None, **settings: Any) -> None:
        self.nccl = LateNCCL(size)
        self.ways = [LateJoining(self.nccl, rank, gpu=None if gpus is None else gpus[rank]) for rank in range(size)]
        super().__init__(size, direct=False, bootstrap=self.ways.__getitem__, **settings)
        # Threads join, which takes its time: a look at them lasts a millisecond.
        self.loopback.run = partial(self.loopback.run, patience=60_000)  # type: ignore[method-assign]

    @property
    def carriers(self) -> list[LateCarrier]:
        return [way.gpu_transport for way in self.ways if way.gpu_transport is not None]

    def sum_of(self, inputs: list[np.ndarray], **options: Any) -> list[np.ndarray]:
        return self.download(self.allreduce(self.upload(inputs), **options))

    @property
    def ran(self) -> set[tuple[str, str | None, str]]:
        return {(stats.algorithm, stats.codec, stats.gpu_transport) for comm in self.comms if (stats := comm.stats)}


COLLECTIVES: dict[str, dict[str, Any]] = {
    "iallreduce": {"op": "mean"},
    "ireduce_scatter": {},
    "iallgather": {},
}


@pytest.mark.parametrize("method", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_same_bits_as_on_the_host(method: str, size: int) -> None:
    """Of `direct`, whose messages go from GPU to GPU in two exchanges, or one."""
    host, world = World(size), NCCLWorld(size)
    for codec in [None, *one_of_each(FIXED)]:
        world.nccl.calls.clear()
        inputs = normals(size, N // size * size)
        start = lambda comm, x, codec=codec: getattr(comm, method)(  # noqa: E731
            x, codec=codec, algorithm="direct", **COLLECTIVES[method]
        )
        expected = host.run(start, inputs)
        np.testing.assert_array_equal(world.download(world.run(start, world.upload(inputs))), expected)
        assert len(world.nccl.calls) == size * (2 if method == "iallreduce" else 1), world.nccl.calls
        assert world.ran == {("direct", None if codec is None else repr(codec), "late NCCL")}
    assert sorted(world.nccl.joined) == list(range(size))  # once
    for comm, other in zip(world.comms, host.comms):
        assert comm.stats and other.stats and comm.stats.wire_nbytes == other.stats.wire_nbytes


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (6, 3), (6, 2)])
def test_hierarchical(size: int, per_node: int) -> None:
    """Uncompressed inside nodes, compressed between them: four exchanges, one result, as exact as the host's."""
    inputs = normals(size, N)
    for codec in (None, *one_of_each(FIXED)):
        world, host = NCCLWorld(size, ranks_per_node=per_node), World(size, ranks_per_node=per_node)
        options: dict[str, Any] = {"codec": codec, "algorithm": "hierarchical", "op": "mean"}
        got, expected = world.sum_of(inputs, **options), host.allreduce(inputs, **options)
        assert world.ran == {("hierarchical", None if codec is None else repr(codec), "late NCCL")}
        assert len(world.nccl.calls) == 4 * size or codec is not None  # of few blocks some ranks have none
        exact = exact_sum(inputs) / size
        errors = [np.linalg.norm(result - exact) for result in (got[0], expected[0])]
        assert errors[0] <= 1.5 * errors[1] + 1e-6 * np.linalg.norm(exact), codec
        for other in got[1:]:
            np.testing.assert_array_equal(other, got[0])


def test_hierarchical_needs_as_many_ranks_on_each_node() -> None:
    """Else leaders wait for messages of their own node, which goes by the host."""
    inputs, options = normals(5, N), {"codec": "minmax", "algorithm": "hierarchical"}
    world = NCCLWorld(5, ranks_per_node=2)
    expected = World(5, ranks_per_node=2).allreduce(inputs, **options)
    np.testing.assert_array_equal(world.sum_of(inputs, **options), expected)
    assert {ran[2] for ran in world.ran} == {""}
    assert "hierarchical" not in choose.streamed([0, 0, 0, 1, 1, 2]) + choose.streamed([0, 0])
    assert "hierarchical" in choose.streamed([0, 1, 0, 1])


def test_max_error_holds_when_the_first_call_finds_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the plan by NCCL, which is not known before, lost more than the one that was checked."""
    monkeypatch.setattr(Plan, "error", property(lambda plan: 0.5 if plan.setting.streamed else 0.0))
    world, inputs = NCCLWorld(2), normals(2, N)
    options: dict[str, Any] = {"codec": "minmax", "algorithm": "direct"}
    expected = World(2).allreduce(inputs, **options)
    np.testing.assert_array_equal(world.sum_of(inputs, **options, max_error=0.1), expected)
    assert world.ran == {("direct", "MinMax(bits=8, block=2048)", "")}
    shorter = [x[:-8] for x in world.upload(inputs)]
    starts = [lambda comm, x=x: comm.iallreduce(x, **options, max_error=0.1) for x in shorter]
    assert [type(error) for error in world.errors(starts)] == [InvalidArgument] * 2, "now it is known"
    world.sum_of(inputs, **options, max_error=0.6)
    assert world.ran == {("direct", "MinMax(bits=8, block=2048)", "late NCCL")}


def test_nothing_waits_on_the_host() -> None:
    """Every rank puts all its work on streams before any of it is done."""
    world = NCCLWorld(3, early=False)
    inputs = normals(3, N)
    world.sum_of(inputs, codec="minmax", block=64, algorithm="direct")
    arrays = world.upload(inputs)
    done = [device.current.done for device in world.devices if device is not None]
    requests = [
        comm.iallreduce(x, codec="minmax", block=64, algorithm="direct") for comm, x in zip(world.comms, arrays)
    ]
    while sum(request.test() for request in requests) < 3:
        pass
    assert [device.current.done for device in world.devices if device is not None] == done
    expected = World(3).allreduce(inputs, codec="minmax", block=64, algorithm="direct")
    np.testing.assert_array_equal(world.download([request.wait() for request in requests]), expected)


def test_auto_takes_the_gpu_inside_a_node() -> None:
    """By NCCL; without it, wires go by way of the host."""
    inputs, options = normals(4, 1 << 20), {"codec": "zfp", "rate": 8}
    codec = repr(get_codec("zfp", rate=8))
    there, without = NCCLWorld(4), DeferredWorld(4, direct=False, mpi=True)
    mixed = DeferredWorld(4, direct=False, mpi=True, on_host=(1,))
    for asked in ({}, options):  # compression does not pay for 4 MiB over NVLink
        np.testing.assert_allclose(there.sum_of(inputs, **asked)[0], exact_sum(inputs), rtol=0, atol=1e-4)
        assert there.ran == {("native", None, "late NCCL")}
    got = without.download(without.allreduce(without.upload(inputs), **options))
    for comm in without.comms:
        assert comm.stats is not None and comm.stats.algorithm in ("direct", "ring", "recursive_doubling")
        assert (comm.stats.codec, comm.stats.device, comm.stats.gpu_transport) == (codec, "deferred", "")
    algorithm = without.comms[0].stats.algorithm  # type: ignore[union-attr]
    np.testing.assert_array_equal(got, World(4).allreduce(inputs, algorithm=algorithm, **options))
    mixed.download(mixed.allreduce(mixed.upload(inputs), **options))
    assert {comm.stats.algorithm for comm in mixed.comms if comm.stats} == {"shared_memory"}


def test_what_is_explained_is_what_runs() -> None:
    """After the first call: before, nobody knows what others have."""
    world, without = NCCLWorld(4), DeferredWorld(4, direct=False)
    large, small = (DeviceArray(np.empty(n, np.float32)) for n in (1 << 24, 1 << 18))
    for ranks in (world, without):
        ranks.download(ranks.allreduce(ranks.upload(normals(4, N)), codec="minmax", algorithm="direct"))
    explained = [comm.explain(large, codec="zfp", rate=8) for comm in (world.comms[0], without.comms[0])]
    for plan, profile, length in zip(
        explained, ("NVLink modelled", "GPUs as measured on an H200"), (1 << 22, 8 << 20 >> 2)
    ):
        assert plan.algorithm == "direct" and plan.codec is not None and profile in str(plan)
        assert plan.lengths.segment >= length
    assert "not by NCCL" in str(explained[0]) and "NCCL's own" in str(explained[0])
    plan = world.comms[0].explain(small, codec="zfp", rate=8)
    assert plan.algorithm == "native" and "choice: native" in str(plan)


def test_arrays_here_and_there_go_by_mpi() -> None:
    host, mixed = World(3), NCCLWorld(3, on_host=(1,))
    inputs = normals(3, N)
    options: dict[str, Any] = {"codec": "zfp", "rate": 8, "algorithm": "direct"}
    np.testing.assert_array_equal(mixed.sum_of(inputs, **options), host.allreduce(inputs, **options))
    assert not mixed.nccl.joined and {ran[2] for ran in mixed.ran} == {""}


def test_many_under_way_are_in_the_same_order_on_all_ranks() -> None:
    """Whatever the order in which ranks advance; the first makes NCCL's communicator."""
    for seed in range(5):
        host, world = World(3), NCCLWorld(3, seed=seed)
        ways: list[dict[str, Any]] = [
            {"codec": "minmax", "block": 64, "algorithm": "direct"},
            {"codec": "zfp", "rate": 8, "algorithm": "ring"},
            {"codec": "cast", "algorithm": "direct"},
        ]
        check_many_under_way(host, world, N, ways)


def test_losses_are_fed_back() -> None:
    host, world = World(3), NCCLWorld(3)
    inputs, losses = check_losses_are_fed_back(host, world, N, codec="minmax", bits=4, algorithm="direct")
    turns = iter(losses)
    start = lambda comm, x: comm.iallreduce(x, codec="minmax", bits=4, feedback=next(turns))  # noqa: E731
    small = world.download(world.run(start, world.upload(inputs)))  # by NCCL's own: nothing is lost, nor added
    np.testing.assert_allclose(small[0], exact_sum(inputs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("reason", ["share", "version", "another", "refused", "no id", "fails", "hangs"])
def test_ranks_that_cannot_join_go_by_the_host(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, and they know why."""
    released = threading.Event()

    def failing(error: Exception) -> Any:
        def fail(*_: Any) -> None:
            raise error

        return fail

    host, world = World(3), NCCLWorld(3, gpus=[0, 1, 0] if reason == "share" else None)
    way = world.ways[2]
    said = {
        "share": "ranks 0 and 2 share",
        "version": "rank 2 has late NCCL 5, rank 0 late NCCL 22000",
        "another": "rank 2 has PyTorch's NCCL 22000, rank 0 late NCCL 22000",
        "refused": "rank 2: no",
        "fails": "rank 2: boom",
        "no id": "rank 0: no interface",
        "hangs": "rank 2: not all ranks joined within 0.05 s",
    }
    if reason == "version":
        way._version = 5
    elif reason == "another":
        monkeypatch.setattr(way, "name", "PyTorch's NCCL")
    elif reason == "refused":
        way.refused = UnsupportedDevice("no NCCL")
    elif reason == "fails":
        way.fails = RuntimeError("boom")
    elif reason == "no id":
        monkeypatch.setattr(world.ways[0], "unique_id", failing(RuntimeError("no interface")))
    elif reason == "hangs":
        gpu = world.comms[2]._gpu
        assert gpu is not None
        gpu._gpu_group._seconds = 0.05
        monkeypatch.setattr(way, "join", lambda *_: released.wait(600))
    inputs = normals(3, N)
    options: dict[str, Any] = {"codec": "minmax", "block": 64, "algorithm": "direct"}
    for _ in range(2):
        np.testing.assert_array_equal(world.sum_of(inputs, **options), host.allreduce(inputs, **options))
    assert {ran[2] for ran in world.ran} == {""}
    for comm in world.comms:
        assert comm._gpu is not None and comm._gpu._gpu_group.why.startswith(said[reason])
    released.set()


def test_errors_of_nccl_end_the_communicator() -> None:
    """At the next wait, and in the next call, of which the other ranks are told."""
    world = NCCLWorld(2)
    inputs = normals(2, N)
    options: dict[str, Any] = {"codec": "minmax", "algorithm": "direct"}
    requests = [comm.iallreduce(x, timeout=7, **options) for comm, x in zip(world.comms, world.upload(inputs))]
    while sum(request.test() for request in requests) < 2:
        pass
    assert [(what, seconds) for _, what, seconds in world.carriers[0].watched] == [("allreduce by direct", 7)]
    world.carriers[0].error = PeerTimeout("late")
    with pytest.raises(PeerTimeout, match="late"):
        requests[0].wait()
    requests[1].wait()
    arrays = world.upload(inputs)
    errors = world.errors([lambda comm, x=x: comm.iallreduce(x, timeout=20, **options) for x in arrays])
    assert isinstance(errors[0], PeerTimeout)
    with pytest.raises(CommunicatorBroken):
        world.comms[0].iallreduce(arrays[0], **options)


def test_what_is_freed() -> None:
    world = NCCLWorld(2)
    world.sum_of(normals(2, N), codec="minmax", algorithm="direct")
    for comm in world.comms:
        comm.free()
    assert all(gpu_transport.freed for gpu_transport in world.carriers)


def test_refusals() -> None:
    world = NCCLWorld(2)
    arrays = world.upload(normals(2, N))
    lossy = lambda comm: comm.iallreduce(arrays[comm.rank], codec="qsgd", bits=1, feedback=ErrorFeedback())  # noqa: E731
    for error in world.errors([lossy, lossy]):
        assert isinstance(error, InvalidArgument) and "without end" in str(error)


# Each wait is left out in turn.


def chained(world: DeferredWorld, *, backwards: bool) -> list[list[np.ndarray]]:
    """Each call in its own stream, so that none waits for another; then what was launched last is done first, or all
    that is decoded before what was received for it.
    """
    results = []
    for seed in range(10):
        for device in filter(None, world.devices):
            device.current = Stream()
        batch = world.upload(normals(len(world.comms), N, seed=seed))
        codec: dict[str, Any] = {"codec": "minmax", "block": 64, "algorithm": "direct"} if seed else {}
        callers = [device and device.current for device in world.devices]
        results.append((callers, world.allreduce(batch, **codec)))
    for device in filter(None, [] if backwards else world.devices):
        for stream in device.streams.decode:
            stream.run_up_to(stream.added)
    return downloaded(world, results[::-1] if backwards else results)


def played(*, early: bool, backwards: bool, without: Site | None = None) -> tuple[set[Site], list[list[np.ndarray]]]:
    world = NCCLWorld(3, early=early, without=without)
    results = chained(world, backwards=backwards)
    return world.sites, results


def sites() -> list[Site]:
    """All waits but one: what is decoded came after the caller's work on other ranks, and so after this one's."""
    source = inspect.getsource(streams).splitlines()
    found = played(early=False, backwards=False)[0]
    return sorted(site for site in found if site[1] != "decoding" or "wire.ready" in source[site[0] - 1])


@pytest.mark.parametrize("site", sites(), ids=lambda site: f"{site[1]}, line {site[0]}")
def test_no_wait_can_be_left_out(site: Site) -> None:
    for early, backwards in product((False, True), (False, True)):
        expected = played(early=early, backwards=backwards)[1]
        if shows(partial(played, early=early, backwards=backwards, without=site), expected, AssertionError):
            return
    raise AssertionError(f"nothing shows that the wait at {site} is needed")


# The watch.


class Coming:
    """An event of a GPU's, by hand."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.error: Exception | None = None

    def Test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.come.is_set()


def until(told: Any) -> None:
    deadline = time.monotonic() + 60
    while not told():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Watched(NCCLBase):
    """A communicator whose events are `Coming`."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(current=nullcontext(), pending=lambda event: event))  # type: ignore[arg-type]
        self.ended, self.bad = threading.Event(), threading.Event()

    def exchange(self, *_: Any) -> None: ...

    def allreduce(self, *_: Any, **__: Any) -> None: ...

    def _look(self) -> None:
        if self.bad.is_set():
            raise RuntimeError("remote error")

    def _abort(self) -> None:
        self.ended.set()

    def _leave(self) -> None: ...


@pytest.mark.parametrize("how", ["late", "nccl", "cuda"])
def test_the_watch_ends_what_does_not_end(how: str) -> None:
    watch, first, coming = Watched(), Coming(), Coming()
    first.come.set()
    watch.watch(first, "allreduce by direct", 600)
    until(lambda: not watch._under_way)
    watch.check()
    watch.watch(coming, "allreduce by direct", 0.05 if how == "late" else 600)
    if how == "nccl":
        watch.bad.set()
    elif how == "cuda":
        coming.error = RuntimeError("illegal address")
    until(lambda: watch.error is not None)
    assert watch.ended.wait(60)
    with pytest.raises(PeerTimeout if how == "late" else CollectiveFailed, match="allreduce by direct by NCCL"):
        watch.check()


def test_the_watch_looks_after_one_after_the_other() -> None:
    watch, comings = Watched(), [Coming() for _ in range(5)]
    for coming in comings:
        watch.watch(coming, "x", 600)
    for coming in comings:
        assert watch.error is None
        coming.come.set()
    until(lambda: not watch._under_way)
    watch.check()
