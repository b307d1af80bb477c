"""What a communicator makes of where its ranks are, and of calls that go another way than the usual one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, exact_sum, normals
from fakes.threads import on_ranks
from oracles.collectives import arguments, has_result

from compcoll import Communicator, ErrorFeedback, communicator, config
from compcoll.errors import CompcollError
from compcoll.execute.compiled_plan import Buffers, Run
from compcoll.execute.engine import Engine
from compcoll.execute.slots import AT_ONCE
from compcoll.pending import OrderingTicket, Steps
from compcoll.plan.signature import Signature
from compcoll.transports import loopback
from compcoll.transports.base import Wire
from compcoll.transports.loopback import Loopback, LoopbackTransport

# Ranks, of these on a node, cores that a process may use, a rank's share if the transport knows it, and whether MPI
# lends cores; then: the share, whether ranks are crowded, and whether cores are lent.
PLACES: list[tuple[int, int, int, float | None, bool, float, bool, bool]] = [
    (4, 4, 8, None, True, 2.0, False, False),
    (4, 4, 4, None, False, 1.0, False, False),
    (4, 4, 2, None, True, 0.5, True, False),
    (4, 2, 3, None, False, 1.5, True, False),
    (4, 2, 8, None, True, 4.0, True, True),
    (2, 2, 8, 0.75, False, 0.75, True, False),
    (2, 2, 1, 1.0, False, 1.0, False, False),
    (2, 2, 1, 1.25, False, 1.25, False, False),
    (1, 1, 8, None, False, 8.0, False, False),
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What communicators are made of."""
    found: dict[str, Any] = {}
    engine, threads = communicator.Engine, config.threads

    def noted_engine(seconds: float, peers: Any, **settings: Any) -> Any:
        found.update(settings, seconds=seconds)
        return engine(seconds, peers, **settings)

    def noted_threads(share: float) -> int:
        found["share"] = share
        return threads(share)

    monkeypatch.setattr(communicator, "Engine", noted_engine)
    monkeypatch.setattr(config, "threads", noted_threads)
    monkeypatch.delenv("COMPCOLL_TIMEOUT", raising=False)
    return found


