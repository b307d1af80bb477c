"""Every pair of collectives that do not belong together: all ranks learn who called what, and where."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, exact_sum, normals
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from compcoll import ZFP, Communicator, Request
from compcoll.errors import CollectiveMismatch, CommunicatorBroken, CompcollError, WireCorrupted
from compcoll.execute.handshake import Handshake
from compcoll.pending import Pending, Steps
from compcoll.plan.signature import BUSY, FREE, ON_GPU, Signature
from compcoll.transports.base import Persistent, Wire
from compcoll.transports.loopback import Loopback, LoopbackTransport

X = np.ones(600, np.float32)
CALLS: dict[str, Callable[[Communicator], Request]] = {
    "allreduce": lambda comm: comm.iallreduce(X, algorithm="direct"),
    "allreduce zfp": lambda comm: comm.iallreduce(X, codec="zfp", algorithm="ring"),
    "allreduce topk": lambda comm: comm.iallreduce(X, codec="topk", algorithm="sparse_ring"),
    "small allreduce": lambda comm: comm.iallreduce(X[:2], algorithm="recursive_doubling"),
    "reduce_scatter": lambda comm: comm.ireduce_scatter(X, algorithm="ring"),
    "allgather": lambda comm: comm.iallgather(X, algorithm="ring"),
    "allgatherv": lambda comm: comm.iallgatherv(X, algorithm="ring"),
    "bcast": lambda comm: comm.ibcast(X, algorithm="binomial"),
    "alltoall": lambda comm: comm.ialltoall(X, algorithm="pairwise"),
    "alltoallv": lambda comm: comm.ialltoallv(X, [300, 0, 300], algorithm="pairwise"),
    "reduce": lambda comm: comm.ireduce(X, algorithm="ring"),
    "gather": lambda comm: comm.igather(X, algorithm="linear"),
    "scatter": lambda comm: comm.iscatter(X, algorithm="linear"),
}


# Of each collective, what two ranks may not give differently; the usual call is the first.
ARGUMENTS: dict[str, dict[str, tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "allreduce": {
        "usual": ((X,), {"codec": "zfp", "rate": 8, "algorithm": "ring"}),
        "size": ((X[:599],), {"codec": "zfp", "rate": 8, "algorithm": "ring"}),
        "dtype": ((X.astype(np.float64),), {"codec": "zfp", "rate": 8, "algorithm": "ring"}),
        "rate": ((X,), {"codec": "zfp", "rate": 12, "algorithm": "ring"}),
        "codec": ((X,), {"codec": "minmax", "algorithm": "ring"}),
        "no codec": ((X,), {"algorithm": "ring"}),
        "algorithm": ((X,), {"codec": "zfp", "rate": 8, "algorithm": "direct"}),
        "op": ((X,), {"codec": "zfp", "rate": 8, "algorithm": "ring", "op": "mean"}),
    },
    "reduce_scatter": {
        "usual": ((X,), {"codec": "cast", "algorithm": "ring"}),
        "size": ((X[:597],), {"codec": "cast", "algorithm": "ring"}),
        "dtype": ((X.astype(np.float64),), {"codec": "cast", "algorithm": "ring"}),
        "codec": ((X,), {"codec": "fp8", "algorithm": "ring"}),
        "algorithm": ((X,), {"codec": "cast", "algorithm": "direct"}),
        "op": ((X,), {"codec": "cast", "algorithm": "ring", "op": "mean"}),
    },
    "allgather": {
        "usual": ((X,), {"codec": "cast", "algorithm": "ring"}),
        "size": ((X[:599],), {"codec": "cast", "algorithm": "ring"}),
        "dtype": ((X.astype(np.float64),), {"codec": "cast", "algorithm": "ring"}),
        "codec": ((X,), {"codec": "fp8", "algorithm": "ring"}),
        "algorithm": ((X,), {"codec": "cast", "algorithm": "direct"}),
    },
    "allgatherv": {
        "usual": ((X,), {"codec": "cast", "algorithm": "ring"}),
        "dtype": ((X.astype(np.float64),), {"codec": "cast", "algorithm": "ring"}),
        "codec": ((X,), {"codec": "fp8", "algorithm": "ring"}),
        "algorithm": ((X,), {"codec": "cast", "algorithm": "direct"}),
    },
    "bcast": {
        "usual": ((X, 0), {"codec": "cast", "algorithm": "binomial"}),
        "size": ((X[:599], 0), {"codec": "cast", "algorithm": "binomial"}),
        "dtype": ((X.astype(np.float64), 0), {"codec": "cast", "algorithm": "binomial"}),
        "codec": ((X, 0), {"codec": "fp8", "algorithm": "binomial"}),
        "root": ((X, 1), {"codec": "cast", "algorithm": "binomial"}),
    },
    "alltoall": {
        "usual": ((X,), {"codec": "cast", "algorithm": "pairwise"}),
        "size": ((X[:597],), {"codec": "cast", "algorithm": "pairwise"}),
        "dtype": ((X.astype(np.float64),), {"codec": "cast", "algorithm": "pairwise"}),
        "codec": ((X,), {"codec": "fp8", "algorithm": "pairwise"}),
    },
    "alltoallv": {
        "usual": ((X, [100, 200, 300]), {"codec": "cast", "algorithm": "pairwise"}),
        "dtype": ((X.astype(np.float64), [100, 200, 300]), {"codec": "cast", "algorithm": "pairwise"}),
        "rows": ((X.reshape(300, 2), [100, 200, 0]), {"codec": "cast", "algorithm": "pairwise"}),
        "codec": ((X, [100, 200, 300]), {"codec": "fp8", "algorithm": "pairwise"}),
    },
    "reduce": {
        "usual": ((X, 0), {"codec": "cast", "algorithm": "ring"}),
        "size": ((X[:597], 0), {"codec": "cast", "algorithm": "ring"}),
        "dtype": ((X.astype(np.float64), 0), {"codec": "cast", "algorithm": "ring"}),
        "codec": ((X, 0), {"codec": "fp8", "algorithm": "ring"}),
        "algorithm": ((X, 0), {"codec": "cast", "algorithm": "direct"}),
        "op": ((X, 0), {"codec": "cast", "algorithm": "ring", "op": "mean"}),
        "root": ((X, 1), {"codec": "cast", "algorithm": "ring"}),
    },
    "gather": {
        "usual": ((X, 0), {"codec": "cast", "algorithm": "linear"}),
        "size": ((X[:599], 0), {"codec": "cast", "algorithm": "linear"}),
        "dtype": ((X.astype(np.float64), 0), {"codec": "cast", "algorithm": "linear"}),
        "codec": ((X, 0), {"codec": "fp8", "algorithm": "linear"}),
        "root": ((X, 2), {"codec": "cast", "algorithm": "linear"}),
    },
    "scatter": {
        "usual": ((X, 0), {"codec": "cast", "algorithm": "linear"}),
        "size": ((X[:597], 0), {"codec": "cast", "algorithm": "linear"}),
        "dtype": ((X.astype(np.float64), 0), {"codec": "cast", "algorithm": "linear"}),
        "codec": ((X, 0), {"codec": "fp8", "algorithm": "linear"}),
        "root": ((X, 2), {"codec": "cast", "algorithm": "linear"}),
    },
}


def collective_of(name: str) -> str:
    return name.removeprefix("small ").split()[0]


def check_told(errors: Sequence[CompcollError | None], usual: str, other: str) -> None:
    """Ranks 0 and 2 called ``usual``, rank 1 ``other``: all have the table that tells so."""
    for rank, error in enumerate(errors):
        assert isinstance(error, CollectiveMismatch), error
        lines = str(error).splitlines()
        assert len(lines) == 3 and lines[1].partition(":")[2] != lines[2].partition(":")[2], error
        for line, name, ranks in ((lines[1], usual, "0, 2"), (lines[2], other, "1")):
            assert line.startswith(f"  rank {ranks}") and f": {name}(" in line, error
            assert ("(this one)" in line) == (str(rank) in ranks)


@pytest.mark.parametrize(
    ("usual", "other"), list(itertools.permutations(CALLS, 2)), ids=lambda name: name.replace(" ", "_")
)
def test_pairs(usual: str, other: str, count: Callable[[str], None]) -> None:
    world = World(3)
    before = X.tobytes()
    check_told(world.errors([CALLS[usual], CALLS[other], CALLS[usual]]), collective_of(usual), collective_of(other))
    assert X.tobytes() == before
    count("pairs of collectives that did not belong together, named on every rank")
    inputs = normals(3, 50)
    for result in world.allreduce(inputs, algorithm="ring"):
        np.testing.assert_allclose(result, exact_sum(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [0, None], ids=["messages", "memory"])
@pytest.mark.parametrize("collective", ARGUMENTS)
def test_arguments(collective: str, seed: int | None, count: Callable[[str], None]) -> None:
    """One world for all: it stays usable from one mismatch to the next."""
    world = World(3, seed=seed)
    calls = [
        lambda comm, x=x, options=options: getattr(comm, f"i{collective}")(*x, **options)
        for x, options in ARGUMENTS[collective].values()
    ]
    usual = calls[0]
    for other in calls[1:]:
        for first, second in ((usual, other), (other, usual)):
            check_told(world.errors([first, second, first]), collective, collective)
            count("arguments that differed, named on every rank")
    assert world.errors([usual] * 3) == [None] * 3


@pytest.mark.parametrize(
    "ways",
    [
        [{"codec": "zfp:rate=8"}, {"codec": "zfp", "rate": 8}, {"codec": ZFP(rate=8)}, {"codec": "zfp:rate=8.0"}],
        [{"codec": "auto:tolerance=1e-2"}, {"codec": "auto", "tolerance": 1e-2}],
    ],
)
def test_the_same_codec_in_other_words(ways: list[dict[str, Any]]) -> None:
    """Ranks may give it in any of these ways: their plans have one signature."""
    inputs = normals(len(ways), 1 << 16)
    world = World(len(ways), ranks_per_node=1)
    pairs = list(zip(world.comms, inputs, ways, strict=True))
    signatures = {comm.explain(x, **way).signature.extremes for comm, x, way in pairs}
    results = world.loopback.run([comm.iallreduce(x, **way) for comm, x, way in pairs])
    assert len(signatures) == 1
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    held = World(len(ways), ranks_per_node=1, **ways[0])
    np.testing.assert_array_equal(held.allreduce(inputs), results)


def test_another_order(count: Callable[[str], None]) -> None:
    """Two collectives, the other way round on one rank: both fail, on every rank, and a third succeeds."""
    world = World(3)
    names = ["allreduce zfp", "bcast"]
    for first, second in (names, names[::-1]):
        check_told(
            world.errors([CALLS[first], CALLS[second], CALLS[first]]), collective_of(first), collective_of(second)
        )
        count("calls in another order, named on every rank")
    assert world.errors([CALLS["allgather"]] * 3) == [None] * 3


def test_call_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_DEBUG", "1")
    world = World(2)
    errors = world.errors([CALLS["allreduce"], CALLS["allgather"]])
    source = Path(__file__).read_text().splitlines()
    starts = [f'    "{name}": lambda' for name in ("allreduce", "allgather")]
    wanted = [next(i for i, line in enumerate(source, 1) if line.startswith(start)) for start in starts]
    for error in errors:
        for line, number in zip(str(error).splitlines()[1:], wanted, strict=True):
            assert line.endswith(f"test_mismatch.py:{number}"), error


@pytest.mark.parametrize("more", [-16, -1, 1, 16])
@pytest.mark.parametrize("n", [1, 300, 50_000])
@pytest.mark.parametrize("ranks", [2, 3])
def test_handshakes_of_another_length(ranks: int, n: int, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank's are shorter or longer, also where arrays travel along."""
    messages = LoopbackTransport.send_init

    def changed(self: LoopbackTransport, wire: Wire, dest: int, tag: int) -> Persistent:
        if self.rank == ranks - 1 and tag == 0:
            wire = Wire(memoryview(wire.buffer.obj)[: wire.nbytes + more])
        return messages(self, wire, dest, tag)

    monkeypatch.setattr(LoopbackTransport, "send_init", changed)
    world = World(ranks)
    errors = world.errors([lambda comm, x=x: comm.iallreduce(x, codec="minmax") for x in normals(ranks, n)])
    assert any(isinstance(error, WireCorrupted) and "bytes came, where" in str(error) for error in errors), errors
    assert all(isinstance(error, WireCorrupted | CommunicatorBroken) for error in errors[:-1]), errors


