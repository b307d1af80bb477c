"""What only a GPU can show: the CUDA kernels' bytes, streams that really run, MPI ranks that share one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import loopback
from fakes.loopback import normals
from promises import ADDITIVE, FLAT, ON_DEVICES

import compcoll
from compcoll import ZFP, ErrorFeedback, MinMax
from compcoll.dtypes import DTYPES, numpy_dtype
from compcoll.gpu.discovery import gpus
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions
from compcoll.sparse import DGCFeedback, VarianceFeedback

TESTS = Path(__file__).resolve().parents[1]
NAMES, WHY = gpus()

pytestmark = pytest.mark.gpu

CODECS = [*ON_DEVICES, *(ZFP(rate=rate) for rate in (4, 6.5, 32)), *(MinMax(bits=bits) for bits in (1, 4, 7))]
SIZES = {"small": (0, 1, 3, 8, 1000, 4099), "large": ((1 << 20) + 5,)}


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip without a GPU unless --require-gpu.

    An invalid access makes all later CUDA calls of the process fail: then end this worker, which pytest-xdist replaces.
    """
    if not NAMES and not request.config.getoption("--require-gpu"):
        pytest.skip(f"no GPU: {WHY}")
    yield
    if NAMES and "PYTEST_XDIST_WORKER" in os.environ:
        import cupy

        try:
            cupy.cuda.runtime.deviceSynchronize()
        except cupy.cuda.runtime.CUDARuntimeError:
            os._exit(1)


@pytest.fixture
def _no_pool() -> Iterator[None]:
    """Allocate each array by itself: compute-sanitizer sees no bounds of arrays inside a memory pool."""
    import cupy

    with cupy.cuda.using_allocator(None):
        yield


@pytest.fixture(name="torch")
def torch_with_cuda(request: pytest.FixtureRequest) -> Any:
    """PyTorch that has a GPU."""
    torch = pytest.importorskip("torch", "2.11")
    if not torch.cuda.is_available() and not request.config.getoption("--require-gpu"):
        pytest.skip("this PyTorch has no CUDA")
    return torch


class World(loopback.World):
    """Ranks that look again and again: what is on a GPU, which others may use, too, takes its time."""

    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(size, **settings)
        self.loopback.run = partial(self.loopback.run, patience=10**7)  # type: ignore[method-assign]


def values_of(n: int, dtype: str) -> Any:
    """Normal values, some zeros, and one that is not finite."""
    x = np.random.default_rng(n).standard_normal(n) * 1e-3
    x[::7] = 0
    if n > 2000:
        x[1500] = np.inf
    return HostDevice.flat(x.astype(numpy_dtype(dtype)), dtype)


def run(coder: Any, n: int, x: Any, y: Any, wires: list[Any], residual: Any, decoded: Any, out: Any) -> None:
    """Encode, add and encode again, with and without a residual, and decode the sum of three wires."""
    terms: list[Any] = []

    def encode(add: Any, count: int, how: EncodeOptions) -> None:
        wire = wires[len(terms)]
        terms.append(wire[: coder.encode(n, add, terms[:count], wire, how)])

    encode(x, 0, EncodeOptions(rng_counter=7, position=64))
    encode(y, 1, EncodeOptions(rng_counter=8, scale=0.5, decoded=decoded, residual=residual))
    encode(None, 2, EncodeOptions(residual=residual, feed=False, residual_scale=0.25))
    coder.decode(n, x, terms, out, scale=0.5)


