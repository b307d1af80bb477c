"""CuPy's side of the device layer, on a stand-in for CuPy, and what is said where there is none."""

from __future__ import annotations

import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import fake_cupy
from fakes.loopback import World, normals
from oracles import collectives as oracles
from promises import ADDITIVE, DIFFERENCES, ON_DEVICES, algorithms_of, one_of_each

import compcoll
from compcoll import Codec, ErrorFeedback, Sign, errors, get_codec, gpu
from compcoll.codecs.base import UPDATING
from compcoll.dtypes import numpy_dtype
from compcoll.gpu.discovery import gpus
from compcoll.host.foreign import gpu_memory
from compcoll.sparse import VarianceFeedback
from osu_like_bench import codecs, contenders, data, on_gpu
from osu_like_bench.cases import CASES, Ranks
from osu_like_bench.on_gpu import Buffers
from osu_like_bench.report import Progress
from osu_like_bench.timing import Limits

REPOSITORY = Path(__file__).resolve().parents[2]


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named error on every rank, and the communicator stays usable."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "compcoll.gpu.device", raising=False)
    monkeypatch.delattr(gpu, "device", raising=False)
    names, why = gpus()
    assert names == [] and "CuPy" in why
    assert gpu_memory(fake_cupy.OnGPU()) == "CUDA" and gpu_memory(np.ones(1)) == "" and gpu_memory([1]) == ""
    world = World(2)
    x = np.ones(100, np.float32)
    start = lambda comm: comm.iallreduce(fake_cupy.OnGPU(), codec="zfp")  # noqa: E731
    for error in world.errors([start, start]):
        assert isinstance(error, errors.UnsupportedDevice) and "CuPy" in str(error)
    mixed = world.errors([start, lambda comm: comm.iallreduce(x, codec="zfp")])
    assert isinstance(mixed[0], errors.UnsupportedDevice)
    assert isinstance(mixed[1], errors.CollectiveMismatch) and "CuPy" in str(mixed[1])
    np.testing.assert_array_equal(world.allreduce([x, x])[0], 2 * x)


@pytest.mark.parametrize("codec", [None, *one_of_each(ON_DEVICES), *one_of_each(ADDITIVE)], ids=repr)
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_same_bits_as_on_the_host(cupy: Any, algorithm: str, codec: Codec | None) -> None:
    host, world = World(3), World(3)
    inputs = normals(3, 3000)
    expected = host.allreduce(inputs, algorithm=algorithm, codec=codec)
    arrays = [fake_cupy.upload(x) for x in inputs]
    for one, other in zip(expected, world.allreduce(arrays, algorithm=algorithm, codec=codec)):
        assert isinstance(other, cupy.ndarray)
        np.testing.assert_array_equal(one, other.array)
    gathered = isinstance(codec, Sign) and codec.scale is None  # votes are counted on the host
    assert {comm.stats.device for comm in world.comms if comm.stats} == {"host" if gathered else "cuda fake"}
    for array, request in zip(arrays, world.allreduce(arrays, algorithm=algorithm, out=arrays[0], codec=codec)[:1]):
        assert request is array


def test_streams_come_before_the_callers(cupy: Any) -> None:
    """Encodings do not queue behind the products of a model."""
    from compcoll.gpu.device import CudaDevice

    streams = CudaDevice(0).streams
    ours = [streams.encode, *streams.decode, streams.outward, streams.inward, streams.between]
    assert {stream.priority for stream in ours} == {-5} and cupy.cuda.Stream().priority is None


