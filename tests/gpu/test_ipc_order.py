"""GPUs that read each other's memory: each wait of their streams is left out in turn."""

from __future__ import annotations

import inspect
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from fakes.deferred import Site, Stream, memory_of
from fakes.deferred_checks import downloaded, shows
from fakes.late_ipc import SharingWorld
from fakes.loopback import normals
from promises import FLAT

from compcoll.gpu import streams
from compcoll.gpu.device_memory import DeviceMemory
from compcoll.gpu.ipc_transport import IPCTransport
from compcoll.gpu.streams import Timeline
from compcoll.transports.base import Wire

N = 9 * 280
OPTIONS: dict[str, Any] = {"codec": "minmax", "block": 64, "algorithm": "direct"}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_SEGMENT", "1024")


def from_elsewhere(x: np.ndarray, without: Site | None = None) -> tuple[SharingWorld, np.ndarray]:
    """Send what lies in the caller's own array, and return what comes."""
    world = SharingWorld(2, early=False)
    world.sum_of(normals(2, N), **OPTIONS)
    world.leave_out(without)
    ends: list[tuple[IPCTransport, Wire, Any]] = []
    for comm, device in zip(world.comms, world.devices):
        assert device is not None and comm._gpu is not None and comm._gpu._gpu_group.links is not None
        memory = DeviceMemory(device.runtime)
        given = device.upload(x)
        timeline = Timeline(device.streams, device.current, device.runtime.record(device.current), None)
        links, host = comm._gpu._gpu_group.links, world.loopback.transports[comm.rank]
        transport = IPCTransport(links, host, timeline, memory.here, memory.pinned.allocate)
        ends.append((transport, Wire((memory.here.allocate(x.nbytes) if comm.rank else given).view(np.uint8)), device))
    sending, arriving = ends[0][0].isend(ends[0][1], 1, 77), ends[1][0].irecv(ends[1][1], 0, 77)
    while not arriving.Test():
        sending.Test()
    _, wire, device = ends[1]
    device.streams.inward.run_up_to(device.streams.inward.added)
    return world, memory_of(wire.buffer).view(x.dtype)


def test_a_wire_elsewhere_is_copied() -> None:
    """Such as one in the caller's own array, after what the caller has launched."""
    x = np.arange(64, dtype=np.float32)
    world, got = from_elsewhere(x)
    np.testing.assert_array_equal(got, x)
    (site,) = (site for site in world.sites if site[1] == "leaving" and is_before(site))
    assert not np.array_equal(from_elsewhere(x, without=site)[1], x)


def line(site: Site) -> str:
    """The wait at a site."""
    return inspect.getsource(streams).splitlines()[site[0] - 1]


def chained(world: SharingWorld, *, backwards: bool) -> list[list[np.ndarray]]:
    """Each call in its own stream, so that none waits for another. What is summed is there at once; then what was
    launched last is done first.
    """
    results = []
    for seed in range(max(8, len(FLAT))):
        for device in filter(None, world.devices):
            device.current = Stream()
        callers = [device and device.current for device in world.devices]
        batch = world.upload(normals(len(world.comms), N, seed=seed))
        for device in filter(None, world.devices if seed % 2 else []):
            device.current.run_up_to(device.current.added)
        algorithm = FLAT[seed % len(FLAT)]
        results.append((callers, world.allreduce(batch, codec="minmax", block=64, algorithm=algorithm)))
    return downloaded(world, results[::-1] if backwards else results)


def ahead(world: SharingWorld) -> list[list[np.ndarray]]:
    """Rank 1, whose device is early, writes what it sends for the third time while rank 0's has still to read what it
    sent for the first time, in the same memory.
    """
    results = []
    for seed in range(4):
        callers = []
        for device in filter(None, world.devices):
            device.current = Stream()
            callers.append(device.current)
        batch = world.upload(normals(2, N, seed=seed))
        for caller in callers:
            caller.run_up_to(caller.added)
        requests = [comm.iallgather(x, codec="minmax", algorithm="direct") for comm, x in zip(world.comms, batch)]
        for _ in range(1000 if seed > 1 else 0):
            requests[1].test()
        results.append((callers, world.loopback.run(requests)))
    return downloaded(world, results)


Played = tuple[set[Site], list[list[np.ndarray]]]


def played(*, early: bool | None, backwards: bool, without: Site | None = None) -> Played:
    worlds = SharingWorld(3, early=early), SharingWorld(2)
    for world in worlds:  # that reading each other's memory was tried shall show nothing
        world.sum_of(normals(len(world.comms), N), **OPTIONS)
        world.leave_out(without)
    results = [*chained(worlds[0], backwards=backwards), *ahead(worlds[1])]
    assert all(world.carriers == {"late IPC"} for world in worlds)
    return worlds[0].sites | worlds[1].sites, results


complete = cache(played)


def is_before(site: Site) -> bool:
    """Tell whether a wait is for the caller's work before the call."""
    return "before" in line(site)


def sites(*, trying: bool = False) -> list[Site]:
    """The waits of calls but for the caller's work before what is decoded, which was encoded elsewhere after such work;
    or those of the first call, which tries to read others' memory.
    """
    found = complete(early=False, backwards=False)[0]
    if trying:
        return sorted(site for site in found if site[1] in ("accept", "take", "leaving"))
    return sorted(site for site in found if site[1] != "accept" and not (site[1] == "decoding" and is_before(site)))


def test_every_wait_of_shared_memory_is_among_them() -> None:
    assert {"leaving", "take", "given", "end"} <= {method for _, method in sites()}
    assert {"leaving", "take", "accept"} == {method for _, method in sites(trying=True)}


@pytest.mark.parametrize("site", sites(), ids=lambda site: f"{site[1]}, line {site[0]}")
def test_no_wait_can_be_left_out(site: Site) -> None:
    for early, backwards in product((False, True, None), (False, True)):
        expected = complete(early=early, backwards=backwards)[1]
        if shows(partial(played, early=early, backwards=backwards, without=site), expected, AssertionError):
            return
    raise AssertionError(f"nothing shows that the wait at {site} is needed")


@pytest.mark.parametrize("site", sites(trying=True), ids=lambda site: f"{site[1]}, line {site[0]}")
def test_trying_shows_other_bytes_without_a_wait(site: Site) -> None:
    """Then wires go by pinned memory."""
    world = SharingWorld(3, early=False)
    world.leave_out(site)
    inputs = world.upload(normals(3, N))
    requests = [comm.iallreduce(x, **OPTIONS) for comm, x in zip(world.comms, inputs)]
    while not all(comm._gpu is not None and comm._gpu._gpu_group.known for comm in world.comms):
        for request in requests:
            request.test()
    assert "reads other bytes from the GPU memory of rank" in world.reasons.pop()