def finish(every: Sequence[Steps]) -> None:
    """Let some ranks' steps advance in turns, to their ends."""
    waiting = dict(enumerate(every))
    pending: dict[int, Pending | None] = dict.fromkeys(waiting)
    for _ in range(10_000):
        for rank, each in list(waiting.items()):
            if (awaited := pending[rank]) is None or awaited.Test():
                try:
                    pending[rank] = next(each)
                except StopIteration:
                    del waiting[rank]
    assert not waiting


def test_who_called_what_is_told_under_a_tag_of_the_openings_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several collectives' may be under way at once."""
    isend, tags = LoopbackTransport.isend, set()

    def noted(transport: LoopbackTransport, wire: Wire, dest: int, tag: int) -> Pending:
        tags.add(tag)
        return isend(transport, wire, dest, tag)

    monkeypatch.setattr(LoopbackTransport, "isend", noted)
    handshakes = [Handshake(transport, 40) for transport in Loopback(2, seed=0).transports]

    def steps(rank: int) -> Steps:
        with pytest.raises(CollectiveMismatch):
            yield from handshakes[rank].agree(Signature(f"call of {rank}"), FREE)

    finish([steps(rank) for rank in range(2)])
    assert tags == {40, 41}  # of the agreement itself, and of who called what


@given(st.lists(st.sampled_from([FREE, BUSY, ON_GPU]), min_size=2, max_size=9), st.booleans())
@examples(60)
def test_all_ranks_learn_the_highest_level(levels: list[int], odd: bool) -> None:
    """Of the same call, and whether all are on GPUs; of different calls, whatever their levels, all learn that."""
    world = Loopback(len(levels), seed=len(levels))
    handshakes = [Handshake(transport, 0) for transport in world.transports]
    raised: list[str] = []
    found: set[int | None] = set()

    def steps(rank: int) -> Steps:
        own = Signature("other" if odd and rank == len(levels) - 1 else "call")
        level = levels[rank]
        call = handshakes[rank].collective(own, level)
        call.begin(None, None, None, 0, 1, 0)
        while not call.ended:
            yield call
        found.add(call.level)
        if call.level is None:
            try:
                yield from handshakes[rank].compare(own)
            except CollectiveMismatch as error:
                raised.append(str(error))

    finish([steps(rank) for rank in range(len(levels))])
    if odd:
        assert found == {None}
        assert len(raised) == len(levels) and all("other" in each for each in raised)
    else:
        assert found == {ON_GPU if min(levels) == ON_GPU else min(max(levels), BUSY)} and not raised