@pytest.mark.usefixtures("_no_pool")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_bytes_are_the_hosts(codec: Any, dtype: str, sizes: str) -> None:
    import cupy

    from compcoll.gpu.device import CudaDevice

    device, host = CudaDevice(0), HostDevice()
    device.runtime.launching = cupy.cuda.Stream.null
    there, here = codec.coder(device, dtype), codec.coder(host, dtype)
    for n in SIZES[sizes]:
        x, y = values_of(n, dtype), values_of(n, dtype)[::-1].copy()
        wires = [np.zeros(here.wire_nbytes(n), np.uint8) for _ in range(3)]
        gpu_wires = [cupy.zeros(wire.nbytes, cupy.uint8) for wire in wires]
        residual = host.zeros_residual(n, dtype)
        residual[...] = 1e-4
        decoded, out = np.zeros_like(x), np.zeros_like(x)
        gpu_residual, gpu_decoded, gpu_out = (cupy.asarray(array) for array in (residual, decoded, out))
        gpu_x, gpu_y = cupy.asarray(x), cupy.asarray(y)
        run(here, n, x, y, wires, residual, decoded, out)
        run(there, n, gpu_x, gpu_y, gpu_wires, gpu_residual, gpu_decoded, gpu_out)
        for expected, got in zip(wires, gpu_wires):
            np.testing.assert_array_equal(expected, cupy.asnumpy(got), err_msg=f"wire of {n} values")
        # Which NaN a NaN is may differ.
        for expected, got in zip([residual, decoded, out], [gpu_residual, gpu_decoded, gpu_out]):
            kind = expected.dtype if expected is residual else numpy_dtype(dtype)
            floats = [
                np.ascontiguousarray(array).view(kind).astype(np.float64) for array in (expected, cupy.asnumpy(got))
            ]
            np.testing.assert_array_equal(*floats, err_msg=f"{n} values")


@pytest.mark.usefixtures("_no_pool")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ADDITIVE, ids=repr)
def test_numbers_are_the_hosts(codec: Any, dtype: str) -> None:
    import cupy

    from compcoll.gpu.device import CudaDevice

    device, host = CudaDevice(0), HostDevice()
    device.runtime.launching = cupy.cuda.Stream.null
    for n, ranks in ((0, 2), (4099, 3), ((1 << 20) + 5, 100)):
        x = values_of(n, dtype)
        here, there = (codec.quantizer(where, dtype, ranks) for where in (host, device))
        shared_scale, numbers = (
            np.zeros(here.shared_scale(n), here.shared_scale_dtype),
            np.zeros(here.numbers(n), here.number_dtype),
        )
        gpu_agreed, gpu_numbers, gpu_x = (cupy.asarray(array) for array in (shared_scale, numbers, x))
        out = x.copy()
        for bound, a, b, c, d in (
            (here, x, shared_scale, numbers, out),
            (there, gpu_x, gpu_agreed, gpu_numbers, gpu_x),
        ):
            bound.survey(a, 0.5, None, b)
            bound.encode(a, 0.5, None, b, c)
            bound.decode(c, b, d)
        np.testing.assert_array_equal(numbers, cupy.asnumpy(gpu_numbers))
        kind = numpy_dtype(dtype)
        np.testing.assert_array_equal(out.view(kind).astype(float), cupy.asnumpy(gpu_x).view(kind).astype(float))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encode_and_decode(dtype: str) -> None:
    import cupy

    x = normals(1, 10_000, numpy_dtype(dtype))[0]
    for options in ({"codec": "zfp", "rate": 8}, {"codec": "topk", "density": 0.01}):
        wire = compcoll.encode(cupy.asarray(x), **options)
        expected = compcoll.encode(x, **options)
        np.testing.assert_array_equal(cupy.asnumpy(wire), expected)
        got = cupy.asnumpy(compcoll.decode(wire, x.shape, dtype, **options))
        np.testing.assert_array_equal(got, compcoll.decode(expected, x.shape, x.dtype, **options))


def test_arrays_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    inputs = normals(2, 1 << 16)
    arrays = [jax.numpy.asarray(x) * 2 for x in inputs]
    for result in World(2).allreduce(arrays, codec=None, algorithm="ring"):
        assert isinstance(result, jax.Array)
        np.testing.assert_allclose(np.asarray(result), 2 * (inputs[0] + inputs[1]), rtol=1e-6)


