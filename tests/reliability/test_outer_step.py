"""Ranks that are killed in the middle of an outer step, with real processes: the others go on, alike bit by bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import output_of, run_ranks

pytest.importorskip("torch", "2.12")

PROGRAM = Path(__file__).resolve().parent / "outer_step.py"
sys.path.insert(0, str(PROGRAM.parent))
from outer_step import DEATHS, EVERY, LAST, RANKS  # noqa: E402

SECONDS = 300.0


@pytest.mark.slow
@pytest.mark.with_torch
@pytest.mark.timeout(SECONDS + 60)
def test_ranks_killed_in_an_outer_step_cost_at_most_its_steps(tmp_path: Path) -> None:
    status = run_ranks([[sys.executable, PROGRAM, tmp_path, str(rank)] for rank in range(RANKS)], tmp_path, SECONDS)
    assert status == [0, 0, -9, -9], output_of(tmp_path, RANKS)
    seen: list[list[dict[str, Any]]] = [
        [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()] for rank in range(RANKS)
    ]
    assert all(event["finite"] for events in seen for event in events)

    def outer(rank: int, event: str, ranks: int) -> list[tuple[int, int]]:
        return [(told["steps"], told["outer"]) for told in seen[rank] if told.get(event) == ranks]

    for dead in DEATHS:
        survivors = range(dead)
        last = outer(dead, "averaged", dead + 1)[-1]
        # An average may have ended on some of the survivors: they go on from the outer parameters of one of these.
        farthest = max(told for rank in survivors for told in outer(rank, "averaged", dead + 1))
        assert farthest[0] in (last[0], last[0] + EVERY)
        for rank in survivors:
            (joined,) = outer(rank, "joined", dead)
            assert joined == outer(0, "joined", dead)[0] and joined[1] == farthest[1]
            assert farthest[0] < joined[0] <= farthest[0] + EVERY
            following = outer(rank, "averaged", dead)
            # That of the rank that dies next may be one short.
            assert following and following == outer(0, "averaged", dead)[: len(following)]
            assert following[0][1] != farthest[1]
    assert outer(0, "ended", 2) == outer(1, "ended", 2) and outer(0, "ended", 2)[0][0] == LAST
