"""Processes that a test starts: ranks without a launcher, and whether a process still runs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_ranks(
    commands: Sequence[Sequence[str | Path]],
    folder: Path,
    seconds: float,
    environments: Sequence[Mapping[str, str] | None] | None = None,
) -> list[int]:
    """Run a command for each rank at the same time, and return their exit statuses.

    The output of rank N is in ``N.out`` in the folder. Whatever happens, no rank runs on, and all output is printed.

    Raises
    ------
    subprocess.TimeoutExpired
        If a rank runs for longer than ``seconds`` after the rank before it has ended.
    """
    ranks = [
        subprocess.Popen(command, env=environment, stdout=(folder / f"{rank}.out").open("w"), stderr=subprocess.STDOUT)
        for rank, (command, environment) in enumerate(
            zip(commands, environments or [None] * len(commands), strict=True)
        )
    ]
    try:
        return [rank.wait(seconds) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        print(output_of(folder, len(ranks)))


def output_of(folder: Path, ranks: int) -> str:
    """Return the end of all ranks' output."""
    return "\n".join((folder / f"{rank}.out").read_text()[-4000:] for rank in range(ranks))


def runs(process: int) -> bool:
    """Say whether a process runs: it is there, and it has not ended unnoticed by its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(process: int, seconds: float = 10.0) -> bool:
    """Wait for a process to end; a killed one still needs a processor for its last instruction."""
    end = time.monotonic() + seconds
    while runs(process):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