def test_collectives_of_cupy_arrays() -> None:
    import cupy

    host, world = World(4), World(4)
    inputs = normals(4, 100_000)
    for options in ({"codec": "zfp"}, {"codec": "minmax"}, {"codec": None}, {"codec": "intsum"}, {"codec": "sign"}):
        for algorithm in FLAT:
            expected = host.allreduce(inputs, algorithm=algorithm, **options)
            got = world.allreduce([cupy.asarray(x) for x in inputs], algorithm=algorithm, **options)
            for one, other in zip(expected, got):
                assert isinstance(other, cupy.ndarray)
                np.testing.assert_array_equal(one, cupy.asnumpy(other))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_sparse_sums_and_states(dtype: str) -> None:
    import cupy

    ways: list[tuple[dict[str, Any], Any]] = [
        ({"codec": "topk", "density": 0.01}, ErrorFeedback),
        ({"codec": "topk", "density": 0.001, "select": "exact"}, lambda: DGCFeedback(clip=100.0)),
        ({"codec": "topk", "density": 0.01, "select": "trimmed"}, ErrorFeedback),
        ({"codec": "strom", "threshold": 2.5}, ErrorFeedback),
        ({"codec": "hybrid", "threshold": 1.0}, VarianceFeedback),
    ]
    for options, made in ways:
        host, world = World(2), World(2)
        kept = [[made() for _ in range(2)] for _ in range(2)]
        for seed in range(3):
            inputs = normals(2, 300_007, numpy_dtype(dtype), seed)
            results = []
            for one, given, feedbacks in zip((host, world), (inputs, [cupy.asarray(x) for x in inputs]), kept):
                for feedback, x in zip(feedbacks, given) if options["codec"] == "hybrid" else ():
                    computed = x.astype("float64" if dtype == "float64" else "float32")
                    feedback.observe(computed * computed / 2)
                turn = iter(feedbacks)
                start = lambda comm, x, turn=turn, options=options: comm.iallreduce(  # noqa: E731
                    x, feedback=next(turn), algorithm="sparse_direct", **options
                )
                results.append(one.run(start, given))
            for expected, got in zip(*results):
                np.testing.assert_array_equal(cupy.asnumpy(got), expected, err_msg=f"{options}, call {seed}")
        for expected, got in zip(*kept):
            for name in expected.arrays:
                np.testing.assert_array_equal(cupy.asnumpy(getattr(got, name)), getattr(expected, name))


def test_order_with_the_callers_stream() -> None:
    """Inputs that a long kernel will make, results that are used and inputs that are overwritten at once."""
    import cupy

    world, host = World(2), World(2)
    inputs = normals(2, 1 << 20)
    expected = host.allreduce(inputs, codec="zfp", algorithm="ring")[0]
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        with stream:
            values = [cupy.asarray(x) for x in inputs]
            arrays = [cupy.zeros_like(x) for x in values]
            heavy = cupy.ones((4096, 4096), cupy.float32)
            for array, x in zip(arrays, values):
                for _ in range(4):
                    heavy = heavy @ heavy * cupy.float32(1e-4)
                array[...] = x + heavy[0, 0] * 0
            results = world.allreduce(arrays, codec="zfp", algorithm="ring")
            doubled = results[0] * 2
            for array in arrays:
                array.fill(-1)
        stream.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(doubled), expected * 2)


