"""Ends, forks and interrupts: nothing crashes or hangs, and what is left can be used or says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.environments import Completed

pytestmark = [pytest.mark.every_mpi, pytest.mark.quick_on("first")]

SCRIPT = Path(__file__).resolve().parent / "endings.py"


@pytest.mark.parametrize(
    "ways", [["pending"], ["unmatched"], ["finalized"], ["forked", "interrupted", "misconfigured"]], ids="+".join
)
def test_endings(mpirun: Callable[..., Completed], ways: list[str]) -> None:
    done = mpirun(3, SCRIPT, *ways, timeout=40)
    for rank in done.ranks:
        assert rank.stdout.split() == ["ended"] * len(ways), done.report
        assert "Traceback" not in rank.stderr, done.report
