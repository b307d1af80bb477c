"""GPUs that read each other's memory: what others tell is not believed, and memory stays while they have it."""

from __future__ import annotations

import gc
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fakes.late_ipc import SharingWorld
from fakes.loopback import exact_sum, normals

from compcoll.errors import CollectiveFailed, CommunicatorBroken, PeerTimeout, WireCorrupted
from compcoll.execute.engine import under_way

N = 9 * 280
OPTIONS: dict[str, Any] = {"codec": "minmax", "block": 64, "algorithm": "direct"}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_SEGMENT", "1024")


def altered(world: SharingWorld, change: Callable[[list[Any]], None], after: int) -> None:
    """Let rank 0 tell something else of its wires, after so many that it tells the truth of."""
    links, told = world.comms[0]._gpu._gpu_group.links, iter(range(10**9))  # type: ignore[union-attr]
    assert links is not None
    notice = links.notice

    def lying(*arguments: Any) -> bytes | None:
        found = notice(*arguments)
        assert found is not None
        if next(told) < after:
            return found
        fields = list(struct.unpack("<QQQ64s64s", found))
        change(fields)
        return struct.pack("<QQQ64s64s", *fields)

    links.notice = lying  # type: ignore[method-assign]


def changed(index: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda fields: fields.__setitem__(index, value)


LIES: dict[str, tuple[Callable[[list[Any]], None], type[Exception], str]] = {
    "longer": (changed(2, 1 << 40), WireCorrupted, f"a message of {1 << 40} bytes, where"),
    "shorter": (changed(2, 1), WireCorrupted, "rank 0 announced a message of 1 bytes, where"),
    "behind": (changed(1, 1 << 21), WireCorrupted, f"in bytes {1 << 21} to"),
    "far behind": (changed(1, (1 << 64) - 1), WireCorrupted, f"in bytes {(1 << 64) - 1} to"),
    "larger memory": (changed(0, 1 << 40), WireCorrupted, f"of {1 << 40}, in memory of {1 << 21}"),
    "other memory": (changed(3, b"?" * 64), CollectiveFailed, "invalid resource handle"),
    "other event": (changed(4, b"?" * 64), CollectiveFailed, "invalid resource handle"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_is_refused(lie: str) -> None:
    change, kind, said = LIES[lie]
    world = SharingWorld(2)
    world.sum_of(normals(2, N), **OPTIONS)
    altered(world, change, after=1)
    world.upload(normals(2, N))
    with pytest.raises(kind, match=said.replace("(", r"\(")):
        told(world, 1, 2)


def told(world: SharingWorld, victim: int, size: int, **options: Any) -> None:
    """Raise what one rank's collective ends with."""
    inputs = world.upload(normals(size, N))
    requests = [comm.iallreduce(x, **OPTIONS, **options) for comm, x in zip(world.comms, inputs)]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for request in requests:
            if request is requests[victim] or not request.done:
                request.test()


def test_an_end_that_nobody_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SharingWorld(2)
    world.sum_of(normals(2, N), **OPTIONS)
    links = world.comms[0]._gpu._gpu_group.links  # type: ignore[union-attr]
    assert links is not None
    event, _ = next(links.ends)
    monkeypatch.setattr(links, "ends", iter([(event, b"?" * 64)]))
    with pytest.raises(CollectiveFailed, match="invalid resource handle"):
        told(world, 1, 2)


# What becomes of memory.


@pytest.mark.slow
def test_memory_stays_until_all_have_closed_it() -> None:
    """It grows with the buffers, and goes when the communicator is freed."""
    world = SharingWorld(3)
    for n in (N, 700_000, 1_500_000, N):
        inputs = normals(3, n)
        got = world.sum_of(inputs, codec=None, algorithm="direct")
        np.testing.assert_allclose(got[0], exact_sum(inputs), rtol=0, atol=1e-4)
    gc.collect()
    assert len(world.ipc.memory) > 2 * 3 and +world.ipc.opened and not world.ipc.freed_too_early
    freed(world, range(3))
    assert not +world.ipc.opened and not world.ipc.freed_too_early and not world.ipc.memory


def freed(world: SharingWorld, ranks: Any) -> None:
    """Free the communicators of some ranks, each in a thread: it waits for the others; then forget them."""
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: world.comms[rank].free(), ranks))
    for comm in world.comms:
        comm._gpu = None
    gc.collect()


def test_a_rank_that_does_not_free() -> None:
    """The others do not hang, and their memory stays, which it may still have open."""
    world = SharingWorld(3, timeout=60)
    world.sum_of(normals(3, N), **OPTIONS)
    for comm in world.comms:
        assert comm._gpu is not None
        comm._gpu._gpu_group._seconds = 0.2
    begun = time.monotonic()
    freed(world, range(2))
    assert time.monotonic() - begun < 10 and world.ipc.memory and not world.ipc.freed_too_early


@pytest.mark.parametrize("looks", [0, 4, 16])
def test_a_rank_that_dies(looks: int) -> None:
    """The others learn of it in time."""
    world = SharingWorld(3, timeout=0.3)
    world.sum_of(normals(3, N), **OPTIONS)
    requests = [
        comm.iallreduce(x, codec=None, algorithm="ring") for comm, x in zip(world.comms, world.upload(normals(3, N)))
    ]
    for _ in range(looks):
        for request in requests:
            request.test()
    under_way.discard(world.comms[2]._engine)
    for request in requests[:2]:
        with pytest.raises((PeerTimeout, CommunicatorBroken)):
            request.wait()
    assert not requests[2].done
