"""What CuPy is asked for by which processes share a GPU's memory, on a stand-in for CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import fake_cupy
from fakes.loopback import World, normals

from compcoll.gpu.ipc_transport import Links
from compcoll.transports.base import Wire


def test_what_cupy_is_given(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from compcoll.gpu.device import CudaDevice

    device = CudaDevice(0)
    sharing, memory = device.sharing(), device.runtime.device_bytes(256)
    event, told = sharing.event()
    assert event.interprocess and told == fake_cupy.handle(event.ptr)
    assert sharing.memory_handle(memory) == fake_cupy.handle(memory.data.ptr)
    with pytest.raises(fake_cupy.CUDARuntimeError, match="invalid resource handle"):
        sharing.open_memory(fake_cupy.handle(memory.data.ptr), 256)
    runtime, closed = cupy.cuda.runtime, []
    for name in ("ipcOpenMemHandle", "ipcOpenEventHandle"):
        monkeypatch.setattr(runtime, name, lambda handle: int.from_bytes(handle, "little"))
    for name in ("ipcCloseMemHandle", "eventDestroy"):
        monkeypatch.setattr(runtime, name, lambda pointer, name=name: closed.append((name, pointer)), raising=False)
    theirs = sharing.open_memory(fake_cupy.handle(memory.data.ptr), 256)
    memory.array[:] = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(theirs[100:200].array, memory.array[100:200])
    opened = sharing.open_event(told)
    device.runtime.record(device.streams.outward, event)
    device.runtime.wait(device.streams.inward, opened)
    sharing.close()
    sharing.close()
    assert closed == [("ipcCloseMemHandle", memory.data.ptr), ("eventDestroy", event.ptr)]


def test_a_wire_goes_from_one_process_to_another(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as one process can show it: handles of memory and events are opened as if they were another's."""
    from compcoll.gpu.device import CudaDevice

    devices = [CudaDevice(0), CudaDevice(0)]
    for name in ("ipcOpenMemHandle", "ipcOpenEventHandle"):
        monkeypatch.setattr(cupy.cuda.runtime, name, lambda handle: int.from_bytes(handle, "little"))
    links = [Links(device.sharing(), device.streams) for device in devices]
    unique_ids = [each.unique_id() for each in links]
    for rank, each in enumerate(links):
        assert all(pending.Test() for pending in each.accept(unique_ids, rank))
        each.check(unique_ids)
    slab, (event, handle) = devices[0].runtime.device_bytes(1 << 21), next(links[0].leaving)
    slab.array[:] = np.resize(np.arange(251, dtype=np.uint8), slab.nbytes)
    notice = links[0].notice(slab[4096:8192], [slab], handle)
    devices[0].runtime.record(devices[0].streams.outward, event)
    wire = Wire(devices[1].runtime.device_bytes(4096))
    assert notice is not None
    links[1]._timeline().take(wire, *links[1].source(notice, 0, wire))
    np.testing.assert_array_equal(wire.buffer.array, slab.array[4096:8192])
    assert links[0].notice(devices[0].runtime.device_bytes(16), [slab], handle) is None
    for each in links:
        each.forget()


def test_ranks_of_one_process_go_by_pinned_memory(cupy: Any) -> None:
    """CUDA opens nothing in the process that has made it."""
    host, world = World(2), World(2)
    inputs = normals(2, 3000)
    expected = host.allreduce(inputs, codec="minmax", algorithm="direct")
    got = world.allreduce([fake_cupy.upload(x) for x in inputs], codec="minmax", algorithm="direct")
    np.testing.assert_array_equal([x.array for x in got], expected)
    for comm in world.comms:
        assert comm.stats is not None and comm.stats.gpu_transport == "" and comm._gpu is not None
        assert "invalid resource handle" in comm._gpu._gpu_group.why and "NCCL" in comm._gpu._gpu_group.why