def test_named_stream() -> None:
    import cupy

    world, host = World(2), World(2)
    inputs = normals(2, 1 << 16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = [cupy.asarray(x) for x in inputs]
    results = world.allreduce(arrays, codec="minmax", algorithm="direct", stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(
        cupy.asnumpy(results[0]), host.allreduce(inputs, codec="minmax", algorithm="direct")[0]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors(torch: Any, dtype: str) -> None:
    world = World(2)
    inputs = [torch.arange(1000, dtype=getattr(torch, dtype), device="cuda") / 64 for _ in range(2)]
    results = world.allreduce(inputs, codec="cast", dtype="bfloat16", algorithm="ring")
    for result, x in zip(results, inputs):
        assert isinstance(result, torch.Tensor) and result.device == x.device and result.dtype == x.dtype
        torch.testing.assert_close(result, 2 * x.to(torch.bfloat16).to(x.dtype))


def test_refusals() -> None:
    import cupy

    from compcoll import errors

    world = World(1)
    comm = world.comms[0]
    x = cupy.zeros((8, 8), cupy.float32)
    managed = cupy.ndarray(8, cupy.float32, cupy.cuda.malloc_managed(32))
    for arguments, error in (
        ({"x": x.T}, errors.InvalidBuffer),
        ({"x": x, "out": np.zeros((8, 8), np.float32)}, errors.InvalidBuffer),
        ({"x": x, "out": x.reshape(64)}, errors.InvalidBuffer),
        ({"x": np.zeros(64, np.float32), "out": x.reshape(64)}, errors.InvalidBuffer),
        ({"x": managed}, errors.UnsupportedDevice),
        ({"x": x, "stream": "first"}, errors.InvalidArgument),
    ):
        with pytest.raises(error):
            comm.allreduce(arguments.pop("x"), **arguments)
    assert float(comm.allreduce(x + 1).sum()) == 64


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu(mpirun: Any, ranks: int) -> None:
    mpirun(ranks, TESTS / "mpi" / "gpu_ranks.py", timeout=40)


@pytest.mark.usefixtures("torch")
def test_process_group_of_cuda_tensors(mpirun: Any) -> None:
    mpirun(2, TESTS / "pytorch" / "backend" / "gpu_group.py", timeout=40)


@pytest.mark.parametrize("backend", ["gloo", "compcoll"])
@pytest.mark.usefixtures("torch")
def test_compressed_gradients_of_cuda_models(mpirun: Any, backend: str) -> None:
    mpirun(2, TESTS / "pytorch" / "gradients" / "gpu_gradients.py", backend, timeout=40)


def exchanged(device: Any, gpu_transport: Any) -> None:
    """Messages of a rank to itself, and a mean of one, in a stream's order."""
    import cupy

    stream = device.streams.between
    x = cupy.arange(1 << 20, dtype=cupy.float32)
    came, mean = cupy.zeros_like(x), cupy.zeros_like(x)
    cupy.cuda.Device(0).synchronize()
    halves, wires = (array.view(cupy.uint8).reshape(2, -1) for array in (came, x))
    gpu_transport.exchange([(wire, 0) for wire in wires], [(half, 0) for half in halves], stream)
    gpu_transport.allreduce(came, mean, "float32", mean=True, stream=stream)
    event = device.runtime.record(stream)
    gpu_transport.watch(event, "a test", 60)
    event.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(mean), np.arange(1 << 20, dtype=np.float32))
    gpu_transport.check()
    gpu_transport.free(60)


def test_nccl_on_one_gpu() -> None:
    from compcoll.gpu.device import CudaDevice

    device = CudaDevice(0)
    bootstrap = device.bootstrap()
    try:
        bootstrap.identity()
    except compcoll.errors.UnsupportedDevice as error:
        pytest.skip(str(error))
    exchanged(device, bootstrap.join(1, bootstrap.unique_id(), 0))


def test_pytorchs_nccl_on_one_gpu(torch: Any) -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("this PyTorch has no NCCL")
    from compcoll.gpu.device import CudaDevice
    from compcoll.torch.groups.nccl import TorchNCCL

    device = CudaDevice(0)
    bootstrap = TorchNCCL(device.runtime, device.index, torch.distributed.HashStore())
    assert bootstrap.identity()[0] > 21000
    exchanged(device, bootstrap.join(1, bootstrap.unique_id(), 0))
