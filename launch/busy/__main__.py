"""Allreduces and training steps on cores that are busy, shared, or fewer than they look: docs/measurements/busy.md.

python launch/busy                 # everything, as root: at most half an hour
python launch/busy --quick         # a part of it, in 3 minutes
python launch/busy --only 'burners-*,quota'
python launch/busy --report        # the page again, from the records that are there
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(LAUNCH))

import busy_page  # noqa: E402
from busy_cases import CASES, QUICK_SIZES, SIZES, WAITING, Case  # noqa: E402
from cpu_quota import NoQuota, one_core  # noqa: E402
from labs import FULL_DUPLEX, lab, measure, netlab  # noqa: E402

from osu_like_bench.machine import commit  # noqa: E402

RECORDS = Path("docs/measurements/busy")
"""The records' folder from the repository's root, where everything runs."""
SECONDS, QUICK_SECONDS = 1800.0, 180.0
_LONGEST = 120.0
"""Seconds that one launch may take."""


def main(words: Sequence[str]) -> int:
    """The exit status: 1 if a case could not be measured, or a goal is missed."""
    parser = argparse.ArgumentParser("busy", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and sizes, for a shorter time")
    parser.add_argument("--only", default="*", metavar="NAMES", help="cases, by names or patterns, with commas")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args(words)
    patterns = options.only.split(",")
    named = [case for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]
    os.chdir(LAUNCH.parent)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # labs are taken down all the same
    failed: dict[str, str] = {}
    if not options.report:
        RECORDS.mkdir(parents=True, exist_ok=True)
        chosen = [case for case in named if case.quick or not options.quick]
        failed = Measurement(options.quick).run(chosen, waiting=options.only == "*")
    missed = busy_page.write(RECORDS)
    for name, why in failed.items():
        print(f"busy: {name} could not be measured: {why}", file=sys.stderr)
    return 1 if failed or missed else 0


class Measurement:
    """Launches of cases, until the time for all of them is over."""

    def __init__(self, quick: bool) -> None:
        self._end = time.monotonic() + (QUICK_SECONDS if quick else SECONDS)
        self._given = {
            "sizes": QUICK_SIZES if quick else SIZES,
            "cap": "0.25" if quick else "0.7",
            "long": "4" if quick else "20",
        }
        self._turns = 1 if quick else max(case.launches for case in CASES)
        self._failed: dict[str, str] = {}

    def run(self, chosen: Sequence[Case], *, waiting: bool) -> dict[str, str]:
        """Launch all cases, and return why some could not be measured."""
        if waiting:
            self._one("waiting", self._mpirun(2, WAITING))
        for hosts, group in groupby(sorted(chosen, key=lambda case: case.hosts), key=lambda case: case.hosts):
            cases = list(group)
            with lab(f"busy-{hosts}", hosts, *FULL_DUPLEX) if hosts else contextlib.nullcontext():
                for case in cases:
                    if case.launches == 1:
                        self._case(case)
                for case in cases:
                    for old in RECORDS.glob(f"{case.name}.*.json"):
                        old.unlink()
                for turn in range(self._turns):
                    for case in cases:
                        if 1 < case.launches > turn:
                            self._case(case, f".{turn + 1}")
        return self._failed

    def _case(self, case: Case, turn: str = "") -> None:
        command = self._mpirun(case.ranks, case.program)
        if case.hosts:
            options = ["--name", f"busy-{case.hosts}", "--timeout", f"{_LONGEST:g}", *case.run.split()]
            command = [*netlab("run", *options, "-n", str(case.hosts)), "--", "python", "-m", *case.program.split()]
        if case.cores == "one":
            command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command]
        name = case.name + turn
        try:
            with one_core() if case.cores == "quota" else contextlib.nullcontext([]) as prefix:
                self._one(name, [*prefix, *command])
        except NoQuota as error:
            self._failed[name] = str(error)

    def _mpirun(self, ranks: int, program: str) -> list[str]:
        return [sys.executable, str(LAUNCH / "mpirun"), "-n", str(ranks), "python", "-m", *program.split()]

    def _one(self, name: str, command: Sequence[str]) -> None:
        """Run a command, and note beside its record what others used of the machine meanwhile."""
        path = RECORDS / f"{name}.json"
        path.unlink(missing_ok=True)
        words = [word.format(json=path, **self._given) for word in command]
        print(f"busy: {name}", flush=True)
        left = min(self._end - time.monotonic(), _LONGEST)
        if left < 1:
            self._failed[name] = "no time was left"
            return
        status = measure(words, path, left, {**os.environ, "COMPCOLL_PROFILE": "defaults"})
        if status:
            self._failed[name] = f"exit status {status} of {shlex.join(words)}"
            return
        content = json.loads(path.read_text())
        if "run" not in content:
            path.write_text(json.dumps({**content, "run": {"commit": commit()}}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
