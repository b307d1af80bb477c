"""Collectives on a device whose work is done as late as its events allow: the host's bits, and no wait too few."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from fakes.deferred import DeferredWorld, DeviceArray, Runtime, Stream
from fakes.loopback import World, normals
from oracles.collectives import arguments
from promises import ADDITIVE, ALGORITHMS, DTYPES, FLAT, ON_DEVICES, algorithms_of, one_of_each

from compcoll import ErrorFeedback, Sign
from compcoll.codecs.sparse.selectors import SELECTORS
from compcoll.gpu import streams
from compcoll.plan.choose import NAMES
from compcoll.sparse import DGCFeedback, SparseSum, VarianceFeedback

CODECS = [None, *one_of_each(ON_DEVICES)]
N = 9 * 280

Start = Callable[[Any, Any], Any]

COLLECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("iallreduce", {"algorithm": name, "op": "mean" if name == "direct" else "sum"}) for name in ALGORITHMS},
    **{
        f"{collective} {name}": (f"i{collective}", {"algorithm": name})
        for collective in NAMES
        if collective not in ("allreduce", "allgatherv")
        for name in algorithms_of(collective)
    },
    "allgatherv": ("iallgatherv", {"algorithm": algorithms_of("allgatherv")[0]}),  # all run as their allgather
}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_SEGMENT", "1024")


def started(method: str, options: dict[str, Any]) -> Start:
    return lambda comm, x: getattr(comm, method)(
        x, **arguments(method.removeprefix("i"), x.size, comm.size, comm.rank), **options
    )


def started_with(feedbacks: Iterator[Any], options: dict[str, Any]) -> Start:
    return lambda comm, x: comm.iallreduce(x, feedback=next(feedbacks), **options)


def per_rank(size: int, n: int, dtype: Any = np.float32) -> list[np.ndarray]:
    return normals(size, n // size * size, dtype)


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("ranks", [[1, 2, 5], pytest.param([3, 6, 8], marks=pytest.mark.slow)], ids=str)
def test_same_bits_as_on_the_host(ranks: list[int], name: str, direct: bool) -> None:
    method, options = COLLECTIVES[name]
    for size in ranks:
        settings: dict[str, Any] = {"ranks_per_node": 2 if name in set(ALGORITHMS) - set(FLAT) else None}
        host, device = World(size, **settings), DeferredWorld(size, direct=direct, **settings)
        inputs = per_rank(size, N)
        for codec in CODECS:
            start = started(method, {**options, "codec": codec})
            expected = host.run(start, inputs)
            got = device.download(device.run(start, device.upload(inputs)))
            for one, other in zip(got, expected):
                np.testing.assert_array_equal(one, other, err_msg=f"{size} ranks, {codec}", strict=True)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_element_types(dtype: str) -> None:
    host, device = World(3), DeferredWorld(3, direct=False)
    inputs = per_rank(3, N, dtype)
    for codec in CODECS[1:]:
        options = {"codec": codec, "algorithm": "ring"}
        expected = host.allreduce(inputs, **options)
        got = device.download(device.allreduce(device.upload(inputs), **options))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_arrays_here_and_there(algorithm: str, direct: bool) -> None:
    settings: dict[str, Any] = {"ranks_per_node": 2}
    host, mixed = World(5, **settings), DeferredWorld(5, direct=direct, on_host=(1, 4), **settings)
    inputs = per_rank(5, N)
    options = {"algorithm": algorithm, "codec": "zfp", "rate": 8}
    expected = host.allreduce(inputs, **options)
    np.testing.assert_array_equal(mixed.download(mixed.allreduce(mixed.upload(inputs), **options)), expected)


def test_in_place_and_in_many_calls() -> None:
    """Several in flight at once, into their inputs, which the caller overwrites afterwards."""
    world = DeferredWorld(4, direct=False)
    batches = [per_rank(4, N + 64 * number) for number in range(3)]
    uploaded = [world.upload(batch) for batch in batches]
    requests = [
        [comm.iallreduce(x, out=x, codec="minmax", block=64, algorithm="ring") for comm, x in zip(world.comms, batch)]
        for batch in uploaded
    ]
    host = World(4)
    for batch, arrays, pending in zip(batches, uploaded, requests):
        results = world.loopback.run(pending)
        assert all(result is x for result, x in zip(results, arrays))
        expected = host.allreduce(batch, codec="minmax", block=64, algorithm="ring")
        np.testing.assert_array_equal(world.download(results), expected)


def test_what_is_current_at_wait_comes_after_the_result() -> None:
    """The caller's stream of before goes on until then."""
    host, world = World(2), DeferredWorld(2, direct=False)
    inputs = normals(2, N)
    options: dict[str, Any] = {"codec": "minmax", "block": 64, "algorithm": "ring"}
    arrays, devices = world.upload(inputs), [device for device in world.devices if device is not None]
    requests = [comm.iallreduce(x, **options) for comm, x in zip(world.comms, arrays)]
    launched = [device.current.added for device in devices]
    while sum(request.test() for request in requests) < len(requests):
        pass
    assert [device.current.added for device in devices] == launched
    for device in devices:
        device.current = Stream()
    results = [request.wait() for request in requests]
    np.testing.assert_array_equal(world.download(results), host.allreduce(inputs, **options))


