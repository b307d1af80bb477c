"""Run the commands of a page, on this machine or in a lab of netlab, each with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from launcher import launcher
from netlab_run import LoadMeter

from ..machine import REPOSITORY, commit, describe
from .documents import DISTURBED, Output, Page
from .records import RUN, UP_TO_DATE, Case, Record, Row, why_older

BUILD = Path("build/pages")
"""Folder of outputs. It is relative to the repository's root, so that records contain no folders of this machine."""
LAUNCH = REPOSITORY / "launch"
TRIES = 2
"""Maximum number of tries of a launch that other processes disturb."""
NOT_ENDED, REFUSED = 124, 2
"""Exit statuses: of a command ended at its time limit, and of wrong arguments, such as a refused method."""
LATE = NOT_ENDED, 0.0
"""Status and load of a command that was not started, since no time was left."""
_LAB = "pages"
_SAMPLE = 0.5
_GRACE = 30.0
"""Seconds for an interrupted program to end its ranks."""


@dataclass
class Measurement:
    """Launches of a page's cases.

    Attributes
    ----------
    quick : bool
        Whether to launch each case only once, with a fifth of its time.
    end : float
        Time on the clock of `time.monotonic` after which nothing is launched.
    failed : dict
        Reasons of cases that could not be measured.
    """

    page: Page
    record: Record
    quick: bool = False
    end: float = float("inf")
    failed: dict[str, str] = field(default_factory=dict)
    _rows: dict[str, dict[int, list[Row]]] = field(default_factory=dict)

    def run(self, names: Sequence[str]) -> dict[str, str]:
        """Launch cases, lab by lab. Cases with several launches take turns. Return the reasons of failures, by case."""
        cases = self.record.cases
        for lab, group in groupby(sorted(names, key=lambda name: cases[name].lab), key=lambda name: cases[name].lab):
            chosen = [name for name in group if self._possible(name)]
            turns = 1 if self.quick else max((cases[name].launches for name in chosen), default=0)
            with _lab(lab) if lab and chosen else contextlib.nullcontext():
                for turn in range(turns):
                    for name in chosen:
                        if turn < cases[name].launches and name not in self.failed and not self._done(name, turn):
                            self._launch(name, turn)
        return self.failed

    def _possible(self, name: str) -> bool:
        """Return whether this machine has what a case needs. If not, note what is missing."""
        case = self.record.cases[name]
        missing = ""
        if case.lab and os.geteuid() != 0:
            missing = "netlab needs root"
        elif not _python(case).exists():
            missing = f"not installed: make MPI={_mpi(case)} install"
        if missing:
            self._fail(name, missing)
        return not missing

    def _fail(self, name: str, why: str) -> None:
        """Note that a case could not be measured. Earlier figures stay, unless the page keeps failed results."""
        self.failed[name] = why
        case = self.record.cases[name]
        if self.page.keep_failed:
            case.results = []
        if not case.results:
            case.missing = why
            self.record.save()

    def _done(self, name: str, turn: int) -> bool:
        """Return whether a launch was already measured, or refused, with the current code."""
        case = self.record.cases[name]
        rows = [row for row in (case.results or [case.run]) if row.get("launch", turn) == turn and row.get("commit")]
        if not self.page.by_row or not rows:
            return False
        return rows[0]["commit"] == commit() or why_older([Case("", run=rows[0])], self.page.times) == UP_TO_DATE

    def _launch(self, name: str, turn: int) -> None:
        """Launch a case, once more if it was disturbed, and store its figures."""
        case, path = self.record.cases[name], BUILD / self.page.name / f"{name}.json"
        print(f"{self.page.name}: {name}" + f", launch {turn}" * (case.launches > 1), flush=True)
        for _ in range(TRIES):
            began = time.monotonic()
            left = self.end - began
            status, others = launch(case, path, turn, min(case.seconds, left), quick=self.quick) if left > 0 else LATE
            if status or others <= DISTURBED:
                break
        run = describe() | {"seconds": round(time.monotonic() - began, 1), "ranks": case.ranks}
        if status == NOT_ENDED and left < case.seconds:
            self.failed[name] = "no time was left: run the same command again to go on"
        elif status == REFUSED and self.page.by_row:
            case.missing, case.results = "refused", []
            self._keep(case, run)
        elif not path.exists() or (status and not self.page.keep_failed):
            self._fail(name, f"failed with exit status {status}")
        else:
            output = json.loads(path.read_text())
            output["run"] = run | output.get("run", {})
            others = max(others, (case.others_percent or 0.0) if self._rows.get(name) else 0.0)
            case.missing, case.others_percent = "", round(others, 1)
            case.results = self._merged(name, turn, output)
            self._keep(case, output["run"])
            if status:
                self.failed[name] = f"exit status {status}"

    def _keep(self, case: Case, run: Mapping[str, Any]) -> None:
        case.run = {key: run[key] for key in RUN if key in run}
        self.record.save()

    def _merged(self, name: str, turn: int, output: Output) -> list[Row]:
        """Return the merged rows of all launches of a case so far."""
        launches, rows = self._rows.setdefault(name, {}), self.page.shown(self.page.rows(output))
        if not self.page.by_row:
            launches[turn] = rows
            return self.page.shown(self.page.merge(list(launches.values())))
        own = {"launch": turn, "commit": output["run"]["commit"], "date": output["run"]["date"][:10]}
        launches[turn] = [own | row for row in rows]
        kept = [row for row in self.record.cases[name].results if row["launch"] not in launches]
        return sorted([*kept, *chain.from_iterable(launches.values())], key=lambda row: int(row["launch"]))


