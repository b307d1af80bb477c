"""Costs with all constants at once, several ranks a node, against the algorithms' references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from algorithms.references import reference

from compcoll.algorithms import ALGORITHMS
from compcoll.algorithms.costs import Costs
from compcoll.layout import World

NAMES = ("encode", "decode", "accumulate", "recode", "add", "message", "latency", "inside_latency", "inside", "between")


def constants(world: World, n: float, segment: int, seed: int) -> Costs:
    """Constants of all sizes: what takes longer, host or wire, differs from seed to seed."""
    numbers: dict[str, Any] = dict(
        zip(NAMES, 10 ** np.random.default_rng(seed).uniform(-1, 1, len(NAMES)), strict=True)
    )

    def among(others: World, coded: bool) -> Costs:
        shrink, alone = 0.25 if coded else 1.0, others.nodes == 1
        used = numbers if coded else {**numbers, "encode": 0.3, "accumulate": 0.7, "decode": 0.2}
        mine = {**used, "between": 0.0 if alone else used["between"]}
        return Costs(n=n, world=others, segment=segment, shrink=shrink, **mine, among=among)

    return among(world, True)


POWERS = [World(2), World(4), World(8, 2), World(8, 4), World(8, 4, 4), World(4, 4), World(32), World(32, 8)]
WORLDS = [*POWERS, World(3), World(5), World(6, 3), World(9, 3, 2), World(3, 3), World(5, 5), World(12, 4), World(17)]
N = 6403.3  # no multiple of anything


@pytest.mark.parametrize(
    ("algorithm", "collective"), [(name, each) for name, record in ALGORITHMS.items() for each in record.collectives]
)
def test_costs_of_all_constants(algorithm: str, collective: str) -> None:
    cost, formula = ALGORITHMS[algorithm].cost, reference(algorithm).seconds[collective]
    for world in WORLDS:
        situations = [constants(world, N, segment, seed) for seed in range(6) for segment in (60, 700, 1 << 20)]
        told = [cost(c, collective) for c in situations]
        wanted = [formula(c, world.size, world.per_node, N) for c in situations]
        np.testing.assert_allclose(told, wanted, rtol=1e-9, err_msg=str(world))
