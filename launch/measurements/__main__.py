"""``make measurements``: run every case on its lab, as root, and write docs/measurements.

python launch/measurements                     # everything: 40 minutes on a quiet machine
python launch/measurements --only 1g-zfp8,10g-*
python launch/measurements --report            # tables and plots again, from the records that are there
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[1]
sys.path.append(str(LAUNCH))

import cases  # noqa: E402
import report  # noqa: E402
from cases import Case, Lab  # noqa: E402
from labs import middle, netlab  # noqa: E402

RECORDS = Path("docs/measurements/networks")
"""The records' folder from the repository's root, where everything runs: no record names this machine's folders."""
TRIES = 2
"""A run that others disturbed is repeated, up to so many in all."""


def main(words: Sequence[str]) -> int:
    """The exit status: 1 if a case could not be measured, or a goal is missed."""
    parser = argparse.ArgumentParser("measurements", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="*", metavar="NAMES", help="cases, by names or patterns, with commas")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--list", action="store_true", help="name the cases")
    options = parser.parse_args(words)
    patterns = options.only.split(",")
    chosen = [case for case in cases.CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]
    if options.list:
        print("\n".join(f"{case.name:22} {case.program}" for case in chosen))
        return 0
    failed: list[str] = []
    os.chdir(LAUNCH.parent)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # labs are taken down all the same
    if not options.report:
        RECORDS.mkdir(parents=True, exist_ok=True)
        for lab, group in groupby(sorted(chosen, key=lambda case: case.lab.name), key=lambda case: case.lab):
            # A profile is measured before what runs with it.
            failed += _measure(lab, sorted(group, key=lambda case: cases.CASES.index(case)))
    missed = report.write(RECORDS)
    for name in failed:
        print(f"measurements: {name} could not be measured", file=sys.stderr)
    return 1 if failed or missed else 0


def _measure(lab: Lab, group: Sequence[Case]) -> list[str]:
    """Names of the cases that failed."""
    if lab.hosts:
        up = netlab("up", "--name", lab.name, "--hosts", str(lab.hosts), "--rate", f"{lab.rate / 1e6:.0f}mbit")
        if subprocess.run([*up, "--replace", *lab.options.split()]).returncode:
            return [case.name for case in group]
    try:
        return [case.name for case in group if not _run(case)]
    finally:
        if lab.hosts:
            subprocess.run(netlab("down", "--name", lab.name))


def _run(case: Case) -> bool:
    """Launch a case as often as it asks for; tell whether all ended well."""
    path = RECORDS / f"{case.name}.json"
    print(f"measurements: {case.name}", flush=True)
    launches = []
    for _ in range(case.launches):
        if not _launch(case):
            return False
        launches.append(json.loads(path.read_text()))
    if case.launches > 1:
        path.write_text(json.dumps(middle(launches, "auto"), indent=1) + "\n")
    return True


def _launch(case: Case) -> bool:
    """Run a case until nobody disturbs it; tell whether it ended well."""
    path, record = RECORDS / f"{case.name}.json", RECORDS / f"{case.name}.run.json"
    environ = {**os.environ, "COMPCOLL_PROFILE": "defaults", **case.environment}
    if case.profile:
        environ["COMPCOLL_PROFILE"] = str(RECORDS / f"{case.profile}.json")
    program = ["python", "-m", *shlex.split(case.program.format(json=path))]
    if case.lab.hosts:
        options = ["--name", case.lab.name, "--quiet-cpu", "--timeout", "500", "--record", str(record)]
        command = netlab("run", *options, *case.run.split(), "--", *program)
    else:
        command = [sys.executable, str(LAUNCH / "mpirun"), "-n", str(case.ranks), *program]
    for _ in range(TRIES):
        status = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL).returncode
        if status or not case.lab.hosts or not json.loads(record.read_text())["disturbed"]:
            break
    return status == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