def test_memory_is_used_again_after_an_end_that_nobody_waited_for() -> None:
    runtime, caller, other = Runtime(), Stream(), Stream()
    ending = streams.Ending(runtime, caller, (runtime.record(runtime.stream()),), ())
    ending.order(other)
    assert caller.added == other.added == 1
    ending.order(caller)
    assert caller.added == 2
    del ending
    assert caller.added == 2
    streams.Ending(runtime, caller, (runtime.record(runtime.stream()),), ())
    assert caller.added == 3


def test_what_has_no_kernels_there_runs_on_the_host() -> None:
    host, device = World(4), DeferredWorld(4, direct=False)
    inputs, options = per_rank(4, N), {"codec": "zfp", "tolerance": 1e-3, "algorithm": "ring"}
    expected = host.allreduce(inputs, **options)
    np.testing.assert_array_equal(device.download(device.allreduce(device.upload(inputs), **options)), expected)
    assert {comm.stats.device for comm in device.comms if comm.stats} == {"host"}


SPARSIFIERS: list[tuple[dict[str, Any], Callable[[], ErrorFeedback]]] = [
    *(({"codec": "topk", "density": 0.02, "select": select}, ErrorFeedback) for select in SELECTORS),
    ({"codec": "topk", "density": 0.02, "wire": "packed"}, ErrorFeedback),
    ({"codec": "topk", "density": 0.02}, partial(DGCFeedback, momentum=0.5, clip=3.0)),
    ({"codec": "randomk", "density": 0.02}, ErrorFeedback),
    ({"codec": "strom", "threshold": 1.5}, ErrorFeedback),
    ({"codec": "variance"}, VarianceFeedback),
    ({"codec": "hybrid", "threshold": 1.0}, VarianceFeedback),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize(("options", "made"), SPARSIFIERS, ids=str)
def test_sparse_methods(options: dict[str, Any], made: Callable[[], ErrorFeedback], dtype: Any) -> None:
    """The host's sums and states, with feedback, for each algorithm; one rank's arrays on the host."""
    for algorithm, size in (("sparse_ring", 2), ("sparse_direct", 3)):
        host, mixed = World(size), DeferredWorld(size, direct=True, on_host=(1,))
        kept = [[made() for _ in range(size)] for _ in range(2)]
        for seed in range(3):
            inputs = [x.reshape(2, -1) for x in normals(size, 20_000, dtype, seed)]
            for feedback, x in zip(kept[0] + kept[1], inputs * 2):
                if isinstance(feedback, VarianceFeedback):
                    feedback.observe(np.square(x.astype(np.float64 if dtype == np.float64 else np.float32)) / 2)
            expected, got = (
                world.run(started_with(iter(feedbacks), {**options, "algorithm": algorithm, "op": "mean"}), given)
                for world, feedbacks, given in zip((host, mixed), kept, (inputs, mixed.upload(inputs)))
            )
            np.testing.assert_array_equal(mixed.download(got), expected, err_msg=f"{algorithm}, call {seed}")
        for rank, (one, other) in enumerate(zip(*kept)):
            device = mixed.devices[rank]
            assert isinstance(other.residual, DeviceArray) == (device is not None)
            for name in one.arrays:
                array = getattr(other, name)
                np.testing.assert_array_equal(
                    array if device is None else device.download(array), getattr(one, name), err_msg=name
                )
        stats = mixed.comms[0].stats
        assert stats is not None and stats.device == "deferred"
        assert stats.wire_nbytes == host.comms[0].stats.wire_nbytes


def test_sparse_and_other_sums_in_flight() -> None:
    """Kernels of several collectives are launched by turns, on streams of their own."""
    ways: list[dict[str, Any]] = [
        {"codec": "topk", "density": 0.05, "algorithm": "sparse_direct"},
        {"codec": "zfp", "algorithm": "ring"},
        {"codec": "strom", "threshold": 1.0, "algorithm": "sparse_ring", "out_format": "sparse"},
        {"codec": "minmax", "block": 64, "algorithm": "direct"},
    ]
    host, world = World(3), DeferredWorld(3, direct=False)
    batches = [normals(3, N, seed=seed) for seed in range(2 * len(ways))]
    uploaded = [world.upload(batch) for batch in batches]
    requests = [
        [comm.iallreduce(x, **ways[number % 4]) for comm, x in zip(world.comms, batch)]
        for number, batch in enumerate(uploaded)
    ]
    world.loopback.run([request for batch in requests for request in batch])
    for number, (batch, pending) in enumerate(zip(batches, requests)):
        expected = host.allreduce(batch, **ways[number % 4])
        for one, other, device in zip(expected, [request.wait() for request in pending], world.devices):
            assert device is not None
            of = (one.indices, one.values) if isinstance(one, SparseSum) else (one,)
            got = (other.indices, other.values) if isinstance(one, SparseSum) else (other,)
            for ours, hosts in zip(got, of, strict=True):
                np.testing.assert_array_equal(device.download(ours), hosts)


def test_only_what_is_sent_leaves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the candidates, and a sample: nothing as long as the buffer is copied, either way."""
    n, moved = 400_000, []

    def copy(runtime: Runtime, source: Any, target: Any, nbytes: int, stream: Any) -> None:
        moved.append(nbytes)
        copied(runtime, source, target, nbytes, stream)

    copied = Runtime.copy
    monkeypatch.setattr(Runtime, "copy", copy)
    for options, made in SPARSIFIERS[:9]:
        world = DeferredWorld(2, direct=False)
        feedbacks = [made() for _ in range(2)]
        moved.clear()
        options = {**options, "density": 0.001} if "density" in options else {**options, "threshold": 3.3}
        world.run(started_with(iter(feedbacks), {**options, "algorithm": "sparse_ring"}), world.upload(normals(2, n)))
        assert 0 < sum(moved) / 2 < 0.1 * 4 * n, (options, sum(moved))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sparse_sums_stay_there(dtype: Any) -> None:
    host, device = World(3), DeferredWorld(3, direct=False)
    inputs = [x.reshape(4, -1) for x in normals(3, 4000, dtype)]
    options: dict[str, Any] = {"codec": "topk", "density": 0.1, "out_format": "sparse", "algorithm": "sparse_ring"}
    expected = host.allreduce(inputs, **options)
    for seed, sums in enumerate([device.allreduce(device.upload(inputs), **options) for _ in range(2)]):
        for part in ("indices", "values"):
            got = device.download([getattr(one, part) for one in sums])
            for one, other in zip(got, expected):
                np.testing.assert_array_equal(one, getattr(other, part), strict=True, err_msg=f"call {seed}")
        assert {one.shape for one in sums} == {(4, 1000)}


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "native"])
def test_numbers_that_are_added(algorithm: str, direct: bool) -> None:
    """Integers and votes, one rank's arrays on the host."""
    for (size, dtype), codec in product(zip((5, 2, 3, 4), DTYPES), one_of_each(ADDITIVE)):
        settings: dict[str, Any] = {"ranks_per_node": 2}
        host = DeferredWorld(size, direct=direct, mpi=algorithm == "native", on_host=range(size), **settings)
        mixed = DeferredWorld(size, direct=direct, mpi=algorithm == "native", on_host=(1,), **settings)
        losses = [[ErrorFeedback() for _ in range(size)] for _ in range(2)]
        for seed in range(2):  # the second adds what the first has lost
            inputs, options = normals(size, N, dtype, seed), {"codec": codec, "algorithm": algorithm}
            feedbacks = [iter(kept if codec.name == "intsum" else [None] * size) for kept in losses]
            expected, got = (
                world.run(started_with(turn, options), given)
                for world, turn, given in zip((host, mixed), feedbacks, (inputs, mixed.upload(inputs)))
            )
            np.testing.assert_array_equal(mixed.download(got), expected)
            last = mixed.comms[0].stats
            gathered = codec == Sign(block=codec.block) and algorithm in ("ring", "direct")  # counted on the host
            assert last is not None and last.device == ("host" if gathered else "deferred")


@pytest.mark.parametrize("on_host", [(), (1,)], ids=["all there", "one here"])
def test_small_arrays_travel_with_the_opening(on_host: tuple[int, ...]) -> None:
    world = DeferredWorld(3, direct=False, on_host=on_host)
    for dtype, op, reduced in (("int64", "max", np.max), ("float32", "sum", np.sum), ("float64", "mean", np.mean)):
        batches = [[np.arange(4, dtype=dtype) * (rank + 2 * batch) for rank in range(3)] for batch in range(3)]
        uploaded = [world.upload(batch) for batch in batches]
        requests = [[comm.iallreduce(x, op=op) for comm, x in zip(world.comms, batch)] for batch in uploaded]
        for batch, pending in zip(batches, requests):
            results = world.download(world.loopback.run(pending))
            assert {request.stats.algorithm for request in pending} == {"dissemination"}
            for result in results:
                np.testing.assert_array_equal(result, reduced(batch, axis=0))


def test_losses_stay_on_the_device_whatever_runs() -> None:
    """Kernels, and a codec of the host's on copies; one rank's array on the host."""
    host, mixed = World(4), DeferredWorld(4, direct=False, on_host=(1,))
    losses = [[ErrorFeedback() for _ in range(4)] for _ in range(2)]
    ways: list[dict[str, Any]] = [
        {"codec": "zfp", "tolerance": 1e-1, "algorithm": "ring"},
        {"codec": "minmax", "bits": 4, "algorithm": "direct"},
        {"codec": None, "algorithm": "ring"},
    ]
    for seed, options in enumerate(2 * ways):
        inputs = normals(4, 500, seed=seed)
        expected, got = (
            world.run(started_with(iter(kept), options), given)
            for world, kept, given in zip((host, mixed), losses, (inputs, mixed.upload(inputs)))
        )
        np.testing.assert_array_equal(mixed.download(got), expected, err_msg=str(options))
        for one, other, device in zip(*losses, mixed.devices):
            assert isinstance(other.residual, DeviceArray) == (device is not None)
            np.testing.assert_array_equal(
                other.residual if device is None else device.download(other.residual),
                one.residual,
                err_msg=str(options),
            )
