"""The waits of the device layer: each is left out in turn, and at least one scenario shows it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from fakes.deferred import DeferredWorld, Site, Stream
from fakes.deferred_checks import downloaded, shows
from fakes.late_ipc import SharingWorld
from fakes.loopback import exact_sum, normals

from compcoll import CompcollError, ErrorFeedback
from compcoll.gpu import streams

N = 9 * 280

Start = Callable[[Any, Any], Any]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_SEGMENT", "1024")


def chained(world: DeferredWorld, **options: Any) -> list[list[np.ndarray]]:
    """Allreduces in a row, with feedback."""
    feedbacks = [ErrorFeedback() for _ in world.comms]
    arrays = [world.upload(normals(len(world.comms), N, seed=seed)) for seed in range(4)]
    results = []
    for batch in arrays:
        turns = iter(feedbacks)
        start = lambda comm, x, turns=turns: comm.iallreduce(x, feedback=next(turns), **options)  # noqa: E731
        results.append(world.run(start, batch))
    return [world.download(batch) for batch in results]


def on_streams_of_their_own(world: DeferredWorld) -> list[list[np.ndarray]]:
    """Allreduces whose callers' streams are in no order; the fifth is the first that uses another's memory again."""
    results = []
    for seed in range(6):
        for device in filter(None, world.devices):
            device.current = Stream()
        batch = world.upload(normals(len(world.comms), N, seed=seed))
        callers = [device and device.current for device in world.devices]
        results.append((callers, world.allreduce(batch, codec="minmax", block=64, algorithm="ring")))
    return downloaded(world, results)


def exchanged(world: DeferredWorld) -> list[list[np.ndarray]]:
    """Alltoalls in a row: each encodes a wire that it does not send."""
    arrays = [world.upload([x.reshape(4, -1) for x in normals(4, 400, seed=seed)]) for seed in range(4)]
    start: Start = lambda comm, x: comm.ialltoall(x, codec="minmax", block=64, algorithm="pairwise")  # noqa: E731
    return [world.download(batch) for batch in [world.run(start, batch) for batch in arrays]]


def broadcast(world: DeferredWorld) -> list[list[np.ndarray]]:
    """Into memory that the caller is still writing to."""
    size = len(world.comms)
    inputs, outs = world.upload(normals(size, N)), world.upload(normals(size, N, seed=5))
    pairs = iter(outs)
    start: Start = lambda comm, x: comm.ibcast(x, out=next(pairs), codec="minmax", algorithm="binomial")  # noqa: E731
    return [world.download(world.run(start, inputs))]


def on_host(world: DeferredWorld) -> list[list[np.ndarray]]:
    inputs = world.upload(normals(len(world.comms), N))
    return [world.download(world.allreduce(inputs, codec="zfp", tolerance=1e-3, algorithm="ring"))]


def added(world: DeferredWorld) -> list[list[np.ndarray]]:
    inputs = world.upload(normals(len(world.comms), N))
    return [world.download(world.allreduce(inputs, codec="intsum", algorithm="ring"))]


def added_by_mpi(world: DeferredWorld) -> list[list[np.ndarray]]:
    inputs = world.upload(normals(len(world.comms), N))
    return [world.download(world.allreduce(inputs, codec="intsum", algorithm="native"))]


def chosen(world: DeferredWorld) -> list[list[np.ndarray]]:
    return chained(world, codec="topk", density=0.1, op="mean", algorithm="sparse_direct")


def summed(world: DeferredWorld) -> list[list[np.ndarray]]:
    return [world.download(world.allreduce(world.upload(normals(len(world.comms), 5))))]


Scenario = tuple[int, Callable[[DeferredWorld], list[list[np.ndarray]]]]
"""Ranks, and what they do."""

SCENARIOS: list[Scenario] = [
    (4, lambda world: chained(world, codec="minmax", block=64, algorithm="ring")),
    (4, lambda world: chained(world, codec="minmax", block=64, algorithm="hierarchical")),
    (4, on_streams_of_their_own),
    (4, exchanged),
    (4, broadcast),
    (4, on_host),
    (4, added),
    (2, added_by_mpi),
    (3, chosen),
    (2, summed),  # with the handshake
    (1, summed),
]


Played = tuple[DeferredWorld, list[list[np.ndarray]]]


@cache
def complete_play(number: int, direct: bool, early: bool) -> Played:
    """A scenario with all waits, in short segments."""
    return play(SCENARIOS[number], direct=direct, early=early)


def play(scenario: Scenario, *, direct: bool, early: bool = False, without: Site | None = None) -> Played:
    ranks, run = scenario
    world = DeferredWorld(ranks, direct=direct, early=early, without=without, mpi=ranks == 2, ranks_per_node=2)
    return world, run(world)


def wait_lines() -> set[int]:
    """Every line of the device layer that waits."""
    return {
        node.lineno
        for node in ast.walk(ast.parse(inspect.getsource(streams)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("wait", "pending")
    }


def wait_sites() -> set[Site]:
    """Every wait that some scenario comes to: each line, in each method that uses it."""
    return set().union(*(play(scenario, direct=direct)[0].sites for scenario in SCENARIOS for direct in (False, True)))


def test_scenarios_come_to_every_wait() -> None:
    """Or, of memory that processes share, those of test_ipc_order.py."""
    world = SharingWorld(2)
    world.sum_of(normals(2, N), codec="minmax", algorithm="direct")
    shared = {line for line, method in world.sites if method in ("leaving", "take", "given")}
    assert wait_lines() == shared | {line for line, _ in wait_sites()}


@pytest.mark.parametrize("site", sorted(wait_sites()), ids=lambda site: f"{site[1]}, line {site[0]}")
def test_no_wait_can_be_left_out(site: Site) -> None:
    for number, direct, early in product(range(len(SCENARIOS)), (False, True), (False, True)):
        complete, expected = complete_play(number, direct, early)
        if site not in complete.sites:
            continue
        without = partial(play, SCENARIOS[number], direct=direct, early=early, without=site)
        if shows(without, expected, CompcollError):  # ranks that never meet
            return
    raise AssertionError(f"nothing shows that the wait at {site} is needed")


def test_no_wait_of_sparse_sums_can_be_left_out() -> None:
    """But for that before memory is used again: whoever fetches something has waited for all of a stream's work."""
    complete, expected = play((3, chosen), direct=False)
    source = inspect.getsource(streams).splitlines()
    needed = [site for site in complete.sites if "for event in events]" not in source[site[0] - 1]]
    assert len(needed) == len(complete.sites) - 1 >= 3
    for site in needed:
        shown = any(
            shows(
                partial(play, (3, chosen), direct=False, early=early, without=site),
                expected,
                *(CompcollError, ValueError, IndexError),  # what was not there yet
            )
            for early in (False, True)
        )
        assert shown, f"nothing shows that the wait at {site} is needed"


def test_all_waits_together_give_the_right_sum() -> None:
    for direct in (False, True):
        _, results = play((4, lambda world: chained(world, codec=None, algorithm="ring")), direct=direct)
        for seed, sums in enumerate(results):
            np.testing.assert_allclose(sums[0], exact_sum(normals(4, N, seed=seed)), rtol=0, atol=1e-4)
