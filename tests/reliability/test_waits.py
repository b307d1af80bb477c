"""Waits that sleep: no wake-up is lost, and a rank that is late, stopped or gone is waited for, up to the time-out."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi.environments import Completed

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tests" / "reliability" / "waits.py"
KINDS = {"handshake", "shared_memory", "recorded"}
OURS = [*sorted(KINDS), "not_blocking", "thread", "not_replayed", "recursive_doubling", "mpi"]
TORCH = ["torch", "torch_async", "torch_future"]


def told(done: Completed) -> dict[str, Any]:
    lines = [json.loads(line) for line in done.ranks[0].stdout.splitlines() if line.startswith("{")]
    return {name: figure for line in lines for name, figure in line.items()}


def test_no_wake_up_is_lost(tmp_path: Path, long: bool, figure: Callable[[str], None]) -> None:
    """Without a time-out a lost one would be for ever."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("a C++ compiler is needed")
    source = REPOSITORY / "tests" / "kernels" / "fuzz" / "handovers.cpp"
    program, kernels = tmp_path / "handovers", REPOSITORY / "compcoll" / "kernels"
    subprocess.run([compiler, "-std=c++20", "-O2", "-I", kernels, source, "-o", program], check=True)
    count = 1_000_000 if long else 100_000
    done = subprocess.run([program, str(count)], capture_output=True, text=True, timeout=count / 2000, check=True)
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["numbered:", str(count)],
        ["counted:", str(count)],
    ]
    figure(f"waits: {'; '.join(done.stdout.splitlines())}; none was lost")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_who_waits_sleeps(mpirun: Callable[..., Completed], ranks: int) -> None:
    taken = told(mpirun(ranks, SCRIPT, "late"))
    assert set(taken) == KINDS
    assert max(taken.values()) < 0.2, taken  # of one second; a wait that looks all the time takes it all


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_is_stopped_and_goes_on(mpirun: Callable[..., Completed], ranks: int) -> None:
    assert set(told(mpirun(ranks, SCRIPT, "stopped"))) == KINDS


LOOKS_THAT_MAY_BE_LATE = 5
"""From a time-out to its error: out of a nap, at the clock, into the question who is missing, and out of it."""
LATE = 20.0
"""Seconds that tell a wait that ends by itself from one that ends with the stop, on a machine that may stand still."""


def told_of_gone(
    mpirun: Callable[..., Completed], folder: Path, ranks: int, timeout: float, *kinds: str, long: bool
) -> dict[str, list[tuple[float, float]]]:
    """Every rank says that one is missing while that is stopped; in long runs within the time-out and a second, and
    later only by what the system took to wake up who slept meanwhile. A nonblocking collective may take half a second
    more: it sleeps up to three times for a quarter of a second before its time-out begins. That the clock is looked at
    in every wait is for tests/execute/test_timeouts.py.
    """
    (said := folder / "said").mkdir()
    seconds = told(mpirun(ranks, SCRIPT, "gone", str(said), str(timeout), *kinds, timeout=300))
    assert set(seconds) == set(kinds or KINDS)
    for name, each in seconds.items():
        after = 1.5 if name == "not_blocking" else 1.0
        for taken, delay in each:
            assert taken <= timeout + (after + LOOKS_THAT_MAY_BE_LATE * delay if long else LATE), (name, taken, delay)
    assert max(taken for each in seconds.values() for taken, _ in each) >= timeout, seconds
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_is_stopped_for_too_long(
    mpirun: Callable[..., Completed], tmp_path: Path, long: bool, ranks: int
) -> None:
    told_of_gone(mpirun, tmp_path, ranks, 1.0, long=long)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("kinds", "others"), [(OURS, 4), (TORCH, 4)], ids=["compcoll", "torch"])
def test_time_outs_on_busy_cores(
    mpirun: Callable[..., Completed],
    tmp_path: Path,
    figure: Callable[[str], None],
    ranks: int,
    kinds: list[str],
    others: int,
) -> None:
    """A time-out of 2 s, one rank stopped halfway, and four processes that compute."""
    with busy(others):
        seconds = told_of_gone(mpirun, tmp_path, ranks, 2.0, *kinds, long=True)
    for name, each in seconds.items():
        late = max(delay for _, delay in each)
        figure(f"{name}, {ranks} ranks: {max(taken for taken, _ in each):.2f} s (sleeps came up to {late:.2f} s late)")
