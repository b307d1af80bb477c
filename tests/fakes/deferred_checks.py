"""What collectives on deferred devices must do, whatever carries their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fakes.deferred import DeferredWorld, Stream
from fakes.loopback import World, normals

from compcoll import ErrorFeedback

Results = list[list[np.ndarray]]


def check_many_under_way(host: World, world: DeferredWorld, n: int, ways: Sequence[dict[str, Any]]) -> None:
    """Seven allreduces at once give what the host's give one after the other."""
    ranks = len(world.comms)
    batches = [normals(ranks, n + 64 * number, seed=number) for number in range(7)]
    uploaded = [world.upload(batch) for batch in batches]
    requests = [
        [comm.iallreduce(x, **ways[number % len(ways)]) for comm, x in zip(world.comms, batch)]
        for number, batch in enumerate(uploaded)
    ]
    world.loopback.run([request for batch in requests for request in batch])
    for number, (batch, pending) in enumerate(zip(batches, requests)):
        got = world.download([request.wait() for request in pending])
        np.testing.assert_array_equal(got, host.allreduce(batch, **ways[number % len(ways)]))


def check_losses_are_fed_back(
    host: World, world: DeferredWorld, n: int, **options: Any
) -> tuple[list[np.ndarray], list[ErrorFeedback]]:
    """Three calls in a row give what the host's give; return the last values, and what is kept."""
    ranks = len(world.comms)
    losses = [[ErrorFeedback() for _ in range(ranks)] for _ in range(2)]
    for seed in range(3):
        inputs = normals(ranks, n, seed=seed)
        results = []
        for where, kept, given in ((host, losses[0], inputs), (world, losses[1], world.upload(inputs))):
            turns = iter(kept)
            start = lambda comm, x, turns=turns: comm.iallreduce(x, feedback=next(turns), **options)  # noqa: E731
            results.append(where.run(start, given))
        np.testing.assert_array_equal(world.download(results[1]), results[0])
    return inputs, losses[1]


def downloaded(world: DeferredWorld, results: Sequence[tuple[Sequence[Stream | None], list[Any]]]) -> Results:
    """Download the results of some calls, of each in its callers' streams."""
    found = []
    for callers, batch in results:
        for device, caller in zip(world.devices, callers):
            if device is not None and caller is not None:
                device.current = caller
        found.append(world.download(batch))
    return found


def shows(played: Callable[[], tuple[Any, Results]], expected: Results, *errors: type[BaseException]) -> bool:
    """Tell whether what is played without some wait gives other results than with it, or one of these errors."""
    try:
        _, got = played()
    except errors:
        return True
    return not all(np.array_equal(one, other) for one, other in zip(got, expected))
