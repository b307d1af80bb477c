"""A rank that never comes, or stops halfway: every other rank learns who is missing, in time, in every collective."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, normals
from oracles.collectives import arguments, has_result

from compcoll import Communicator, Request
from compcoll.errors import CommunicatorBroken, CompcollError, PeerTimeout
from compcoll.kernels._host import sleeps_within
from compcoll.plan import choose
from compcoll.transports import loopback

RANKS, TIMEOUT = 4, 0.2
GRACE, LONG_GRACE = 1.0, 10.0  # the latter where other tests' ranks may want the cores


def start(comm: Communicator, collective: str, algorithm: str, x: np.ndarray) -> Request:
    codec: dict[str, Any] = {"codec": "minmax"}
    if algorithm.startswith("sparse"):
        codec = {"codec": "topk", "density": 0.05}
    method = getattr(comm, f"i{collective}")
    more = arguments(collective, x.size, comm.size, comm.rank)
    request: Request = method(x, algorithm=algorithm, timeout=TIMEOUT, **codec, **more)
    return request


@pytest.mark.parametrize(
    ("seconds", "milliseconds"), [(0.0, 0), (0.1, 25), (1.0, 250), (1800.0, 250), (float("inf"), 250)]
)
def test_naps_are_a_part_of_the_time_out(seconds: float, milliseconds: int) -> None:
    assert sleeps_within(seconds) == milliseconds


def outcome(request: Request) -> tuple[CompcollError | None, float]:
    begin = time.monotonic()
    try:
        request.wait()
    except CompcollError as error:
        return error, time.monotonic() - begin
    return None, 0.0


def late(collective: str, algorithm: str, moment: int, victim: int, grace: float) -> int:
    """How many ranks knew who was missing, within the time-out and the grace. The victim has made that many looks at
    its messages: none, if it never came; each of the others has two collectives under way.
    """
    world = World(RANKS, timeout=30, progress="sleep", ranks_per_node=2, seed=None)
    inputs = normals(RANKS, 4000)
    before = [x.tobytes() for x in inputs]
    requests = [
        [start(comm, collective, algorithm, x) for _ in range(2)] if rank != victim or moment else []
        for rank, (comm, x) in enumerate(zip(world.comms, inputs, strict=True))
    ]
    for _ in range(moment):
        for pair in requests:
            for request in pair:
                request.test()
    others = [rank for rank in range(RANKS) if rank != victim]
    with ThreadPoolExecutor(len(others)) as pool:
        found = list(pool.map(lambda rank: outcome(requests[rank][1]), others))
    told = 0
    for rank, (error, seconds) in zip(others, found, strict=True):
        assert [x.tobytes() for x in inputs] == before
        if error is None:  # it has got all that it needed before
            assert moment and (requests[rank][0].wait() is not None) == has_result(collective, rank)
            continue
        told += 1
        assert isinstance(error, PeerTimeout) and error.missing == (victim,), (rank, error)
        assert f"rank {victim} did not answer" in str(error)
        assert re.search(rf"{collective} by {algorithm}, after \d+ steps", str(error)), error
        assert seconds < TIMEOUT + grace, (rank, seconds)
        first = outcome(requests[rank][0])[0]
        assert first is error or (moment and first is None)
        with pytest.raises(CommunicatorBroken, match="did not answer"):
            start(world.comms[rank], collective, algorithm, inputs[rank])
    return told


@pytest.mark.parametrize("collective", choose.NAMES)
def test_a_rank_is_missing(collective: str, count: Callable[[str], None], long: bool) -> None:
    # MPI's own algorithms: see tests/mpi/check_errors.py.
    algorithms = [algorithm for algorithm in choose.NAMES[collective] if algorithm not in choose.BY_MPI]
    cases = [(a, *when) for a in algorithms for when in ((0, RANKS - 1), (0, 0), (2, 1), (6, 2))]
    grace = GRACE if long else LONG_GRACE
    with ThreadPoolExecutor(3) as pool:  # more would take the GIL from each other
        told = list(pool.map(lambda case: late(collective, *case, grace), cases))
    for (algorithm, moment, _), ranks in zip(cases, told, strict=True):
        assert moment or ranks == RANKS - 1, f"by {algorithm}, some rank did not hear of one that never came"
        for _ in range(ranks):
            count(f"ranks that were told within {TIMEOUT} + {grace:g} s who is missing, and where")


@pytest.mark.parametrize(
    ("variable", "settings", "options", "limit"),
    [
        ("0.1", {}, {}, "0.1"),
        ("30", {"timeout": 0.2}, {}, "0.2"),
        ("30", {"timeout": 40}, {"timeout": 0.3}, "0.3"),
    ],
)
def test_whose_timeout_it_is(
    variable: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    limit: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The environment's, unless the communicator has one, unless the call has."""
    monkeypatch.setenv("COMPCOLL_TIMEOUT", variable)
    comm = World(2, **settings).comms[0]
    error, seconds = outcome(comm.iallgather(np.ones(9, np.float32), algorithm="ring", **options))
    assert isinstance(error, PeerTimeout) and f"nothing came for {limit} s" in str(error) and seconds < LONG_GRACE


CODED = {"codec": "minmax", "algorithm": "ring"}
LOOK, LIMIT = 0.05, 0.3


@pytest.mark.parametrize(
    ("call", "halfway"),
    [
        (lambda comm, x: comm.allreduce(x, **CODED), False),
        (lambda comm, x: comm.allreduce(x, **CODED), True),
        (lambda comm, x: comm.iallreduce(x, **CODED).wait(), True),
        (lambda comm, x: comm.allreduce(x, codec="zfp", tolerance=1e-3, algorithm="ring"), True),
        (lambda comm, x: comm.allreduce(x, codec="minmax", algorithm="recursive_doubling"), True),
    ],
    ids=["handshake", "replayed", "not blocking", "of variable size", "recursive doubling"],
)
def test_time_outs_are_seconds_and_not_looks(
    call: Callable[[Communicator, np.ndarray], object], halfway: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy core a look takes as long as others have it: here all of rank 0 do. The other rank's messages do not
    come, or none after its handshake.
    """
    world = World(2, timeout=LIMIT, ranks_per_node=1, seed=None)
    inputs = normals(2, 5000)
    silent, looks = False, 0
    threads: dict[int, int] = {}
    test, deliver = loopback._Transfer.Test, loopback.Loopback.deliver

    def slow_test(transfer: Any) -> bool:
        nonlocal looks
        if silent and threads[0] == get_ident():
            looks += 1
            time.sleep(LOOK)
        return test(transfer)

    def deliver_some(self: Any, key: loopback.Key) -> None:
        if not (silent and key[0] == 1 and key[2] >= halfway):
            deliver(self, key)

    def run(comm: Communicator, x: np.ndarray) -> None:
        threads[comm.rank] = get_ident()
        call(comm, x)

    monkeypatch.setattr(loopback._Transfer, "Test", slow_test)
    monkeypatch.setattr(loopback.Loopback, "deliver", deliver_some)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert len(list(pool.map(run, world.comms, inputs))) == 2
        silent = True
        ended = [pool.submit(run, *given) for given in zip(world.comms, inputs, strict=True)]
        assert isinstance(ended[0].exception(), PeerTimeout)
        assert ended[1].exception() is None or isinstance(ended[1].exception(), CompcollError)
    assert looks < LIMIT / LOOK + 18, looks  # 8 to 22, and some more where the clock begins after a number of looks
