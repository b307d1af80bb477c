"""The table of docs/measurements/reliability.md: runs each row's tests, and writes what was seen (`make reliability`).

    .venv/bin/python launch/reliability.py
    .venv/bin/python launch/reliability.py 1 2 3 4 5 6 7 10

Without arguments all rows are run, which takes about 20 minutes on two cores that nothing else wants; those with a
number take some five. Rows that are not run stay on the page as they are. Each has a limit of time, at which it is
ended and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from compcoll.tools.machine import cpu
from osu_like_bench.machine import commit

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "measurements" / "reliability.md"
BEGIN, END = "<!-- rows by launch/reliability.py -->\n", "<!-- end of the rows -->\n"
HEAD = "| | promise | outcome | seen | when |\n|---|---|---|---|---|\n"
ATTACKS = "tests/reliability/test_attacks.py"
CHECKS = "tests/mpi/test_mpi.py"


@dataclass(frozen=True)
class Row:
    """A promise, and the tests that show it.

    Attributes
    ----------
    name : str
        By which it is asked for.
    promise : str
        For people.
    tests : tuple of str
        Arguments of pytest.
    chosen : str
        An expression of pytest's ``-k``; empty for all of them.
    ranks : str
        Of the checks in tests/mpi.
    limit : int
        Seconds.
    """

    name: str
    promise: str
    tests: tuple[str, ...]
    chosen: str = ""
    ranks: str = "2,3"
    limit: int = 300


ROWS = [
    Row(
        "1",
        "Ranks with and without a time-out make the same call",
        (CHECKS,),
        "time_outs_of_some_ranks or blocking_and_nonblocking_belong",
    ),
    Row(
        "2",
        "A time-out of 2 s, one rank stopped halfway, four processes that compute: all others are told within 3 s",
        ("tests/reliability/test_waits.py", "tests/collectives/test_timeouts.py"),
        "busy_cores or stopped_for_too_long or not_looks",
        limit=480,
    ),
    Row(
        "3",
        "DDP, DGC, FSDP2 and ACP-SGD wait for the process group's time-out, or timeout=",
        ("tests/torch/test_timeouts.py",),
    ),
    Row(
        "4",
        "What fails or is late while a communicator is made fails on all ranks, in time",
        (ATTACKS,),
        "construction",
    ),
    Row(
        "5",
        "auto knows that calls are bounded: shared memory from 128 KiB to 8 MiB",
        (CHECKS,),
        "time_outs_cost_nothing",
    ),
    Row(
        "6",
        "Thousands under way and new sizes: the work of each does not grow",
        ("tests/collectives/test_many_in_flight.py", "tests/collectives/test_recording.py", ATTACKS),
        "looks_do_not_grow or sizes or safety_costs",
    ),
    Row(
        "7, 8, 9",
        "Foreign bytes, lengths, numbers and versions end in an error of compcoll's, never in a wrong sum",
        (ATTACKS, "tests/collectives/test_mismatch.py"),
        "foreign_bytes or another_length or absurd or mutated",
    ),
    Row(
        "10",
        "Communicators that are dropped, forked, or used after MPI's end",
        (ATTACKS,),
        "test_ends or many_are_dropped or children or no_store",
    ),
    Row(
        "late-ranks",
        "Who is missing, and where, within the time-out and a second",
        ("tests/collectives/test_timeouts.py",),
    ),
    Row("mismatches", "Calls that do not belong together", ("tests/collectives/test_mismatch.py",)),
    Row(
        "dead-ranks",
        "Ranks killed at any moment, and training that goes on",
        ("tests/reliability/test_reliability.py",),
        "not many_collectives",
        limit=2400,
    ),
    Row("long-runs", "10^5 collectives", ("tests/reliability/test_reliability.py",), "many_collectives", limit=900),
    Row("waits", "Waits that sleep", ("tests/reliability/test_waits.py",), "not busy_cores"),
    Row(
        "ends",
        "Ends, interrupts, uncaught errors, states and checkpoints",
        tuple(f"tests/reliability/test_{name}.py" for name in ("endings", "uncaught", "states")),
        limit=600,
    ),
    Row(
        "bytes",
        "Decoders, data races, checksums",
        ("tests/kernels/test_fuzz.py", "tests/codecs/test_checksum.py"),
        limit=1800,
    ),
    Row("errors-over-mpi", "Refusals, mismatches and late ranks over MPI", (CHECKS,), "check_errors", "2,3,4", 600),
]


def main(words: Sequence[str] | None = None) -> int:
    """Run rows, and write them to the page. Returns an exit status: how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="names of the table's rows; all by default")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write to")
    arguments = parser.parse_args(words)
    names = [row.name for row in ROWS]
    chosen = [row for row in ROWS if not arguments.rows or set(row.name.split(", ")) & set(arguments.rows)]
    if unknown := set(arguments.rows) - {part for name in names for part in name.split(", ")}:
        parser.error(f"no rows {', '.join(sorted(unknown))}: there are {'; '.join(names)}")
    failed = 0
    for number, row in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {row.name}: {row.promise} (at most {row.limit} s)", flush=True)
        well, line = run(row)
        failed += not well
        arguments.page.write_text(updated(arguments.page.read_text(), [(row, line)]))
    print(f"{arguments.page}: {len(chosen)} rows written, {failed} of them failed")
    return failed


def run(row: Row) -> tuple[bool, str]:
    """Run a row's tests; return whether all passed, and the row."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "pytest", "--long", "-q", "--mpi", "openmpi", "--ranks", row.ranks]
        command += ["--figures", str(figures), *row.tests, *(("-k", row.chosen) if row.chosen else ())]
        begun = time.monotonic()
        tests = subprocess.Popen(command, cwd=REPOSITORY)
        try:
            tests.wait(row.limit)
        except subprocess.TimeoutExpired:
            tests.send_signal(signal.SIGINT)  # pytest ends the ranks that it has started
            tests.wait()
            return False, written(row, f"**not ended** in {row.limit} s", ())
        seconds = time.monotonic() - begun
        told = json.loads(figures.read_text()) if figures.exists() else {"outcomes": {}, "figures": []}
    outcomes = {kind: count for kind, count in told["outcomes"].items() if count}
    well = bool(outcomes.get("passed")) and not outcomes.keys() & {"failed", "error"}
    text = ", ".join(f"{count} {kind}" for kind, count in outcomes.items()) or "no test ran"
    return well, written(row, f"{text if well else f'**{text}**'} in {seconds:.0f} s", told["figures"])


def written(row: Row, outcome: str, figures: Iterable[str]) -> str:
    """A row as a line of the table."""
    seen = "<br>".join(figures).replace("|", "/")
    when = f"{date.today()}, `{commit() or 'no commit'}`, load {os.getloadavg()[0]:.0f}"
    return f"| {row.name} | {row.promise} | {outcome} | {seen} | {when} |\n"


def updated(page: str, lines: Sequence[tuple[Row, str]]) -> str:
    """The page with these rows in the place of those of their names, and this machine."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    known = {match[1]: match[0] for match in re.finditer(r"^\| ([^|]+) \|.*\n", table, re.MULTILINE)}
    known |= {row.name: line for row, line in lines}
    rows = "".join(known[row.name] for row in ROWS if row.name in known)
    machine = f"Last run on {cpu()[0]}, {os.cpu_count()} cores, Open MPI, Python {sys.version.split()[0]}.\n\n"
    return f"{before}{BEGIN}{machine}{HEAD}{rows}{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
