"""Helpers to run one collective on all ranks of a loopback world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from compcoll import Communicator, CompcollError
from compcoll.execute.engine import Request
from compcoll.transports.loopback import Loopback


class World:
    """A communicator for each rank, in one process."""

    def __init__(self, size: int, *, ranks_per_node: int | None = None, seed: int | None = 0, **settings: Any) -> None:
        self.size, self.nodes = size, -(-size // (ranks_per_node or size))
        self.loopback = Loopback(size, ranks_per_node, seed)
        self.comms = [Communicator(transport, **settings) for transport in self.loopback.transports]
        self._again = lambda: World(size, ranks_per_node=ranks_per_node, seed=seed, **settings)

    def fresh(self) -> World:
        """Another like this, in which nothing has happened yet."""
        return self._again()

    def free(self) -> None:
        """Nothing is to be given back: all of it is in this process."""

    def run(self, start: Callable[[Communicator, Any], Request], inputs: Sequence[Any]) -> list[Any]:
        """Start a collective on each rank's input and return all results."""
        return self.loopback.run([start(comm, x) for comm, x in zip(self.comms, inputs, strict=True)])

    def allreduce(self, inputs: Sequence[Any], **options: Any) -> list[Any]:
        return self.run(lambda comm, x: comm.iallreduce(x, **options), inputs)

    def errors(self, starts: Sequence[Callable[[Communicator], Request]]) -> list[CompcollError | None]:
        """What each rank's collective raises. A refusal waits for the others: hence a thread for each rank."""
        from concurrent.futures import ThreadPoolExecutor

        def attempt(rank: int) -> CompcollError | None:
            try:
                starts[rank](self.comms[rank]).wait(timeout=20)
            except CompcollError as error:
                return error
            return None

        with ThreadPoolExecutor(len(starts)) as pool:
            return list(pool.map(attempt, range(len(starts))))


def normals(size: int, n: int, dtype: Any = np.float32, seed: int = 0, scale: float = 1.0) -> list[np.ndarray]:
    """Independent normal values for each rank."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(n) * scale).astype(dtype) for _ in range(size)]


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """The k largest magnitudes, in float64, by NumPy; the first of equal ones."""
    wide = x.astype(np.float64)
    kept = np.zeros_like(wide)
    order = np.lexsort((np.arange(x.size), -np.abs(wide)))[:k]
    kept[order] = wide[order]
    return kept


def exact_sum(inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The sum in float64."""
    return np.sum([x.astype(np.float64) for x in inputs], axis=0)


def magnitude(inputs: Sequence[np.ndarray]) -> np.ndarray:
    """For each element the sum of the ranks' magnitudes: no partial sum is larger."""
    return np.sum([np.abs(x.astype(np.float64)) for x in inputs], axis=0)