def test_nccl(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CuPy's NCCL is given; that it is absent, or old; and that what fails there is aborted."""
    from compcoll.gpu.device import CudaDevice

    nccl, calls = cupy.cuda.nccl, fake_cupy.NcclCommunicator.calls
    device = CudaDevice(0)
    bootstrap = device.bootstrap()
    with pytest.raises(errors.UnsupportedDevice, match="pip install nvidia-nccl"):
        bootstrap.identity()
    monkeypatch.setattr(nccl, "available", True)
    monkeypatch.setattr(nccl, "get_version", lambda: 20900)
    with pytest.raises(errors.UnsupportedDevice, match="older"):
        bootstrap.identity()
    monkeypatch.setattr(nccl, "get_version", lambda: 22703)
    version, identity = bootstrap.identity()
    assert version == 22703 and len(identity) == 16 and bootstrap.identity() == (version, identity)
    monkeypatch.setattr(cupy.cuda.runtime, "deviceGetPCIBusId", lambda index: "another")
    assert bootstrap.identity()[1] != identity
    calls.clear()
    gpu_transport = bootstrap.join(3, bootstrap.unique_id(), 1)
    stream, first, second = device.streams.between, *(fake_cupy.upload(np.zeros(n, np.uint8)) for n in (40, 24))
    gpu_transport.exchange([(first, 0), (second, 2)], [(second, 0)], stream)
    gpu_transport.allreduce(first.view(np.float32), first.view(np.float32), "float32", mean=True, stream=stream)
    at = [array.data.ptr for array in (first, second)]
    assert calls == [
        ("init", 3, 1),
        ("groupStart",),
        ("send", at[0], 40, 1, 0, stream.ptr),
        ("send", at[1], 24, 1, 2, stream.ptr),
        ("recv", at[1], 24, 1, 0, stream.ptr),
        ("groupEnd",),
        ("allReduce", at[0], at[0], 10, 7, 4, stream.ptr),
    ]
    gpu_transport.watch(device.runtime.record(stream), "allreduce by direct", 600)
    gpu_transport.check()
    monkeypatch.setattr(fake_cupy.NcclCommunicator, "fails", True)
    gpu_transport.watch(fake_cupy.Event(), "allreduce by direct", 600)
    deadline = time.monotonic() + 60
    while gpu_transport.error is None or ("abort",) not in calls:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(errors.CollectiveFailed, match="remote error"):
        gpu_transport.check()
    gpu_transport.free(60)
    assert ("destroy",) not in calls
    bootstrap.join(3, bootstrap.unique_id(), 1).free(60)
    assert calls[-1] == ("destroy",)
    late = threading.Event()  # another rank does not come to it
    monkeypatch.setattr(fake_cupy.NcclCommunicator, "fails", False)
    monkeypatch.setattr(fake_cupy.NcclCommunicator, "destroy", lambda self: late.wait(600))
    bootstrap.join(3, bootstrap.unique_id(), 1).free(0.05)
    assert calls[-1][0] == "init"  # nothing else may end what is being destroyed
    late.set()
    gpu_transport = bootstrap.join(3, bootstrap.unique_id(), 1)
    gpu_transport.watch(fake_cupy.Event(), "allreduce by direct", 600)
    gpu_transport.free(0.05)
    assert calls[-1] == ("abort",)


def test_checksums(cupy: Any) -> None:
    """The host's results, with one rank's array on the host."""
    host, world = World(3, checksum=True), World(3, checksum=True)
    inputs = normals(3, 3000)
    for codec in (None, *one_of_each(ON_DEVICES), *one_of_each(ADDITIVE)):
        expected = host.allreduce(inputs, algorithm="ring", codec=codec)
        arrays = [fake_cupy.upload(inputs[0]), inputs[1], fake_cupy.upload(inputs[2])]
        for one, other in zip(expected, world.allreduce(arrays, algorithm="ring", codec=codec)):
            np.testing.assert_array_equal(one, getattr(other, "array", other))
    native = lambda comm: comm.iallreduce(fake_cupy.upload(inputs[0]), algorithm="native")  # noqa: E731
    for error in world.errors([native] * 3):
        assert isinstance(error, errors.InvalidArgument) and "checksum=True" in str(error)


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "zfp", "rate": 8},
        {"codec": "minmax"},
        {"codec": "szp"},
        {"codec": "zfp", "tolerance": 1e-3},
        {"codec": "topk", "density": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_encode_and_decode_without_a_communicator(cupy: Any, dtype: str, options: dict[str, Any]) -> None:
    """The host's bytes, in the memory of the GPU; also where the codec has no kernels there."""
    if "tolerance" in options and dtype in ("float16", "bfloat16"):
        options = {**options, "tolerance": 1e-2}
    x = normals(1, 600)[0].reshape(6, 100).astype(numpy_dtype(dtype))
    expected = compcoll.encode(x, **options)
    wire = compcoll.encode(fake_cupy.upload(x), **options)
    assert isinstance(wire, cupy.ndarray) and wire.dtype == np.uint8
    np.testing.assert_array_equal(wire.array, expected)
    values = compcoll.decode(wire, x.shape, dtype, **options)
    assert isinstance(values, cupy.ndarray)
    np.testing.assert_array_equal(values.array, compcoll.decode(expected, x.shape, x.dtype, **options))
    with pytest.raises(errors.InvalidBuffer, match="wire has"):
        compcoll.decode(wire, 10**6, dtype, codec="cast")
    with pytest.raises(errors.UnsupportedDType, match="int32"):
        compcoll.encode(fake_cupy.upload(x.astype(np.int32)), **options)


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"codec": "topk", "density": 0.02, "algorithm": "sparse_ring"}, ErrorFeedback),
        ({"codec": "hybrid", "threshold": 0.5, "algorithm": "sparse_direct", "out_format": "sparse"}, VarianceFeedback),
    ],
    ids=["topk", "hybrid"],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_sparse_sums(cupy: Any, dtype: str, options: dict[str, Any], made: Any) -> None:
    """The host's, with what is kept in the GPU's memory."""
    worlds, kept = (World(2), World(2)), [[made() for _ in range(2)] for _ in range(2)]
    for seed in range(2):
        inputs = normals(2, 9000, numpy_dtype(dtype), seed)
        results = []
        for world, given, feedbacks in zip(worlds, (inputs, [fake_cupy.upload(x) for x in inputs]), kept):
            for feedback in feedbacks if made is VarianceFeedback else ():
                feedback.observe(np.full(9000, 0.5, np.float32))
            turn = iter(feedbacks)
            start = lambda comm, x, turn=turn: comm.iallreduce(x, feedback=next(turn), **options)  # noqa: E731
            results.append(world.run(start, given))
        for one, other in zip(*results):
            pairs = zip(one[:2], other[:2]) if "out_format" in options else [(one, other)]
            for expected, got in pairs:
                assert isinstance(got, cupy.ndarray)
                np.testing.assert_array_equal(got.array, expected)
        for one, other in zip(*kept):
            assert isinstance(other.residual, cupy.ndarray)
            np.testing.assert_array_equal(other.residual.array, one.residual)
    assert worlds[1].comms[0].stats.device == "cuda fake"


