"""Runs a command in a control group whose processes have the time of one core together, as `docker --cpus 1` makes.

python -m osu_like_bench.pages.one_core launch/mpirun -n 2 python -m osu_like_bench …      # as root
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PERIOD = 100_000
"""Microseconds, as containers have it."""

# The shell puts itself there, and then is the program.
_ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


class NoQuota(Exception):
    """No control group can be made here; the message says why."""


@contextlib.contextmanager
def one_core() -> Iterator[list[str]]:
    """The words before a command that runs it in such a group; the group is there meanwhile.

    Raises
    ------
    NoQuota
        If none can be made: neither version 2 nor version 1 has its controller of cores here, or nobody may write it.
    """
    reasons: list[str] = []
    for top, limit, text in _places():
        group = top / f"compcoll-busy-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            reasons.append(f"{group}: {error.strerror}")
            continue
        try:
            try:
                (group / limit).write_text(text)
            except OSError as error:
                reasons.append(f"{group / limit}: {error.strerror}")
                continue
            yield ["/bin/sh", "-c", _ENTER, str(group)]
            return
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    raise NoQuota("; ".join(reasons) or "no control groups limit cores here")


def _places() -> Iterator[tuple[Path, str, str]]:
    """Folders in which a group may be made, and what limits it there: version 2 first."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for _, folder, kind, *_ in mounts:
        if kind == "cgroup2" and "cpu" in (Path(folder) / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):
                (Path(folder) / "cgroup.subtree_control").write_text("+cpu")
            yield Path(folder), "cpu.max", f"{PERIOD} {PERIOD}"
    for _, folder, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            yield Path(folder), "cpu.cfs_quota_us", str(PERIOD)


def main(command: Sequence[str]) -> int:
    """Run the command: its exit status, 1 without a group."""
    try:
        with one_core() as prefix:
            return subprocess.run([*prefix, *command]).returncode
    except NoQuota as error:
        print(f"one_core: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
