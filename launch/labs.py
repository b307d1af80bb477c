"""Programs that are run to be measured: for so long at most, on this machine or in a lab of netlab's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from netlab_load import LoadMeter

LAUNCH = Path(__file__).resolve().parent
_SAMPLE = 0.5
DISTURBED = 10.0
"""Percent of the machine: where others used more meanwhile, times are hints."""


def finish(words: Sequence[str], environ: Mapping[str, str], seconds: float, meter: LoadMeter) -> int:
    """Run a command for so long at most: its exit status, 124 if it had to be ended."""
    process = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_SAMPLE)
            meter.sample()
        return 124
    finally:
        if process.poll() is None:
            process.terminate()  # mpirun and netlab end what they have started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def netlab(*words: str) -> list[str]:
    """A command of netlab's."""
    return [sys.executable, str(LAUNCH / "netlab"), *words]


def measure(words: Sequence[str], path: Path, seconds: float, environ: Mapping[str, str] = os.environ) -> int:
    """Run a command that writes a record, and note in it what others used of the machine: the exit status, 1 also where
    no record came. If that is not 0, the record before is there again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    meter = LoadMeter()
    status = finish(words, environ, seconds, meter)
    others = meter.others()
    if status or not path.exists():
        if before is not None:
            path.write_bytes(before)
        return status or 1
    record = json.loads(path.read_text())
    record["others_percent"] = round(others, 1)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def middle(launches: Sequence[dict[str, Any]], ours: str) -> dict[str, Any]:
    """A record of each size's results as one launch has them: the middle one, by our contender's time over the others'
    least.

    Contenders of one launch are compared, since what differs from launch to launch, they have in common. Where ours is
    not among them, the time itself counts.
    """
    of_sizes = [[list(same) for _, same in groupby(launch["results"], key=itemgetter("size"))] for launch in launches]
    middles = [
        sorted(same, key=lambda each: _lateness(each, ours))[len(same) // 2] for same in zip(*of_sizes, strict=True)
    ]
    medians = [[result["median_us"] for result in launch["results"]] for launch in launches]
    return {**launches[0], "results": list(chain.from_iterable(middles)), "median_us_of_launches": medians}


def _lateness(results: Sequence[dict[str, Any]], ours: str) -> float:
    """The number by which `middle` orders launches, from one size's results."""
    taken = {result["contender"]: float(result["median_us"]) for result in results}
    own = taken.pop(ours, None)
    least = min(taken.values())
    return least if own is None else own / least


FULL_DUPLEX = ("--rate", "1gbit", "--burst", "39k", "--gso", "32768")
"""Links on which MPI's TCP sends and receives at 1 Gb/s at once."""


@contextlib.contextmanager
def lab(name: str, hosts: int, *settings: str) -> Iterator[None]:
    """So many hosts under that name, with settings of `netlab up`."""
    up = netlab("up", "--name", name, "--hosts", str(hosts), *settings, "--replace")
    subprocess.run(up, check=False)
    try:
        yield
    finally:
        subprocess.run(netlab("down", "--name", name), check=False)
