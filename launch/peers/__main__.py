"""compcoll beside Open MPI, MPICH, Intel MPI, gloo and PyTorch's hooks: docs/measurements/peers.md.

python launch/peers                          # everything: some ten minutes; labs of netlab need root
python launch/peers --only 'net-*,ddp-net'   # these records again: the others stay as they are
python launch/peers --quick                  # small buffers and a small model, in three minutes
python launch/peers --report                 # the page again, from the records that are there

`make MPI=mpich install` and `make MPI=impi install` make the environments of those; what is not there is left out, and
the page says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(LAUNCH))

import peers_cases  # noqa: E402
import peers_page  # noqa: E402
from labs import FULL_DUPLEX, lab, measure, netlab  # noqa: E402
from peers_cases import CASES, Case  # noqa: E402

RECORDS = Path("docs/measurements/peers")
"""The records' folder from the repository's root, where everything runs."""
LAB = "peers"
_LONGEST = 300.0
"""Seconds of a run."""


def main(words: Sequence[str]) -> int:
    """The exit status: 1 if a run failed; what is not installed is not run."""
    parser = argparse.ArgumentParser("peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small buffers and a small model")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--only", metavar="PATTERNS", default="*", help="names or patterns of records, with commas")
    options = parser.parse_args(words)
    chosen = [case for case in CASES if any(fnmatchcase(case.name, each) for each in options.only.split(","))]
    if not chosen:
        parser.error(f"--only {options.only}: there are {', '.join(case.name for case in CASES)}")
    os.chdir(LAUNCH.parent)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # labs are taken down all the same
    failed = [] if options.report else _measure(chosen, options.quick)
    peers_page.write(RECORDS)
    for name in failed:
        print(f"peers: {name} failed", file=sys.stderr)
    return 1 if failed else 0


def _measure(chosen: Sequence[Case], quick: bool) -> list[str]:
    """Names of the runs that failed."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    failed = []
    for hosts, cases in groupby(chosen, key=lambda case: case.hosts):
        with lab(LAB, hosts, *FULL_DUPLEX) if hosts and os.geteuid() == 0 else nullcontext():
            failed += [case.name for case in cases if not _run(case, quick)]
    return failed


def _run(case: Case, quick: bool) -> bool:
    """Run a case, or note why not; False if it failed."""
    path = RECORDS / f"{case.name}.json"
    path.unlink(missing_ok=True)
    missing = _missing(case)
    if missing:
        path.write_text(json.dumps({"not_measured": missing}, indent=1) + "\n")
        print(f"peers: {case.name} is not measured: {missing}", flush=True)
        return True
    given = {
        "sizes": peers_cases.QUICK_SIZES if quick else peers_cases.SIZES,
        "parameters": peers_cases.QUICK_PARAMETERS if quick else peers_cases.PARAMETERS,
        "cap": "0.3" if quick else "2",
        "steps": "3" if quick else "6",
        "json": path,
    }
    program = ["python", "-m", *shlex.split(case.program.format(**given))]
    if case.hosts:
        command = netlab("run", "--name", LAB, "--mpi", case.mpi, "--timeout", f"{_LONGEST:g}", "--", *program)
    else:
        words = peers_cases.started(case).split()
        if case.mpi == peers_cases.NO_MPI:
            command = [str(_python(case).with_name(words[0])), *words[1:], *program[1:]]
        else:
            command = [str(_python(case)), *words[1:], *program]
    print(f"peers: {case.name}", flush=True)
    # Over gloo `auto` measures the links itself, at the group's first use.
    own = {"OMP_NUM_THREADS": "1"} if case.mpi == peers_cases.NO_MPI else {"COMPCOLL_PROFILE": "defaults"}
    status = measure(command, path, _LONGEST + 30, {**os.environ, **own})
    if status:
        path.write_text(json.dumps({"not_measured": f"failed with exit status {status}"}, indent=1) + "\n")
    return status == 0


def _python(case: Case) -> Path:
    return LAUNCH.parent / peers_cases.MPIS[case.mpi] / "bin" / "python"


def _missing(case: Case) -> str:
    """What a case needs and is not here; empty if it can run."""
    if not _python(case).exists():
        return f"not installed: make MPI={case.mpi} install"
    asked = subprocess.run(
        [_python(case), "-c", "import compcoll" + ", torch" * case.torch], capture_output=True, timeout=300
    )
    if asked.returncode:
        return "PyTorch is not installed: make measurements does that" if case.torch else "compcoll cannot be imported"
    if case.hosts and os.geteuid() != 0:
        return "netlab needs root"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
