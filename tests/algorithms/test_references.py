"""Each algorithm has its reference, with all that applies to it."""

from __future__ import annotations

import pytest
from algorithms.references import FOLDER, reference
from promises import algorithms_of

from compcoll.algorithms import ALGORITHMS
from compcoll.algorithms.record import REDUCTIONS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_its_reference(algorithm: str) -> None:
    known, collectives = reference(algorithm), list(ALGORITHMS[algorithm].collectives)
    ours = [collective for collective in REDUCTIONS if algorithm in algorithms_of(collective)]
    needed = {
        "seconds": collectives,
        "encodings": [collective for collective in REDUCTIONS if collective in collectives],
        "variance": ours,
        "alike": ours,
    }
    lacking = [
        f"{field}[{each!r}]" for field, names in needed.items() for each in names if each not in getattr(known, field)
    ]
    if "allreduce" in ours and known.replay is None:
        lacking.append("replay")
    assert not lacking, f"tests/algorithms/references/{algorithm}.py needs these"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_calls_are_matched_by_order_or_by_tags(algorithm: str) -> None:
    assert ALGORITHMS[algorithm].ordered == reference(algorithm).ordered


def test_every_reference_has_its_algorithm() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__"} <= set(ALGORITHMS)