def launch(case: Case, path: Path, turn: int, seconds: float, *, quick: bool = False) -> tuple[int, float]:
    """Run a case's command, which writes ``path``. Return its exit status and other processes' share of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    meter = LoadMeter()
    environ = {name: value for name, value in os.environ.items() if name != "COMPCOLL_PROFILE"} | case.environment
    status = finish(words(case, path, turn, quick=quick), environ, seconds, meter)
    return status, meter.others()


def words(case: Case, path: Path, turn: int = 0, *, quick: bool = False) -> list[str]:
    """Return the words of a case's command, with the Python and the file to use."""
    given = case.command if "{json}" in case.command else f"{case.command} --json {{json}}"
    found = shlex.split(given.replace("{json}", shlex.quote(str(path))).replace("{launch}", str(turn)))
    while "=" in found[0]:
        del found[0]  # MPI=…, which selects the environment in `_python`
    python = str(_python(case))
    starts = {"python": [python], "torchrun": [str(Path(python).with_name("torchrun"))]}
    if found[0].startswith("launch/"):
        starts[found[0]] = [python, found[0]]
        if found[:2] == ["launch/netlab", "run"]:
            found[1:2] = ["run", "--name", _LAB]
    found[:1] = starts.get(found[0], found[:1])
    if quick:
        pairs = zip(["", *found], found, strict=False)
        found = [f"{float(word) / 5:g}" if before == "--time-cap" else word for before, word in pairs]
    return found


def _mpi(case: Case) -> str:
    return case.command[4:].split()[0] if case.command.startswith("MPI=") else ""


def _python(case: Case) -> Path:
    """Return the Python of the environment in which a case runs."""
    mpi = _mpi(case)
    return REPOSITORY / launcher.ENVIRONMENTS[mpi] / "bin" / "python" if mpi else Path(sys.executable)


def finish(command: Sequence[str], environ: Mapping[str, str], seconds: float, meter: LoadMeter) -> int:
    """Run a command with a time limit. Return its exit status, or `NOT_ENDED` if the limit was reached."""
    process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_SAMPLE)
            meter.sample()
        return NOT_ENDED
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # mpirun, netlab and pytest end what they have started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _lab(settings: str) -> Iterator[None]:
    """Run a block while a lab of netlab with these settings is up."""

    def netlab(*command: str) -> None:
        subprocess.run([sys.executable, str(LAUNCH / "netlab"), *command], check=False)

    netlab("up", "--name", _LAB, *settings.split(), "--replace")
    try:
        yield
    finally:
        netlab("down", "--name", _LAB)
