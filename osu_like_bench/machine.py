"""Describe a run: its machine, software and command line."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

import compcoll
from compcoll.host.cores import usable_cores
from compcoll.host.device import HostDevice
from compcoll.tools.machine import cpu

TIMED = ("compcoll", "osu_like_bench", "CMakeLists.txt")
"""Paths of the timed code. Only uncommitted changes in these paths mark a commit as dirty."""
REPOSITORY = Path(__file__).resolve().parent.parent


def commit(repository: Path = REPOSITORY) -> str:
    """Return compcoll's commit, with ``-dirty`` if timed code has changed since; an empty string without git."""
    if not (repository / ".git").exists():
        return ""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, timeout=60)

    try:
        head, changes = git("rev-parse", "--short", "HEAD"), git("diff", "--quiet", "HEAD", "--", *TIMED)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if head.returncode else head.stdout.strip() + "-dirty" * (changes.returncode != 0)


def _program() -> str:
    """Return the name of the running module, such as ``osu_like_bench`` or ``osu_like_bench.backends``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = "" if spec is None else str(spec.name).removesuffix(".__main__")
    return name if name.startswith("osu_like_bench") else "osu_like_bench"


def describe() -> dict[str, Any]:
    """Return a description of the machine, the software and the command line."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _program(), *sys.argv[1:]]),
        "cpu": cpu()[0],
        "cores": usable_cores(),
        "instruction_set": HostDevice().instruction_set,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compcoll": compcoll.__version__,
        "commit": commit(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("COMPCOLL_")},
    }


def describe_mpi() -> str:
    """Return the MPI library's name and version, or ``"no MPI"`` if another launcher has set RANK."""
    if "RANK" in os.environ:
        return "no MPI"
    from mpi4py import MPI

    return MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 \n")