@pytest.mark.parametrize(("size", "per_node", "cores", "told", "lends", "share", "crowded", "lent"), PLACES)
def test_cores_are_shared_by_the_ranks_of_a_node(
    size: int,
    per_node: int,
    cores: int,
    told: float | None,
    lends: bool,
    share: float,
    crowded: bool,
    lent: bool,
    made: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(communicator, "usable_cores", lambda: cores)
    transport: Any = Loopback(size, per_node).transports[-1]
    transport.cores, transport.lends_core = told, lends
    comm = Communicator(transport)
    assert made["share"] == share and made["crowded"] == crowded and made["lent"] == lent
    assert (comm._collectives._ranks.shared is not None) == (size == per_node)
    assert (comm._collectives._setting.shared, comm._collectives._setting.library) == (size == per_node, "")


@pytest.mark.parametrize("progress", ["wait", "sleep", "thread"])
@pytest.mark.parametrize("blocks", [False, True])
def test_settings_reach_the_engine(progress: str, blocks: bool, made: dict[str, Any]) -> None:
    transport: Any = Loopback(2).transports[0]
    transport.blocks = blocks
    comm = Communicator(transport, progress=progress, timeout=7)
    assert (made["threaded"], made["sleeps"], made["private"]) == (progress == "thread", progress == "sleep", blocks)
    assert made["seconds"] == 7
    comm.free()


@pytest.mark.parametrize(
    ("size", "settings", "variable", "has_timeout", "sealed"),
    [
        (2, {}, None, False, False),
        (2, {"timeout": 3}, None, True, False),
        (2, {}, "3", True, False),
        (2, {"checksum": True}, None, False, True),
        (1, {"checksum": True}, None, False, False),  # nothing travels
    ],
)
def test_who_must_not_block_and_who_seals(
    size: int,
    settings: dict[str, Any],
    variable: str | None,
    has_timeout: bool,
    sealed: bool,
    made: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("COMPCOLL_TIMEOUT", variable)
    ranks = World(size, **settings).comms[0]._collectives._ranks
    assert (ranks.has_timeout, ranks.checksum) == (has_timeout, sealed) and made["seconds"] == (
        1800 if not has_timeout else 3
    )


def test_tags_of_openings_and_lanes_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane has tags for all phases of a collective: none is a handshake's, or another lane's."""
    tags: set[int] = set()
    isend = LoopbackTransport.isend

    def noted(transport: LoopbackTransport, wire: Wire, dest: int, tag: int) -> Any:
        tags.add(tag)
        return isend(transport, wire, dest, tag)

    monkeypatch.setattr(LoopbackTransport, "isend", noted)
    world, seen = World(4, ranks_per_node=2), []
    for _ in range(AT_ONCE):
        tags.clear()
        world.allreduce(normals(4, 500), codec="minmax", algorithm="hierarchical")
        seen.append(set(tags))
    handshake = set.intersection(*seen)
    slots = [each - handshake for each in seen]
    assert handshake == {0} and all(slots)  # and 1, where ranks tell each other their calls
    assert sum(map(len, slots)) == len(set().union(*slots)) and min(set().union(*slots)) > max(handshake) + 1


RING: dict[str, Any] = {"codec": "minmax", "bits": 4, "algorithm": "ring"}


@pytest.fixture
def others_to_advance() -> Any:
    """Another communicator of this process, on which something is under way: nobody may block."""
    world = World(2)
    pending = world.comms[0].iallreduce(np.ones(8, np.float32))
    yield
    world.loopback.run([pending, world.comms[1].iallreduce(np.ones(8, np.float32))])


def blocking(world: World, inputs: list[np.ndarray], kept: list[Any], how: dict[str, Any]) -> list[np.ndarray]:
    def run(comm: Communicator, x: np.ndarray, feedback: Any) -> np.ndarray:
        started = time.perf_counter()
        result = comm.allreduce(x, feedback=feedback, **how)
        passed, stats = time.perf_counter() - started, comm.stats
        assert stats is not None and 0 < stats.total_seconds < passed
        return result

    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(run, world.comms, inputs, kept))


@pytest.mark.usefixtures("others_to_advance")
@pytest.mark.parametrize("fed_back", [False, True])
@pytest.mark.parametrize("how", [RING, {"algorithm": "direct"}, {"algorithm": "dissemination"}], ids=str)
def test_blocking_calls_beside_others_are_like_those_that_do_not_block(how: dict[str, Any], fed_back: bool) -> None:
    """The same bits and account, in all lanes."""
    worlds = [World(2, seed=None, timeout=30) for _ in range(2)]
    feedbacks = [[ErrorFeedback() if fed_back else None for _ in range(2)] for _ in worlds]
    for number in range(2 * AT_ONCE + 1):
        inputs = normals(2, 900, seed=number)
        ours = blocking(worlds[0], inputs, feedbacks[0], how)
        requests = [c.iallreduce(x, feedback=f, **how) for c, x, f in zip(worlds[1].comms, inputs, feedbacks[1])]
        theirs = worlds[1].loopback.run(requests)
        np.testing.assert_array_equal(np.stack(ours), np.stack(theirs))
        for comm, other in zip(*(world.comms for world in worlds), strict=True):
            a, b = comm.stats, other.stats
            assert a is not None and b is not None
            assert (a.collective, a.codec, a.algorithm, a.raw_nbytes) == ("allreduce", b.codec, b.algorithm, 3600)
            assert (a.wire_nbytes, a.raw_sent_nbytes) == (b.wire_nbytes, b.raw_sent_nbytes)
            assert comm.sequence_number == number + 1
    if fed_back and "codec" in how:
        assert all(f.residual.any() for f in feedbacks[0])


def test_calls_with_feedback_and_without_take_turns() -> None:
    """In one lane, by one plan: a program that feeds back, and one that does not."""
    worlds, inputs = [World(2), World(2)], normals(2, 500)
    feedbacks = [[ErrorFeedback() for _ in range(2)] for _ in worlds]
    for number in range(6 * AT_ONCE):
        fed_back = number // AT_ONCE % 2 == 1
        sums = []
        for world, kept in zip(worlds, feedbacks, strict=True):
            for comm in world.comms if world is worlds[1] else ():
                comm._collectives._plans.clear(), comm._known.clear()  # so that each call is the first
            given = kept if fed_back else [None, None]
            requests = [c.iallreduce(x, feedback=f, **RING) for c, x, f in zip(world.comms, inputs, given)]
            sums.append(np.stack(world.loopback.run(requests)))
        np.testing.assert_array_equal(*sums)
    assert feedbacks[0][0].residual.tobytes() == feedbacks[1][0].residual.tobytes() and feedbacks[0][0].residual.any()


def test_turns_are_taken_by_what_needs_them_only() -> None:
    """Calls with tags of their own may overtake each other once they are opened; those of MPI's keep their order."""
    comm = World(2).comms[0]
    first = comm.iallreduce(np.ones(50, np.float32), **RING)
    ticket = comm._ticket
    assert isinstance(ticket, OrderingTicket) and not ticket.used and not first.done
    comm.iallreduce(np.ones(50, np.float32), **RING)
    assert comm._ticket is not ticket and comm._ticket is not None and comm._ticket.before is ticket
    comm._engine.fail(CompcollError("the test is over"))


@pytest.mark.parametrize("everybody", [True, False])
def test_the_way_of_gpus_is_taken_if_all_ranks_are_on_them(everybody: bool) -> None:
    """Else all take the one that host arrays take, too."""
    world, inputs = World(2), normals(2, 60)

    def carried(buffers: Buffers, run: Run) -> Steps:
        run.ticket.used = True
        yield None
        return "carried"

    def start(comm: Communicator, x: np.ndarray) -> Any:
        plan, buffers = comm._collectives.check("allreduce", x, "sum", None, None, (None, "ring", {}))
        if comm.rank == 0 or everybody:
            plan.on_gpus, buffers = carried, buffers._replace(order=SimpleNamespace())  # type: ignore[arg-type]
        return comm._begin("allreduce", plan, buffers)

    for result in world.run(start, inputs):
        if everybody:
            assert result == "carried"
        else:
            np.testing.assert_allclose(result, exact_sum(inputs), atol=1e-5)


def test_a_handshake_waits_for_the_openings_before_it() -> None:
    """It is a call like others, and counts."""
    world = World(2, seed=None, timeout=30)

    def run(comm: Communicator) -> tuple[int, np.ndarray]:
        pending = comm.iallreduce(np.full(700, comm.rank + 1.0, np.float32), algorithm="ring")
        comm._agree(Signature("something else"))
        assert comm._ticket is not None and comm._ticket.over
        return comm.sequence_number, pending.wait()

    with ThreadPoolExecutor(2) as pool:
        for begun, result in pool.map(run, world.comms):
            assert begun == 2 and (result == 3).all()


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("allreduce", RING),
    ("reduce_scatter", RING),
    ("allgather", RING),
    ("allgatherv", RING),
    ("bcast", {"codec": "minmax", "algorithm": "binomial"}),
    ("alltoall", {"codec": "minmax", "algorithm": "pairwise"}),
    ("alltoallv", {"codec": "minmax", "algorithm": "pairwise"}),
    ("reduce", RING),
    ("gather", {"codec": "minmax", "algorithm": "linear"}),
    ("scatter", {"codec": "minmax", "algorithm": "linear"}),
]


@pytest.mark.parametrize(("collective", "how"), CALLS, ids=lambda value: value if type(value) is str else "")
def test_blocking_and_other_calls_have_the_same_bits(collective: str, how: dict[str, Any]) -> None:
    """The first one, and those that repeat it."""
    worlds = [World(3, seed=None, timeout=30) for _ in range(2)]

    def run(comm: Communicator, x: np.ndarray, prefix: str = "") -> Any:
        more = arguments(collective, len(x), comm.size, comm.rank, root=1)
        return getattr(comm, prefix + collective)(x, **how, **more)

    for number in range(4):
        inputs = [x.reshape(3, 50) for x in normals(3, 150, seed=number)]
        with ThreadPoolExecutor(3) as pool:
            ours = list(pool.map(run, worlds[0].comms, inputs))
        theirs = worlds[1].run(partial(run, prefix="i"), inputs)
        for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if has_result(collective, rank, root=1):
                assert one.shape == other.shape and one.tobytes() == other.tobytes()
            else:
                assert one is other is None


def test_messages_that_come_late_are_waited_for_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a blocking call has looked often enough: then all else that is under way goes on, and time-outs count."""
    world, held, followed = World(2, seed=None, timeout=30), False, []
    deliver, follow = loopback.Loopback.deliver, Engine.follow

    def late(self: Loopback, key: loopback.Key) -> None:
        if not (held and key[2] >= 4 and time.monotonic() < begin + 0.5):
            deliver(self, key)

    def noted(self: Engine, steps: Steps, waiting: object, timeout: float | None) -> Any:
        followed.append(str(waiting))
        return follow(self, steps, waiting, timeout)

    monkeypatch.setattr(loopback.Loopback, "deliver", late)
    monkeypatch.setattr(Engine, "follow", noted)
    begin = time.monotonic()
    for number in range(3):
        held, begin = number == 2, time.monotonic()
        inputs = normals(2, 900, seed=number)
        for result in blocking(world, inputs, [None, None], RING):
            np.testing.assert_allclose(result, exact_sum(inputs), atol=1.0)
    assert time.monotonic() >= begin + 0.5 and any("ring" in each for each in followed)


@pytest.mark.parametrize("codec", ["intsum", "sign"])
def test_numbers_are_added_by_mpi(codec: str) -> None:
    """The same sums as by messages of ours; MPI does not tell what it sent."""
    inputs = normals(3, 700)

    def run(comm: Communicator) -> np.ndarray:
        result: np.ndarray = comm.allreduce(inputs[comm.rank], codec=codec, algorithm="native")
        stats = comm.stats
        assert stats is not None and (stats.wire_nbytes, stats.raw_sent_nbytes, stats.ratio) == (-1, 0, 1.0)
        assert stats.algorithm == "native" and stats.codec is not None
        return result

    expected = World(3).allreduce(inputs, codec=codec, algorithm="recursive_doubling")[0]
    for result in on_ranks(3, run):
        np.testing.assert_array_equal(result, expected)
