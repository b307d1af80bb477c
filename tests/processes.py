"""Whether a process that a test started still runs."""

from __future__ import annotations

import time
from pathlib import Path


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