@pytest.mark.parametrize("kind", ["jaxlib._jax", "numba.cuda.cudadrv.devicearray"])
def test_arrays_of_jax_and_numba(cupy: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New results are of their kind."""
    foreign = type("Array", (fake_cupy.ndarray,), {"__module__": kind})

    def made(array: Any, **options: Any) -> Any:
        assert options in ({}, {"sync": False})
        array.__class__ = foreign
        return array

    for name, function in (("jax.dlpack", "from_dlpack"), ("numba.cuda", "as_cuda_array")):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**{function: made}))
    world = World(2)
    inputs = normals(2, 500)
    arrays = [made(fake_cupy.upload(x)) for x in inputs]
    for codec in ("minmax", None):
        for result in world.allreduce(arrays, codec=codec, algorithm="ring"):
            assert type(result) is foreign
    joined = world.run(lambda comm, x: comm.iallgatherv(x, algorithm="ring"), arrays)
    assert type(joined[0]) is foreign
    np.testing.assert_array_equal(joined[0].array, np.concatenate(inputs))
    small = world.allreduce([made(fake_cupy.upload(x[:5])) for x in inputs])
    assert type(small[0]) is foreign and world.comms[0].stats.algorithm == "dissemination"
    outs = iter([fake_cupy.upload(x) for x in inputs])
    for result in world.run(lambda comm, x: comm.iallreduce(x, out=next(outs), algorithm="ring"), arrays):
        assert type(result) is fake_cupy.ndarray


def test_bfloat16_arrays(cupy: Any) -> None:
    """CuPy has them since version 14."""
    host, world = World(2), World(2)
    inputs = normals(2, 500, numpy_dtype("bfloat16"))
    expected = host.allreduce(inputs, codec="minmax", algorithm="ring")
    results = world.allreduce([fake_cupy.upload(x) for x in inputs], codec="minmax", algorithm="ring")
    assert results[0].dtype == numpy_dtype("bfloat16")
    np.testing.assert_array_equal(results[0].array, expected[0])


@pytest.mark.parametrize("collective", UPDATING)
@pytest.mark.parametrize("codec", DIFFERENCES, ids=repr)
def test_differences_are_found_on_the_host(cupy: Any, collective: str, codec: Codec) -> None:
    """The host gets the previous values, too. If they differ between ranks, all raise, and the next call works."""
    world, inputs = World(2), normals(2, 5000)
    out = oracles.previous(codec, collective, inputs)["out"]
    expected = oracles.expected(collective, inputs, 0)

    def starts(outs: Any) -> Any:
        algorithm = algorithms_of(collective)[0]
        return [
            lambda comm, x=x, out=out: getattr(comm, f"i{collective}")(x, out=out, codec=codec, algorithm=algorithm)
            for x, out in zip(map(fake_cupy.upload, inputs), outs, strict=True)
        ]

    outs = [fake_cupy.upload(out) for _ in inputs]
    assert world.errors(starts(outs)) == [None] * 2
    assert {each.array.tobytes() for each in outs} == {expected.tobytes()}
    for comm in world.comms:
        assert comm.stats is not None and comm.stats.codec == repr(codec)
        assert comm.stats.wire_nbytes < comm.stats.raw_sent_nbytes / 2 or comm.stats.raw_sent_nbytes == 0
    outs = [fake_cupy.upload(out), fake_cupy.upload(expected)]
    assert all(isinstance(error, errors.ReferenceMismatch) for error in world.errors(starts(outs)))
    assert [each.array.tobytes() for each in outs] == [out.tobytes(), expected.tobytes()]
    outs[1] = fake_cupy.upload(out)
    assert world.errors(starts(outs)) == [None] * 2
    assert {each.array.tobytes() for each in outs} == {expected.tobytes()}


def test_timeline_of_an_allreduce(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "launch"))
    import gpu_timeline

    between = lambda begin, end: 1e3 * (end.seconds - begin.seconds)  # noqa: E731
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", between)
    monkeypatch.setenv("COMPCOLL_SEGMENT", "4096")
    world = World(2)
    arrays = [fake_cupy.upload(x) for x in normals(2, 8192)]
    world.allreduce(arrays, codec="zfp", algorithm="ring")
    with gpu_timeline.Recorder(world.comms[0]) as recorder:
        world.allreduce(arrays, codec="zfp", algorithm="ring")
    lanes = [span.lane for span in recorder.spans]
    # Of 4 segments of each half the other's are sent, its own added to and sent again, and the other's decoded. One
    # message is the handshake's.
    assert {lane: lanes.count(lane) for lane in gpu_timeline.LANES} == {"encode": 8, "decode": 4, "copy": 16, "send": 9}
    assert all(span.end > span.begin for span in recorder.spans)
    assert 0 < gpu_timeline.hidden(recorder.spans) <= 1
    assert [line.split()[0] for line in gpu_timeline.picture(recorder.spans)] == list(gpu_timeline.LANES)
    world.allreduce(arrays, codec="zfp", algorithm="ring")
    assert len(recorder.spans) == len(lanes)
    for rank, recorded in enumerate(gpu_timeline.record_here(2, 8192, codec="zfp", algorithm="ring")):
        assert 0 < recorded.host_seconds <= recorded.seconds and recorded.messages in (8, 9), rank
        assert [span.lane for span in recorded.spans].count("encode") == 8


def test_what_is_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "launch"))
    from gpu_timeline import Span, hidden, length, picture, plot, union

    spans = [Span("encode", 0, 4), Span("decode", 3, 6), Span("copy", 5, 7), Span("send", 6, 9), Span("copy", 8, 8.5)]
    assert union(spans, ["encode", "decode"]) == [(0, 6)] and length(union(spans, ["copy", "send"])) == 4
    assert hidden(spans) == 1 / 4 and hidden(spans[:2]) == 0
    assert picture(spans)[0] == "encode  " + "#" * 44 + "." + " " * 55
    plot([("one", spans), ("other", spans[:1])], str(tmp_path / "drawn.png"))
    assert (tmp_path / "drawn.png").read_bytes()[:4] == b"\x89PNG"


def test_sums_of_more_wires_than_a_kernel_takes(cupy: Any) -> None:
    host, world = World(19), World(19)
    inputs = normals(19, 19 * 40)
    expected = host.allreduce(inputs, codec="cast", algorithm="direct")
    results = world.allreduce([fake_cupy.upload(x) for x in inputs], codec="cast", algorithm="direct")
    np.testing.assert_array_equal(results[0].array, expected[0])


def test_other_collectives_and_one_rank(cupy: Any) -> None:
    world, alone = World(2), World(1)
    inputs = [x.reshape(2, 50) for x in normals(2, 100)]
    arrays = [fake_cupy.upload(x) for x in inputs]
    gathered = world.run(lambda comm, x: comm.iallgather(x, algorithm="ring"), arrays)
    np.testing.assert_array_equal(gathered[1].array, np.stack(inputs))
    joined = world.run(lambda comm, x: comm.iallgatherv(x, algorithm="ring"), [arrays[0], arrays[1][:1]])
    np.testing.assert_array_equal(joined[0].array, np.concatenate([inputs[0], inputs[1][:1]]))
    exchanged = world.run(lambda comm, x: comm.ialltoall(x, algorithm="pairwise"), arrays)
    np.testing.assert_array_equal(exchanged[0].array, np.stack([inputs[0][0], inputs[1][0]]))
    halves = fake_cupy.upload(inputs[0].astype(np.float16))
    np.testing.assert_array_equal(alone.allreduce([halves])[0].array, halves.array)
    np.testing.assert_array_equal(alone.run(lambda comm, x: comm.iallgatherv(x), [halves])[0].array, halves.array)


def test_inner_hops_of_a_ring_are_one_kernel(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode, add and encode: no kernel stores the partial sum. Two finished chunks are decoded on two streams."""
    from compcoll.gpu.device import CudaRuntime

    ran: list[tuple[str, int]] = []

    def launch(runtime: Any, program: Any, launches: Any) -> None:
        ran.extend((one.function.split("_")[0], runtime.launching.ptr) for one in launches)

    monkeypatch.setattr(CudaRuntime, "launch", launch)
    World(3).allreduce([fake_cupy.upload(x) for x in normals(3, 96)], codec="zfp", algorithm="ring")
    assert sorted(verb for verb, _ in ran) == ["decode"] * 6 + ["encode"] * 3 + ["recode"] * 6
    assert len({stream for verb, stream in ran if verb == "decode"}) == 6
    assert len({stream for verb, stream in ran if verb != "decode"}) == 3


def test_ranges_for_profiles(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_NVTX", "1")
    world = World(2)
    world.allreduce([fake_cupy.upload(x) for x in normals(2, 100)], codec="zfp", algorithm="ring")
    calls = {f"compcoll::allreduce zfp rate=8 ring 400 B {what}" for what in ("start", "wait")}
    ranges = set(cupy.cuda.nvtx.ranges)
    assert ranges - calls == {"compcoll encode", "compcoll send", "compcoll decode"} and ranges & calls
    world.allreduce([fake_cupy.upload(x) for x in normals(2, 9000)], codec="topk", algorithm="sparse_ring")
    assert {"compcoll find", "compcoll take", "compcoll add"} < set(cupy.cuda.nvtx.ranges)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_benchmark_of_kernels(cupy: Any, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [get_codec("zfp", rate=16), get_codec("minmax", block=64), get_codec("szp")]
    x = data.make("normal", 4096 // numpy_dtype(dtype).itemsize, dtype, (0, 0))
    table, progress, clock = codecs.TABLE_ON_GPU, Progress(3), on_gpu.seconds_of_kernels
    found = codecs.compare(chosen, x, codecs.on_cuda, {}, Limits(1, 2, 1.0), table, progress, clock)
    assert [record["operation"] for record in found[:5]] == ["encode", "decode", "accumulate", "feedback", "recode"]
    # The stand-in's clock gives everything a tenth of a millisecond.
    for record in found:
        assert record["wrong"] == 0 and record["throughput"] == pytest.approx(4096 / 1e-4 / 1e9)
        assert record["versus"] == {"copy": 1.0}
    assert found[1]["copy_fraction"] == pytest.approx((4096 + 4096 / found[1]["ratio"]) / 8192)
    assert "zfp" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["native", "ring"])
def test_benchmark_of_collectives(cupy: Any, name: str) -> None:
    ranks = Ranks()
    x, out = (np.full((1, 1000), value, np.float32) for value in (3, 0))
    there = Buffers(x, out)
    contender = contenders.make(name, CASES["allreduce"], ranks, x, out, codec=None, mean=False, there=there)
    contender.run()
    there.download()
    np.testing.assert_array_equal(out, x)
    assert there.seconds == 1e-3
