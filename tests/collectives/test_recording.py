"""Blocking calls that are replayed from a recording, in one process; for real: tests/mpi/check_recordings.py."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, normals
from hypothesis import given
from hypothesis import strategies as st
from promises import ALGORITHMS, FIXED
from properties import examples

from compcoll import Communicator, ErrorFeedback
from compcoll.collectives.lanes import AT_ONCE
from compcoll.devices.host import HostDevice
from compcoll.errors import CollectiveMismatch, CommunicatorBroken, InvalidBuffer, PeerTimeout
from compcoll.kernels import _host
from compcoll.transports import loopback


def blocking(world: World, inputs: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    """A thread for each rank."""
    with ThreadPoolExecutor(len(inputs)) as pool:
        calls = [pool.submit(comm.allreduce, x, **options) for comm, x in zip(world.comms, inputs, strict=True)]
        return [call.result(60) for call in calls]


@given(
    st.integers(2, 6),
    st.sampled_from(ALGORITHMS),
    st.sampled_from([None, *FIXED]),
    st.integers(0, 5000),
    st.sampled_from([np.float32, np.float64, np.float16]),
    st.sampled_from(["sum", "mean"]),
)
@examples(40)
def test_the_bits_of_the_algorithm(ranks: int, algorithm: str, codec: Any, n: int, dtype: Any, op: str) -> None:
    replayed, run = (World(ranks, ranks_per_node=2, seed=None, timeout=30) for _ in range(2))
    how = {"algorithm": algorithm, "codec": codec, "op": op}
    for seed in range(4):  # run, rehearsed, replayed, replayed
        inputs = normals(ranks, n, dtype, seed)
        for ours, theirs in zip(blocking(replayed, inputs, **how), run.allreduce(inputs, **how), strict=True):
            np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))
    for one, other in zip(replayed.comms, run.comms, strict=True):
        a, b = one.stats, other.stats
        assert a is not None and b is not None
        assert (a.codec, a.algorithm, a.wire_nbytes, a.raw_sent_nbytes) == (
            *(b.codec, b.algorithm, b.wire_nbytes, b.raw_sent_nbytes),
        )


def test_calls_like_one_another_are_recorded_once_a_lane() -> None:
    world = World(2, seed=None, timeout=30)
    inputs = normals(2, 1000)
    feedback = [ErrorFeedback() for _ in range(2)]
    counts = []
    for _ in range(12):
        blocking(world, inputs, codec="zfp", rate=8, algorithm="ring")
        blocking(world, inputs, codec="zfp", rate=8, algorithm="direct")
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(comm.allreduce, x, codec="zfp", rate=8, algorithm="ring", feedback=kept)
                for comm, x, kept in zip(world.comms, inputs, feedback, strict=True)
            ]
            assert all(np.isfinite(call.result(60)).all() for call in calls)
        counts.append([len(comm._recordings._kept) for comm in world.comms])
    kinds, lanes = 3, 1 + AT_ONCE  # the ring's with feedback is another
    assert all(1 <= count <= kinds * lanes for count in counts[-1])


def test_what_is_called_once_is_not_recorded() -> None:
    world = World(2, seed=None, timeout=30)
    for n in range(10):
        blocking(world, normals(2, 1000 + n), codec="zfp", rate=8, algorithm="ring")
    assert all(not comm._recordings._kept for comm in world.comms)


@pytest.mark.parametrize("shape", [(500,), (5, 100), ()], ids=str)
def test_known_arguments_of_which_nothing_ran_yet(shape: tuple[int, ...]) -> None:
    """The first call ended before its algorithm began; the second, which is not checked anew, is the first to run."""
    world, inputs = World(2), [np.full(shape, rank, np.float32) for rank in range(2)]
    start = lambda x: lambda comm: comm.iallgather(x, codec="cast", algorithm="ring")  # noqa: E731
    told = world.errors([start(inputs[0]), start(np.ones(77, np.float32))])
    assert all(isinstance(error, CollectiveMismatch) for error in told)
    for _ in range(3):
        for result in world.run(lambda comm, x: start(x)(comm), inputs):
            np.testing.assert_array_equal(result, np.stack(inputs))


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("how", [{"codec": "zfp", "rate": 16, "algorithm": "ring"}, {"algorithm": "direct"}], ids=str)
def test_blocking_calls_wait_for_the_openings_before(how: dict[str, Any], late: int) -> None:
    """Those of calls that nobody has waited for yet; later ones go their fast way again."""
    world = World(2, seed=None, timeout=30)

    def run(comm: Communicator) -> None:
        def array(number: int) -> np.ndarray:
            return np.full(3000, number + comm.rank, np.float32)

        for _ in range(8):
            if comm.rank == late:
                time.sleep(0.01)
            pending = [comm.iallreduce(array(number), **how) for number in range(5)]
            np.testing.assert_allclose(comm.allreduce(array(5), **how), 11, rtol=1e-2)
            for number, request in enumerate(pending):
                np.testing.assert_allclose(request.wait(), 2 * number + 1, rtol=1e-2)
            np.testing.assert_allclose(comm.allreduce(array(6), **how), 13, rtol=1e-2)
        assert comm._turn is None and comm._executor.ready

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, world.comms)) == [None, None]


def test_openings_before_that_never_end_break_a_blocking_call() -> None:
    world = World(2, seed=None, timeout=1)
    how: dict[str, Any] = {"codec": "zfp", "rate": 16, "algorithm": "ring"}
    for seed in range(4):
        blocking(world, normals(2, 3000, seed=seed), **how)
    (comm, _), x = world.comms, np.ones(3000, np.float32)
    comm.iallreduce(x, **how)  # the other rank does not come
    with pytest.raises(PeerTimeout):
        comm.allreduce(x, **how)
    with pytest.raises(CommunicatorBroken):
        comm.allreduce(x, **how)


class _Message:
    """Comes at once."""

    def Start(self) -> None:
        pass

    def Test(self) -> bool:
        return True


def test_what_a_program_refuses() -> None:
    coder = HostDevice().coder(("zfp", 32, 0), "float32").bound
    program = _host.Program()
    wire = np.empty(coder.wire_nbytes(100), np.uint8)
    with pytest.raises(ValueError, match="nothing to sum"):
        program.encode(coder, 100, None, 1.0, [], None, True, 1.0, 0, 0, wire, None, 1)
    with pytest.raises(ValueError, match="too short"):
        program.encode(coder, 150, (0, 0), 1.0, [], None, True, 1.0, 0, 0, wire, None, 1)
    with pytest.raises(ValueError, match="no such array"):
        program.decode(coder, 100, None, 1.0, [wire], (3, 0), 1)
    program = _host.Program()
    assert program.start(_Message(), sends=True) and not program.start(_Message(), sends=False)
    program.wait(_Message())
    assert not program.start(_Message(), sends=True)  # it may depend on what came
    program.encode(coder, 100, (0, 50), 1.0, [], None, True, 1.0, 0, 0, wire, None, 1)
    program.decode(coder, 100, None, 1.0, [wire], (1, 0), 1)
    x, out = np.ones(150, np.float32), np.zeros(100, np.float32)
    for short in ((x[:149], out), (x, out[:99])):
        with pytest.raises(ValueError, match="shorter"):
            program.begin(*short, None, 0, 1, 0)
    assert program.done
    program.begin(x, out, None, 0, 1, 0)
    with pytest.raises(ValueError, match="has not ended"):
        program.begin(x, out, None, 0, 1, 0)
    assert not program.done and program.Test() and program.done and not program.Test()
    np.testing.assert_allclose(out, 1.0, rtol=1e-2)
    encode, decode, wait = program.account[3:]
    assert encode > 0 and decode > 0 and wait == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", range(2, 7))
def test_what_is_sent_ahead(algorithm: str, ranks: int) -> None:
    """All that a rank sends before it waits for anything, under one tag, unless it feeds back losses."""
    world = World(ranks, ranks_per_node=3, seed=None, timeout=30, codec="zfp", rate=8, algorithm=algorithm)
    inputs = normals(ranks, 4000)
    blocking(world, inputs)
    ahead: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(ranks)}
    for rank, comm in enumerate(world.comms):
        recipe, _ = comm._collectives.check("allreduce", inputs[rank], "sum", None, None, (..., None, {}))
        for with_feedback in (True, False):
            comm._recordings.body_for(recipe, with_feedback)
        assert recipe.with_feedback is not None and recipe.body is not None
        if algorithm != "hierarchical":  # members of a node lose nothing
            recordings = recipe.recordings
            assert not any(each.ahead for (_, with_feedback), each in recordings.items() if with_feedback)
            recipe.with_feedback.run_ahead(inputs[rank], 0)  # type: ignore[attr-defined]  # it is a Program
        assert comm._recordings.sent_ahead(recipe) is None
        recipe.body.run_ahead(inputs[rank], 0)
        before = comm._recordings.sent_ahead(recipe)
        if before is None:
            continue
        assert len({each.tag for each in before.sent}) <= 1
        ahead[rank] = [(each.dest, each.nbytes) for each in before.sent]
        with pytest.raises(ValueError, match="has not ended"):
            recipe.body.run_ahead(inputs[rank], 1)
        before.withdraw()
        assert not before.sent
    for rank, sent in ahead.items():
        dests = sorted(dest for dest, _ in sent)
        others = [other for other in range(ranks) if other != rank]
        if algorithm == "direct":
            assert dests == others
        elif algorithm == "ring":
            assert dests == [(rank + 1) % ranks]
        elif algorithm == "recursive_doubling":  # who waits for a rank outside sends nothing yet
            folded = ranks - (1 << ranks.bit_length() - 1)
            assert len(dests) == (0 if rank < 2 * folded and rank % 2 else 1)
        assert all(nbytes > 0 for _, nbytes in sent)
        if algorithm != "hierarchical":
            assert sum(nbytes for _, nbytes in sent) <= 4000


def test_what_is_forgotten_is_no_body_any_more() -> None:
    world, inputs = World(2, seed=None, timeout=30, codec="zfp", rate=8, algorithm="ring"), normals(2, 4000)
    blocking(world, inputs)
    comm = world.comms[0]
    recipe, _ = comm._collectives.check("allreduce", inputs[0], "sum", None, None, (..., None, {}))
    exact, fed_back = (comm._recordings.body_for(recipe, feedback) for feedback in (False, True))
    assert recipe.body is exact is not None and recipe.with_feedback is fed_back is not None
    comm._recordings._forget(next(each for each in recipe.recordings.values() if each.program is fed_back))
    assert recipe.body is exact and recipe.with_feedback is None
    comm._recordings.forget([recipe])
    assert recipe.body is None and not recipe.recordings and comm._recordings._messages == 0


CALLS: dict[str, dict[str, Any]] = {
    "usual": {"codec": "zfp", "rate": 8, "algorithm": "ring"},
    "longer wires": {"codec": "zfp", "rate": 16, "algorithm": "ring"},
    "other algorithm": {"codec": "zfp", "rate": 8, "algorithm": "direct"},
    "nothing sent ahead": {"codec": "zfp", "rate": 8, "algorithm": "ring", "feedback": True},
    "not replayed": {"codec": "zfp", "tolerance": 1e-3, "algorithm": "ring"},
    "refused": {"codec": "zfp", "rate": 8, "algorithm": "ring", "out": np.empty(3, np.float32)},
}


def left(world: World) -> int:
    """Messages that nobody has received, and receives to which nothing has come."""
    ends = [*world.loopback._sends.values(), *world.loopback._receives.values()]
    return sum(len(queue) for queue in ends)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "usual"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_was_sent_ahead_is_received_when_calls_do_not_belong_together(ranks: int, name: str) -> None:
    world = World(ranks, ranks_per_node=1, seed=None, timeout=30)
    inputs = normals(ranks, 20_000)
    before = [x.copy() for x in inputs]
    for _ in range(2):
        expected = blocking(world, inputs, **CALLS["usual"])

    def call(rank: int, odd: int) -> Exception | None:
        options = dict(CALLS[name if rank == odd else "usual"])
        if options.get("feedback"):
            options["feedback"] = ErrorFeedback()
        try:
            world.comms[rank].allreduce(inputs[rank], **options)
        except (CollectiveMismatch, InvalidBuffer) as error:
            return error
        return None

    for odd in range(ranks):
        with ThreadPoolExecutor(ranks) as pool:
            errors = list(pool.map(call, range(ranks), [odd] * ranks, timeout=60))
        assert all(isinstance(error, Exception) == (name != "nothing sent ahead") for error in errors), errors
        assert left(world) == 0
        for x, same in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(x, same)
        for _ in range(2):
            for ours, theirs in zip(blocking(world, inputs, **CALLS["usual"]), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
        assert left(world) == 0


def test_all_that_was_sent_ahead_has_come_before_a_mismatch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI writes to the memory of a receive until then."""
    received: list[loopback._Transfer] = []
    ended: set[loopback._Transfer] = set()
    receive, test = loopback.LoopbackTransport.irecv, loopback._Transfer.Test

    def noted_receive(transport: Any, wire: Any, source: int, tag: int) -> Any:
        transfer = receive(transport, wire, source, tag)
        if wire.discarded:
            received.append(transfer)
        return transfer

    def noted_test(transfer: Any) -> bool:
        if over := test(transfer):
            ended.add(transfer)
        return over

    monkeypatch.setattr(loopback.LoopbackTransport, "irecv", noted_receive)
    monkeypatch.setattr(loopback._Transfer, "Test", noted_test)
    world, inputs = World(2, ranks_per_node=1, seed=None, timeout=30), normals(2, 20_000)
    how: dict[str, Any] = {"codec": "zfp", "rate": 8, "algorithm": "direct"}
    for _ in range(2):
        blocking(world, inputs, **how)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(world.comms[0].allreduce, inputs[0], **how)
        # To who comes first; beside the second, whose call is not replayed, nobody of this process would send ahead.
        until = time.monotonic() + 60
        while sum(map(len, list(world.loopback._sends.values()))) < 2:
            assert time.monotonic() < until, "nothing was sent ahead"
            time.sleep(0.001)
        second = pool.submit(world.comms[1].allreduce, inputs[1][:100], **how)
        assert isinstance(first.exception(60), CollectiveMismatch)
        assert isinstance(second.exception(60), CollectiveMismatch)
    assert received and ended.issuperset(received)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_was_sent_ahead_is_received_when_a_rank_has_others_to_advance(algorithm: str) -> None:
    ranks = 3
    world = World(ranks, ranks_per_node=2, seed=None, timeout=30)
    inputs, how = normals(ranks, 20_000), {"codec": "zfp", "rate": 8, "algorithm": algorithm}
    for _ in range(2):
        expected = blocking(world, inputs, **how)

    def call(rank: int, nonblocking: int) -> np.ndarray:
        comm = world.comms[rank]
        result: np.ndarray
        result = (
            comm.iallreduce(inputs[rank], **how).wait() if rank == nonblocking else comm.allreduce(inputs[rank], **how)
        )
        return result

    for nonblocking in range(ranks):
        with ThreadPoolExecutor(ranks) as pool:
            calls = [pool.submit(call, rank, nonblocking) for rank in range(ranks)]
            for ours, theirs in zip([each.result(60) for each in calls], expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
        assert left(world) == 0


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_feedback_is_left_alone_by_calls_that_do_not_belong_together(algorithm: str) -> None:
    """Replayed ones, of which members of a node send ahead what loses nothing."""
    ranks = 3
    world = World(ranks, ranks_per_node=2, seed=None, timeout=30)
    inputs, feedbacks = normals(ranks, 20_000), [ErrorFeedback() for _ in range(ranks)]

    def call(rank: int, nonblocking: int | None, odd: int | None) -> np.ndarray | Exception:
        comm, rate = world.comms[rank], 4 if rank == odd else 8
        start = comm.iallreduce if rank == nonblocking else comm.allreduce
        how: dict[str, Any] = {"codec": "zfp", "rate": rate, "algorithm": algorithm, "feedback": feedbacks[rank]}
        try:
            started = start(inputs[rank], **how)
            result: np.ndarray = started.wait() if rank == nonblocking else started
        except CollectiveMismatch as error:
            return error
        return result

    def of_all(nonblocking: int | None = None, odd: int | None = None) -> list[Any]:
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(call, range(ranks), [nonblocking] * ranks, [odd] * ranks, timeout=60))

    def held() -> list[bytes]:
        return [feedback.state_dict()["residual"].tobytes() for feedback in feedbacks]

    for nonblocking in (None, None, *range(ranks), None):
        results = of_all(nonblocking)
        assert len({result.tobytes() for result in results}) == 1
        exact = sum(inputs)
        assert np.linalg.norm(results[0] - exact) < 0.2 * np.linalg.norm(exact)
        assert left(world) == 0
    for odd in range(ranks):
        before = held()
        assert all(isinstance(each, CollectiveMismatch) for each in of_all(odd=odd))
        assert held() == before and any(any(residual) for residual in before)
        assert left(world) == 0
    assert held() != (of_all(), held())[1]
