"""A device that never ends its work: whoever waits for it on the host is told in time, and leaves others the core."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from fakes.deferred import DeferredWorld
from fakes.loopback import World, normals

from compcoll import Request
from compcoll.errors import PeerTimeout
from compcoll.pending import wait_for

TIMEOUT, GRACE = 0.4, 10.0


class Never:
    """What does not come."""

    def Test(self) -> bool:
        return False


def stuck(world: DeferredWorld, rank: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of a rank's device come any more that the host asks for after so many other things."""
    device = world.devices[rank]
    assert device is not None
    pending, asked = device.runtime.pending, iter(range(10**9))
    monkeypatch.setattr(device.runtime, "pending", lambda event: pending(event) if next(asked) < after else Never())


def ended(request: Request) -> tuple[float, float]:
    """The seconds until a request was known to have taken too long, and the part of them that kept the core busy."""
    begun, busy = time.monotonic(), time.thread_time()
    with pytest.raises(PeerTimeout):
        request.wait(timeout=TIMEOUT)
    seconds = time.monotonic() - begun
    return seconds, (time.thread_time() - busy) / seconds


def test_small_arrays_that_do_not_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other collectives of the process go on meanwhile."""
    world, host = DeferredWorld(2, direct=False), World(3)
    stuck(world, 0, 0, monkeypatch)
    inputs = normals(3, 2000)
    others = [comm.iallreduce(x, algorithm="ring") for comm, x in zip(host.comms, inputs)]
    assert not all(request.done for request in others)
    seconds, busy = ended(world.comms[0].iallreduce(world.upload(normals(2, 5))[0]))
    assert TIMEOUT <= seconds < TIMEOUT + GRACE and busy < 0.5
    assert all(request.done for request in others)
    np.testing.assert_allclose(others[0].wait(), np.sum(inputs, axis=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("after", range(4))
def test_what_is_chosen_of_does_not_come_to_the_host(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a sparse sum waits for its device: the call's own time-out ends it."""
    world = DeferredWorld(2, direct=False)
    stuck(world, 0, after, monkeypatch)
    arrays = world.upload(normals(2, 4000))
    options: dict[str, Any] = {"codec": "topk", "density": 0.05, "timeout": TIMEOUT}
    first, second = (comm.iallreduce(x, **options) for comm, x in zip(world.comms, arrays))
    begun = time.monotonic()

    def wait() -> None:
        while time.monotonic() < begun + TIMEOUT:
            first.test()
            second.test()
        first.wait()

    with pytest.raises(PeerTimeout) as told:
        wait()
    assert time.monotonic() - begun < 2 * TIMEOUT + GRACE
    assert after == 0 or "the device has not finished its kernels within 0.4 s" in str(told.value)


def test_a_wait_of_the_host_leaves_the_core_to_others() -> None:
    begun, busy = time.monotonic(), time.thread_time()
    with pytest.raises(PeerTimeout, match=r"nothing comes within 0\.4 s"):
        wait_for(Never(), TIMEOUT, "nothing comes")
    seconds = time.monotonic() - begun
    assert TIMEOUT <= seconds < TIMEOUT + GRACE and time.thread_time() - busy < 0.5 * seconds
