"""What fails, is refused or must keep an order on CuPy's side of the device layer, on a stand-in for CuPy."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import fake_cupy
from fakes.loopback import World, normals

import compcoll
from compcoll import Communicator, ErrorFeedback, errors
from compcoll.tools import selftest
from compcoll.transports.loopback import Loopback


def test_kernels_that_fail(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells it by the events behind them, which never come: an error, not a wait."""
    world, answers = World(2), [600]
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: answers[-1])
    arrays = [fake_cupy.upload(x) for x in normals(2, 3000)]
    requests = [comm.iallreduce(x, codec="zfp", algorithm="ring") for comm, x in zip(world.comms, arrays)]
    assert not any(request.test() for request in requests)
    answers.append(700)
    with pytest.raises(errors.CollectiveFailed, match="700") as told:
        requests[0].wait()
    assert isinstance(told.value.__cause__, fake_cupy.CUDARuntimeError)


def test_what_is_handed_over_comes_after_its_maker(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DLPack orders it in the stream that is CuPy's: the one named, or the current one."""
    there, seen = fake_cupy.upload(np.ones(4, np.float32)), []

    class Foreign(fake_cupy.OnGPU):
        shape, dtype = there.shape, there.dtype

        def __dlpack__(self) -> Any:
            return there

    def from_dlpack(x: Any) -> Any:
        seen.append(cupy.cuda.get_current_stream().ptr)
        return x.__dlpack__()

    monkeypatch.setattr(cupy, "from_dlpack", from_dlpack, raising=False)
    World(1).comms[0].allreduce(Foreign(), stream=12345)
    assert set(seen) == {12345}
    seen.clear()
    with cupy.cuda.Stream() as stream:
        compcoll.encode(Foreign())
    assert set(seen) == {stream.ptr}


def test_feedback_is_allocated_in_the_callers_stream(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy uses freed memory again in the order of that."""
    seen: list[int] = []

    def zeros(n: Any, dtype: Any) -> Any:
        seen.append(cupy.cuda.get_current_stream().ptr)
        return fake_cupy.zeros(n, dtype)

    monkeypatch.setattr(cupy, "zeros", zeros)
    comm, x = World(1).comms[0], fake_cupy.upload(np.ones(100, np.float32))
    feedback = ErrorFeedback()
    with cupy.cuda.Stream() as stream:
        comm._prepare_feedback(feedback, x)
    assert seen == [stream.ptr] and isinstance(feedback.residual, cupy.ndarray) and feedback.residual.size == 100
    comm.allreduce(x, feedback=ErrorFeedback(), codec="minmax", stream=12345)
    assert seen == [stream.ptr, 12345]


def test_encode_asks_once_what_gpus_there_are(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes CUDA longer than the kernel."""
    x = fake_cupy.upload(np.ones(100, np.float32))
    compcoll.encode(x)
    monkeypatch.delattr(cupy.cuda.runtime, "getDeviceProperties")
    compcoll.decode(compcoll.encode(x), x.shape, x.dtype)


def test_streams_by_name(cupy: Any) -> None:
    comm = World(1).comms[0]
    x = fake_cupy.upload(np.ones(4, np.float32))
    for stream in (None, cupy.cuda.Stream(), 0, 1, 12345):
        assert comm.allreduce(x, stream=stream).array.sum() == 4
    with pytest.raises(errors.InvalidArgument, match="no CUDA stream"):
        comm.allreduce(x, stream="first")


def test_doctor_runs_a_kernel(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from compcoll.gpu.device import CudaDevice

    assert selftest.check_gpu() == ""
    with monkeypatch.context() as patch:
        patch.setattr(CudaDevice, "to_host", lambda self, x, stream: np.zeros(x.size, np.uint8))
        assert "bytes of a wire differ from the host's" in selftest.check_gpu()
    monkeypatch.setattr(cupy.RawModule, "get_function", None)
    assert "a kernel does not run: TypeError" in selftest.check_gpu()


def test_machine_code_that_is_kept_is_loaded(cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiling; what the driver does not take is compiled, by one rank for all, or else by CuPy."""
    from compcoll.gpu import cubins
    from compcoll.gpu.coder import DeviceCoder
    from compcoll.gpu.runtime import CudaRuntime

    compiled, program = fake_cupy.RawModule.compiled, DeviceCoder(None, ("zfp", 32, 0), "float32").program
    monkeypatch.setenv("COMPCOLL_CUBINS", str(tmp_path))
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"code")
    bad.write_bytes(b"newer")
    for kept, made, path in (([good], None, good), ([bad, good], None, good), ([bad], good, good), ([bad], bad, "")):
        compiled.clear()
        monkeypatch.setattr(cubins, "kept", lambda *_, kept=kept: kept)
        monkeypatch.setattr(cubins, "make", lambda *_, made=made: made)
        assert CudaRuntime(0)._load(program)._path == str(path)
        assert len(compiled) == (path == "")


def test_the_per_thread_default_stream_is_refused_beside_a_progress_thread(cupy: Any) -> None:
    x = fake_cupy.upload(np.ones(4, np.float32))
    threaded = Communicator(Loopback(1).transports[0], progress="thread")
    for stream in (2, cupy.cuda.Stream.ptds):
        cupy.cuda.Stream.ptds.ptr = 2
        assert World(1).comms[0].allreduce(x, stream=stream).array.sum() == 4
        with pytest.raises(errors.InvalidArgument, match="per-thread default"):
            threaded.allreduce(x, stream=stream)
    assert threaded.allreduce(x).array.sum() == 4
    threaded.free()


def test_a_stream_that_captures_a_graph_is_refused(cupy: Any) -> None:
    comm, x = World(1).comms[0], fake_cupy.upload(np.ones(4, np.float32))
    stream = cupy.cuda.Stream()
    stream.capturing = True
    for refused in (stream, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cupy.cuda.Stream.null, "capturing", True)
            patch.setattr(cupy.cuda, "get_current_stream", lambda: cupy.cuda.Stream.null)
            patch.setattr(cupy.cuda.Stream, "from_external", lambda other: stream)
            with pytest.raises(errors.InvalidArgument, match="captures a CUDA graph"):
                comm.allreduce(x, stream=refused and stream.ptr)
    assert comm.allreduce(x).array.sum() == 4


def test_own_threads_do_not_go_back_to_a_device_that_is_not_theirs(cupy: Any) -> None:
    from compcoll.gpu.runtime import CudaRuntime

    runtime, seen = CudaRuntime(3), []

    def work() -> None:
        with runtime.current, runtime.current:
            seen.append(cupy.cuda.runtime.getDevice())
        seen.append(cupy.cuda.runtime.getDevice())

    for name in ("compcoll-progress", "the caller's"):
        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join(60)
    assert seen == [3, 3, 3, 0]


def test_refusals(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = fake_cupy.upload(np.ones((4, 4), np.float32))
    flat, host = x.reshape(16), np.ones((4, 4), np.float32)
    cases: list[tuple[type[Exception], str, Any, Any]] = [
        (errors.InvalidBuffer, "not C-contiguous", x.T, None),
        (errors.InvalidBuffer, "on the host", x, host),
        (errors.InvalidBuffer, "numpy.ndarray is needed", host, x),
        (errors.InvalidBuffer, "the result is", x, flat),
        (errors.InvalidBuffer, "overlaps", flat[:8], flat[4:12]),
    ]
    comm = World(1).comms[0]
    for error, words, given, out in cases:
        with pytest.raises(error, match=words):
            comm.allreduce(given, out=out)
    assert comm.allreduce(x).array.sum() == 16


@pytest.mark.parametrize(
    ("kind", "device", "words"), [(fake_cupy.MANAGED, 0, "managed memory"), (2, 1, "CUDA device 1, but")]
)
def test_memory_of_another_kind_or_device(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, kind: int, device: int, words: str
) -> None:
    comm = World(1).comms[0]
    x = fake_cupy.upload(np.ones(4, np.float32))
    comm.allreduce(x)
    with monkeypatch.context() as patch:
        found = type("Attributes", (), {"type": kind, "device": device})
        patch.setattr(cupy.cuda.runtime, "pointerGetAttributes", lambda pointer: found)
        with pytest.raises(errors.UnsupportedDevice, match=words):
            comm.allreduce(x)
    assert comm.allreduce(x).array.sum() == 4


def test_without_a_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named error on every rank before any message of the collective, and nothing is written."""

    def none() -> int:
        raise fake_cupy.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    world, x, out = World(2), np.ones(4, np.float32), np.zeros(4, np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "getDeviceCount", none)
        there = fake_cupy.upload(x)
        refused = world.errors([lambda comm: comm.iallreduce(there), lambda comm: comm.iallreduce(x, out=out)])
        assert isinstance(refused[0], errors.UnsupportedDevice) and "finds no GPU: cudaErrorNoDevice" in str(refused[0])
        assert isinstance(refused[1], errors.CollectiveMismatch) and not out.any()
        sys.modules["compcoll.gpu.device"]._shared.cache_clear()
        with pytest.raises(errors.UnsupportedDevice, match="finds no GPU"):
            compcoll.encode(there)
    np.testing.assert_array_equal(world.allreduce([there, x])[0].array, 2 * x)


def test_feedback_of_the_other_device(cupy: Any) -> None:
    feedbacks = [ErrorFeedback() for _ in range(2)]
    inputs = normals(2, 64)
    options = {"codec": "minmax", "algorithm": "ring"}
    world = World(2)
    pairs = iter(feedbacks)
    world.run(lambda comm, x: comm.iallreduce(x, feedback=next(pairs), **options), inputs)

    def start(rank: int) -> Any:
        return lambda comm: comm.iallreduce(fake_cupy.upload(inputs[rank]), feedback=feedbacks[rank], **options)

    for error in world.errors([start(0), start(1)]):
        assert isinstance(error, errors.InvalidBuffer) and "another device" in str(error)
