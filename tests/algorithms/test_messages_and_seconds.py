"""Messages of all algorithms: in which order they leave, that all are waited for, and the seconds that are told."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, normals
from oracles.collectives import arguments

from compcoll.algorithms import ALGORITHMS, DENSE
from compcoll.codecs import Codec
from compcoll.sparse import TopK
from compcoll.transports.base import Wire
from compcoll.transports.loopback import LoopbackTransport

CALLS: list[tuple[str, str, str | Codec]] = [
    (collective, record.name, "minmax" if record in DENSE else TopK(0.05))
    for record in ALGORITHMS.values()
    for collective in record.steps
    if not record.by_mpi
]
N = 12_000
"""Elements: divisible by all numbers of ranks here, and of several segments where a chunk has any."""


class Watched:
    """A message that knows whether somebody found it over."""

    def __init__(self, pending: Any, rank: int, peer: int) -> None:
        self.pending, self.rank, self.peer, self.over = pending, rank, peer, False

    def Test(self) -> bool:
        self.over = self.pending.Test()
        return self.over


def run(world: World, collective: str, algorithm: str, codec: str | Codec) -> None:
    def start(comm: Any, x: np.ndarray) -> Any:
        more = arguments(collective, x.size, comm.size, comm.rank, root=1)
        return getattr(comm, f"i{collective}")(x, codec=codec, algorithm=algorithm, **more)

    world.run(start, normals(world.size, N))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """All messages that ranks send by their algorithms, in the order in which each rank does."""
    messages: list[Watched] = []
    isend = LoopbackTransport.isend

    def watched(transport: LoopbackTransport, wire: Wire, dest: int, tag: int) -> Watched:
        messages.append(Watched(isend(transport, wire, dest, tag), transport.rank, dest))
        return messages[-1]

    monkeypatch.setattr(LoopbackTransport, "isend", watched)
    return messages


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_whoever_sends_waits_until_it_has_left(sent: list[Watched], ranks: int) -> None:
    """The memory of a wire is used again by the next call: no algorithm ends before its messages."""
    for call in CALLS:
        sent.clear()
        run(World(ranks, ranks_per_node=1), *call)
        assert len(sent) >= ranks - 1 and all(message.over for message in sent), call


def test_seconds_are_those_that_pass() -> None:
    """On every rank, in one process: together they take no longer than all of it, and no part is negative."""
    for call in CALLS:
        world = World(3, ranks_per_node=1)
        started = perf_counter()
        run(world, *call)
        passed = perf_counter() - started
        told = [comm.stats for comm in world.comms if comm.stats is not None]
        assert len(told) == world.size
        parts = [seconds for stats in told for seconds in (stats.encode_seconds, stats.decode_seconds)]
        assert min(parts) >= 0 and 0 < sum(parts) < passed, call
        assert all(0 < stats.total_seconds < passed and 0 <= stats.wait_seconds < passed for stats in told), call


@pytest.mark.parametrize("ranks", [3, 4, 5])
@pytest.mark.parametrize(
    ("collective", "algorithm", "codec"), [("alltoall", "pairwise", "minmax"), ("allreduce", "direct", "minmax")]
)
def test_nearest_ranks_come_first(sent: list[Watched], collective: str, algorithm: str, codec: Any, ranks: int) -> None:
    """No rank gets the first message of all others at once: of each round there is one for every rank."""
    world = World(ranks, ranks_per_node=1)
    sent.clear()
    run(world, collective, algorithm, codec)
    for rank in range(ranks):
        peers = list(dict.fromkeys(m.peer for m in sent if m.rank == rank and m.pending.wire.nbytes > 1000))
        assert peers == [(rank + distance) % ranks for distance in range(1, ranks)]


def test_records_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ALGORITHMS["ring"].name = "another"  # type: ignore[misc]
