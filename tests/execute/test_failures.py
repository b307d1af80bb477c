"""What a collective that failed tells its caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.loopback import World

from compcoll import Communicator
from compcoll.errors import CollectiveFailed, CommunicatorBroken, CompcollError, PeerFailed, PeerTimeout
from compcoll.execute.failure_detector import FailureDetector
from compcoll.transports import loopback
from compcoll.transports.loopback import LoopbackTransport

RING: dict[str, Any] = {"codec": "minmax", "bits": 4, "algorithm": "ring"}
SMALL = {"algorithm": "dissemination"}  # whose blocking calls run in C++ from the first one on


@pytest.mark.parametrize("blocking_call", [False, True])
def test_errors_have_what_was_raised_as_their_cause(blocking_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours is told as it is, another one by rank and call; then the communicator cannot be used."""
    raised: list[Exception] = []

    def broken(self: Any, key: Any) -> None:
        raise raised[0]

    def call(comm: Communicator) -> Any:
        x = np.ones(50, np.float32)
        return comm.allreduce(x, **SMALL) if blocking_call else comm.iallreduce(x, **RING).wait()

    monkeypatch.setattr(loopback.Loopback, "deliver", broken)
    for error in (CompcollError("of ours"), KeyError("theirs")):
        comm = World(2, timeout=5).comms[1]
        raised[:] = [error]
        with pytest.raises(CompcollError) as caught:
            call(comm)
        ours = isinstance(error, CompcollError)
        assert (caught.value is error) == ours and caught.value.__cause__ is (None if ours else error)
        assert ours or (type(caught.value) is CollectiveFailed and str(caught.value).startswith("rank 1, allreduce("))
        with pytest.raises(CommunicatorBroken, match="cannot be used any more") as told:
            call(comm)
        assert told.value.__cause__ is caught.value


def test_what_mpi_makes_of_an_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error, whatever follows from it, and to the other ranks, too."""
    comm, x = World(2, timeout=5).comms[0], np.ones(50, np.float32)
    monkeypatch.setattr(LoopbackTransport, "failure", lambda self, error: PeerFailed("rank 1 has died", (1,)))
    monkeypatch.setattr(loopback._Transfer, "Test", lambda self: 1 // 0)
    with pytest.raises(PeerFailed, match="rank 1 has died"):
        comm.iallreduce(x, **RING).wait()
    assert comm._transport.world.announcements == {0: "PeerFailed: rank 1 has died"}  # type: ignore[attr-defined]
    again = comm._break(PeerTimeout("later", ()))
    assert str(again) == "later" and "has died" in repr(comm._broken)


def test_an_error_that_a_thread_finds_meanwhile_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests end with one error, also where who waits learns of another one at the same moment."""
    comm, x = World(2, timeout=0.1).comms[0], np.ones(50, np.float32)
    requests = [comm.iallreduce(x, **RING) for _ in range(2)]
    found, learnt = PeerFailed("rank 1 has died", (1,)), PeerFailed("rank 1 has died", (1,))

    def ask(self: FailureDetector, waiting: str, limit: float) -> CompcollError:
        comm._engine.fail(found)  # as the thread that advances them does
        return learnt

    monkeypatch.setattr(FailureDetector, "ask", ask)
    for request in requests:
        with pytest.raises(PeerFailed) as caught:
            request.wait()
        assert caught.value is found


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("how", [RING, SMALL], ids=str)
def test_an_interrupt_is_no_failure_of_the_collective(
    how: dict[str, Any], before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the caller as it is, and ends the communicator: its messages may still come."""
    comm, x = World(2, timeout=5).comms[0], np.ones(50, np.float32)
    looks: list[int] = []

    def interrupted(self: Any) -> bool:
        looks.append(1)
        if len(looks) <= before:
            return False
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loopback._Transfer, "Test", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            comm.allreduce(x, **how)
        assert caught.value.__cause__ is None
    with pytest.raises(CommunicatorBroken, match="KeyboardInterrupt"):
        comm.allreduce(x, **how)
