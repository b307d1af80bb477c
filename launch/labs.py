"""Programs that are run to be measured: for so long at most, on this machine or in a lab of netlab's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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


@contextlib.contextmanager
def lab(name: str, hosts: int) -> Iterator[None]:
    """So many hosts at 1 Gb/s, under that name."""
    up = netlab("up", "--name", name, "--hosts", str(hosts), "--rate", "1gbit", "--burst", "39k", "--gso", "32768")
    subprocess.run([*up, "--replace"], check=False)
    try:
        yield
    finally:
        subprocess.run(netlab("down", "--name", name), check=False)
