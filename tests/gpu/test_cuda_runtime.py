"""What CUDA and its driver are asked for by `CudaRuntime`, on a stand-in for CuPy."""

from __future__ import annotations

import socket
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from fakes import fake_cupy

from compcoll import errors
from compcoll.gpu import captures, cubins
from compcoll.gpu.programs import program


def place(cupy: Any, monkeypatch: pytest.MonkeyPatch, host: str, uuid: bytes) -> bytes:
    from compcoll.gpu.runtime import CudaRuntime

    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda index: {"uuid": uuid})
    return CudaRuntime(0).place()


def test_which_ranks_share_a_gpu(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual machines may have equal names, and containers of one machine different ones."""
    first = place(cupy, monkeypatch, "node", b"\x01\x02")
    assert len(first) == 16 and first == place(cupy, monkeypatch, "container", b"\x01\x02")
    assert first != place(cupy, monkeypatch, "node", b"\x01\x03")
    monkeypatch.setattr(cupy.cuda.runtime, "deviceGetPCIBusId", lambda index: "another")
    assert first != place(cupy, monkeypatch, "node", b"\x01\x02")  # UUIDs may be equal up to a zero byte


def test_a_query_leaves_no_error_behind(cupy: Any) -> None:
    """PyTorch would raise it; that of a failed kernel is raised here."""
    from compcoll.gpu.runtime import CudaRuntime

    event = fake_cupy.Event()
    pending = CudaRuntime(0).pending(event)
    assert pending.Test() is False and fake_cupy.current.last_error == 0
    fake_cupy.Event.status[event.ptr] = 700
    with pytest.raises(fake_cupy.CUDARuntimeError, match="700"):
        pending.Test()
    assert fake_cupy.current.last_error == 0
    fake_cupy.Event.status[event.ptr] = 0
    assert pending.Test() is True


def test_why_ranks_compile_for_themselves(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, however many programs cannot be compiled for all."""
    from compcoll.gpu.runtime import CudaRuntime

    def make(*_: Any) -> None:
        raise errors.UnsupportedDevice("NVRTC 13.0: no builtins")

    monkeypatch.setattr(cubins, "make", make)
    with pytest.warns(RuntimeWarning, match="no builtins.*each rank"):
        CudaRuntime(0)._load(program("zfp", "float32"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CudaRuntime(0)._load(program("cast", "float32"))._path == ""


class Driver:
    """Notes down which thread takes which mode of captures, and which one queries an event."""

    def __init__(self) -> None:
        self.status = 0
        self.calls: dict[str, list[int | str]] = {}

    def note(self, what: int | str) -> None:
        self.calls.setdefault(threading.current_thread().name, []).append(what)

    def exchange(self, mode: Any) -> int:
        self.note(mode._obj.value)
        return self.status

    def query(self, event: int) -> int:
        self.note("query")
        return fake_cupy.query(event)


@pytest.fixture
def driver(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(captures, "_exchange", lambda: driver.exchange)
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", driver.query)
    return driver


def in_thread(name: str, *calls: Callable[[], object]) -> None:
    thread = threading.Thread(target=lambda: [call() for call in calls], name=name)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_our_threads_use_thread_local_capture_mode(cupy: Any, driver: Driver) -> None:
    """They change their mode once, before they query; threads of the user keep theirs."""
    from compcoll.gpu.device import CudaDevice

    device, event = CudaDevice(0), fake_cupy.Event()
    test = device.runtime.pending(event).Test
    for name in ("compcoll-progress", "compcoll-join", "user"):
        in_thread(name, test, device.runtime.stream, test)
    gpu_transport = device.bootstrap().join(1, device.bootstrap().unique_id(), 0)
    gpu_transport.watch(event, "allreduce by direct", 600)
    deadline = time.monotonic() + 60
    while len(driver.calls.get("compcoll-watch", ())) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    fake_cupy.Event.status[event.ptr] = 0
    gpu_transport.free(60)
    test()
    ours = {name: calls for name, calls in driver.calls.items() if 1 in calls}
    assert sorted(ours) == [f"compcoll-{name}" for name in ("free", "join", "progress", "watch")]
    assert all(calls[0] == 1 and calls.count(1) == 1 for calls in ours.values())
    assert driver.calls["user"] == ["query", "query"] and threading.current_thread().name in driver.calls


def test_a_mode_that_cannot_be_changed(cupy: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, as a thread may have no context yet; nothing is done without a driver, or with an old one."""
    from compcoll.gpu.runtime import CudaRuntime

    test, driver.status = CudaRuntime(0).pending(fake_cupy.Event()).Test, 201
    in_thread("compcoll-early", test, lambda: setattr(driver, "status", 0), test, test)
    assert driver.calls == {"compcoll-early": [1, "query", 1, "query", "query"]}
    monkeypatch.undo()

    def absent(name: str) -> Any:
        raise OSError(name)

    for library in (absent, lambda name: types.SimpleNamespace()):
        monkeypatch.setattr(captures, "ctypes", types.SimpleNamespace(CDLL=library))
        assert captures._exchange.__wrapped__() is None
