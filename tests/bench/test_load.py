"""Load beside a measurement: it is there, and it ends with the measurement, whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import ends

from osu_like_bench.load import Load, under

SECONDS = 60.0


def children() -> set[int]:
    """Processes that this one has started and that live."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(entry.name))
    return found


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def burn_and_be_interrupted(before: set[int]) -> None:
    barriers: list[int] = []
    with under(Load(burners=2, nice=3), first_on_node=True, barrier=lambda: barriers.append(1)):
        burners = children() - before
        assert len(burners) == 2 and barriers == [1]
        assert {os.getpriority(os.PRIO_PROCESS, each) for each in burners} == {min(os.nice(0) + 3, 19)}
        end = time.monotonic() + SECONDS
        while any(cpu_seconds(each) < 0.1 for each in burners) and time.monotonic() < end:
            time.sleep(0.01)
        assert all(cpu_seconds(each) >= 0.1 for each in burners)
        raise KeyboardInterrupt


def test_processes_burn_at_their_niceness_and_end_also_on_error() -> None:
    before = children()
    with pytest.raises(KeyboardInterrupt):
        burn_and_be_interrupted(before)
    assert children() == before
    with under(Load(burners=2), first_on_node=False, barrier=lambda: None):
        assert children() == before


def test_threads_compute_and_end() -> None:
    before, begun = threading.active_count(), time.process_time()
    with under(Load(python_threads=1, native_threads=2), first_on_node=True, barrier=lambda: None):
        assert threading.active_count() == before + 3
        end = time.monotonic() + SECONDS
        while time.process_time() < begun + 0.1 and time.monotonic() < end:
            time.sleep(0.01)
    assert time.process_time() >= begun + 0.1
    assert threading.active_count() == before


def test_processes_end_with_a_rank_that_is_killed() -> None:
    program = """
import os, sys
from osu_like_bench.load import Load, under
with under(Load(burners=1), first_on_node=True, barrier=lambda: None):
    print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        burner = int(rank.stdout.readline())
        os.kill(rank.pid, signal.SIGKILL)
    assert ends(burner, SECONDS)
