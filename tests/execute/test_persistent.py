"""Persistent requests: one check of the arguments, many runs on the same arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, normals
from hypothesis import given, settings
from hypothesis import strategies as st

from compcoll import Communicator, ErrorFeedback, communicator
from compcoll.errors import CommunicatorBroken, InvalidArgument
from compcoll.execute.slots import AT_ONCE

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("allreduce", {"codec": "minmax", "algorithm": "ring"}),
    ("allreduce", {"op": "max"}),
    ("allreduce", {"codec": "zfp", "tolerance": 1e-3, "algorithm": "direct"}),
    ("reduce_scatter", {"codec": "minmax", "algorithm": "direct", "op": "mean"}),
    ("allgather", {"codec": "cast", "algorithm": "ring"}),
    ("bcast", {"codec": "cast", "algorithm": "binomial", "root": 1}),
    ("alltoall", {"algorithm": "pairwise"}),
    ("reduce", {"codec": "minmax", "algorithm": "ring", "root": 2}),
    ("gather", {"codec": "cast", "algorithm": "linear", "root": 1}),
    ("scatter", {"codec": "cast", "algorithm": "linear", "root": 1}),
]


@pytest.mark.parametrize(("collective", "how"), CALLS, ids=lambda value: value if type(value) is str else "")
def test_every_run_is_a_call(collective: str, how: dict[str, Any]) -> None:
    world, other, n = World(3), World(3), 90
    arrays = [np.empty(n, np.float32) for _ in range(3)]
    requests = [getattr(comm, f"{collective}_init")(x, **how) for comm, x in zip(world.comms, arrays)]
    assert all(request.done for request in requests)
    kept = None
    for number in range(2 * AT_ONCE + 1):
        for x, values in zip(arrays, normals(3, n, seed=number)):
            x[:] = values
        results = world.loopback.run([request.start() for request in requests])
        expected = other.run(lambda comm, x: getattr(comm, f"i{collective}")(x, **how), [x.copy() for x in arrays])
        for ours, theirs in zip(results, expected):
            np.testing.assert_array_equal(ours, theirs)
        kept = kept or results
        assert all(ours is same for ours, same in zip(results, kept))  # memory is the same each time
        assert requests[0].stats.algorithm == other.comms[0].stats.algorithm
        assert requests[0].stats.wire_nbytes == other.comms[0].stats.wire_nbytes


def test_feedback_goes_on_from_run_to_run() -> None:
    world, other = World(2), World(2)
    how: dict[str, Any] = {"codec": "minmax", "bits": 2, "algorithm": "ring"}
    inputs, feedbacks = normals(2, 500), [[ErrorFeedback() for _ in range(2)] for _ in range(2)]
    requests = [comm.allreduce_init(x, feedback=f, **how) for comm, x, f in zip(world.comms, inputs, feedbacks[0])]
    for number in range(6):
        if number == 3:
            for feedback in feedbacks[0] + feedbacks[1]:
                feedback.reset()
        results = world.loopback.run([request.start() for request in requests])
        expected = other.loopback.run(
            [comm.iallreduce(x, feedback=f, **how) for comm, x, f in zip(other.comms, inputs, feedbacks[1])]
        )
        np.testing.assert_array_equal(results[0], expected[0])
        assert feedbacks[0][0].residual.tobytes() == feedbacks[1][0].residual.tobytes()


def test_another_librarys_array() -> None:
    world = World(2)
    memory = [memoryview(np.full(8, rank + 1.0, np.float32)) for rank in range(2)]
    requests = [comm.allreduce_init(x) for comm, x in zip(world.comms, memory)]
    for result in world.loopback.run([request.start() for request in requests]):
        assert isinstance(result, memoryview) and result.tolist() == [3.0] * 8


def test_what_cannot_be_started() -> None:
    world = World(2)
    requests = [comm.allreduce_init(np.ones(5000, np.float32), algorithm="ring") for comm in world.comms]
    first = requests[0].start()
    for refused in (first.start, first.free):
        with pytest.raises(InvalidArgument, match="before the last run has ended"):
            refused()
    world.loopback.run([first, requests[1].start()])
    assert (first.wait() == 2).all() and first.test()
    first.free()
    with pytest.raises(InvalidArgument, match="was freed"):
        first.start()
    world.comms[1]._broken = CommunicatorBroken("the test broke it")
    with pytest.raises(CommunicatorBroken):
        requests[1].start()


def test_several_under_way_beside_others() -> None:
    world = World(2)

    def prepared(comm: Communicator) -> list[Any]:
        return [comm.allreduce_init(np.full(300, k + comm.rank, np.float32), algorithm="ring") for k in range(6)]

    requests = [prepared(comm) for comm in world.comms]
    for _ in range(3):
        pending = [[request.start() for request in every] for every in requests]
        pending = [[*every, comm.iallreduce(np.ones(10))] for every, comm in zip(pending, world.comms)]
        results = world.loopback.run([request for pair in zip(*pending) for request in pair])
        for k, result in enumerate(results[:12:2]):
            assert (result == 2 * k + 1).all()


KINDS: list[tuple[int, dict[str, Any]]] = [
    (3, {}),  # travels with the handshake
    (300, {"algorithm": "ring"}),
    (300, {"codec": "cast", "algorithm": "recursive_doubling"}),
    (8, {"op": "max"}),
]


class Rank:
    """One rank's program: starts of persistent requests, each after that request's last run, and other collectives."""

    def __init__(self, comm: Communicator, program: list[int]) -> None:
        self.comm, self.program, self.at = comm, program, 0
        self.arrays = [np.empty(n, np.float32) for n, _ in KINDS]
        self.requests = [comm.allreduce_init(x, **how) for x, (_, how) in zip(self.arrays, KINDS)]
        self.runs: list[tuple[Any, int, int]] = []  # requests, their kinds, and the steps at which they started
        self.others: list[Any] = []

    def go_on(self) -> bool:
        """Take the next step, if that needs no wait; return whether all is over."""
        if self.at == len(self.program):
            over = [request.test() for request in (*self.requests, *self.others)]
            return all(over)
        kind = self.program[self.at]
        if kind == len(KINDS):
            self.others.append(self.comm.iallreduce(np.full(50, self.comm.rank + self.at, np.float32)))
        elif not self.requests[kind].test():
            return False
        else:
            self.check(kind)
            self.arrays[kind][:] = self.comm.rank + self.at
            self.requests[kind].start()
            self.runs.append((self.requests[kind], kind, self.at))
        self.at += 1
        return False

    def check(self, kind: int) -> None:
        """Check the result of the last run of a persistent request."""
        for request, other, at in self.runs[::-1]:
            if other == kind:
                terms = [rank + at for rank in range(self.comm.size)]
                assert (request.wait() == (max(terms) if "op" in KINDS[kind][1] else sum(terms))).all()
                return


@settings(max_examples=60, deadline=None)
@given(
    program=st.lists(st.integers(0, len(KINDS)), min_size=1, max_size=10),
    order=st.lists(st.integers(0, 2), max_size=120),
    size=st.integers(2, 3),
)
def test_ranks_that_are_early_and_late(program: list[int], order: list[int], size: int) -> None:
    """Some ranks have others under way when they start, and some have not: see ``FREE`` and ``BUSY``."""
    world = World(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "under_way", ())  # it is of a process, which has all ranks here
        ranks = [Rank(comm, program) for comm in world.comms]
        for number in order:
            ranks[number % size].go_on()
        for _ in range(1000):
            over = [rank.go_on() for rank in ranks]
            if all(over):
                break
        else:
            pytest.fail(str([[r.describe() for r in comm._engine.active] for comm in world.comms]))
        for rank in ranks:
            assert rank.at == len(program)
            for kind in range(len(KINDS)):
                rank.check(kind)
            for at, request in zip([at for at, kind in enumerate(program) if kind == len(KINDS)], rank.others):
                assert (request.wait() == sum(r + at for r in range(size))).all()
