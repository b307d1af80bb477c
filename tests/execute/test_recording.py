"""Blocking calls, which programs run, in one process; for real: tests/mpi/check_recordings.py."""

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
from compcoll.errors import CollectiveMismatch, CommunicatorBroken, InvalidBuffer, PeerTimeout
from compcoll.execute.slots import AT_ONCE
from compcoll.host.device import HostDevice
from compcoll.kernels import _host


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
    for seed in range(4):  # compiled, repeated
        inputs = normals(ranks, n, dtype, seed)
        for ours, theirs in zip(blocking(replayed, inputs, **how), run.allreduce(inputs, **how), strict=True):
            np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))
    for one, other in zip(replayed.comms, run.comms, strict=True):
        a, b = one.stats, other.stats
        assert a is not None and b is not None
        assert (a.codec, a.algorithm, a.wire_nbytes, a.raw_sent_nbytes) == (
            *(b.codec, b.algorithm, b.wire_nbytes, b.raw_sent_nbytes),
        )


def test_calls_like_one_another_are_compiled_once_a_lane() -> None:
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
        counts.append([len(comm._programs._kept) for comm in world.comms])
    kinds, slots = 3, 1 + AT_ONCE  # the ring's with feedback is another
    assert all(1 <= count <= kinds * slots for count in counts[-1])


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
        assert comm._ticket is not None and comm._ticket.over

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, world.comms)) == [None, None]


def test_handshakes_before_that_never_end_break_a_blocking_call() -> None:
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
    program.start(_Message())
    program.wait(_Message())
    program.encode(coder, 100, (0, 50), 1.0, [], None, True, 1.0, 0, 0, wire, None, 1)
    program.decode(coder, 100, None, 1.0, [wire], (1, 0), 1)
    x, out = np.ones(150, np.float32), np.zeros(100, np.float32)
    for short in ((x[:149], out), (x, out[:99])):
        with pytest.raises(ValueError, match="shorter"):
            program.begin(*short, None, 0)
    assert program.done
    program.begin(x, out, None, 0)
    with pytest.raises(ValueError, match="has not ended"):
        program.begin(x, out, None, 0)
    assert not program.done and program.Test() and program.done and not program.Test()
    np.testing.assert_allclose(out, 1.0, rtol=1e-2)
    encode, decode, wait = program.account[2:]
    assert encode > 0 and decode > 0 and wait == 0


def test_programs_that_are_forgotten_are_compiled_again() -> None:
    world, inputs = World(2, seed=None, timeout=30, codec="zfp", rate=8, algorithm="ring"), normals(2, 4000)
    expected = blocking(world, inputs)
    for comm in world.comms:
        assert comm._programs._kept and comm._programs._messages > 0
        comm._programs.free()
        assert comm._programs._messages == 0 and not comm._programs._kept
    for ours, theirs in zip(blocking(world, inputs), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


CALLS: dict[str, dict[str, Any]] = {
    "usual": {"codec": "zfp", "rate": 8, "algorithm": "ring"},
    "longer wires": {"codec": "zfp", "rate": 16, "algorithm": "ring"},
    "other algorithm": {"codec": "zfp", "rate": 8, "algorithm": "direct"},
    "with feedback": {"codec": "zfp", "rate": 8, "algorithm": "ring", "feedback": True},
    "no program": {"codec": "zfp", "tolerance": 1e-3, "algorithm": "ring"},
    "refused": {"codec": "zfp", "rate": 8, "algorithm": "ring", "out": np.empty(3, np.float32)},
}


def left(world: World) -> int:
    """Messages that nobody has received, and receives to which nothing has come."""
    ends = [*world.loopback._sends.values(), *world.loopback._receives.values()]
    return sum(len(queue) for queue in ends)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "usual"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_nothing_is_under_way_after_calls_that_do_not_belong_together(ranks: int, name: str) -> None:
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
        assert all(isinstance(error, Exception) == (name != "with feedback") for error in errors), errors
        assert left(world) == 0
        for x, same in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(x, same)
        for _ in range(2):
            for ours, theirs in zip(blocking(world, inputs, **CALLS["usual"]), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
        assert left(world) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_blocking_calls_belong_to_one_that_does_not_block(algorithm: str) -> None:
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
