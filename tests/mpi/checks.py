"""Runs check functions in few MPI jobs, and hands out each one's outcome as soon as it is known."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from mpi.job import Job
from mpi.run import HERE

THE_END = "the_end"
"""What follows the last check: the job may still crash or hang in MPI_Finalize."""

DEATHS = 3  # jobs that may die before the remaining checks are given up


@dataclass(frozen=True)
class Outcome:
    status: str  # passed, skipped or failed
    detail: str = ""


class CheckJob:
    """`names` on `ranks` ranks, in order, in one job; where a check takes it down, another runs what is behind it."""

    def __init__(
        self,
        ranks: int,
        names: Sequence[str],
        folder: Path,
        prefix: Path | None = None,
        checks: Path = HERE,
        timeout: float = 120.0,
    ) -> None:
        self.ranks, self.names, self.folder, self.prefix = ranks, list(names), folder, prefix
        self.checks, self.timeout = checks, timeout
        self._outcomes: dict[str, Outcome] = {}
        self._deaths = 0
        self._job: Job | None = None
        self._start()

    def outcome(self, name: str) -> Outcome:
        """Wait until the check is done."""
        while True:
            done = self._job is None or not self._job.running
            self._read()
            if name in self._outcomes:
                return self._outcomes[name]
            if done:
                self._bury()
            elif time.monotonic() > self._last_sign + self.timeout + 60.0:
                assert self._job is not None
                self._job.kill(f"no sign of life for {self.timeout + 60.0:g} s")
            else:
                time.sleep(0.02)

    def report(self, name: str) -> None:
        """Let the test of a check, or of `THE_END`, end as that does."""
        outcome = self.end() if name == THE_END else self.outcome(name)
        if outcome.status == "skipped":
            pytest.skip(outcome.detail)
        if outcome.status == "failed":
            pytest.fail(outcome.detail, pytrace=False)

    def end(self) -> Outcome:
        """Wait for the end of the job."""
        for name in self.names:
            self.outcome(name)
        if self._job is None:
            return Outcome("passed")
        self._job.wait(60.0)
        any_failed = any(outcome.status == "failed" for outcome in self._outcomes.values())
        if self._job.returncode == 0 or (any_failed and self._job.killed_because is None):
            return Outcome("passed")
        return Outcome("failed", "all checks were done, but the job did not end well\n" + self._job.report())

    def close(self) -> None:
        if self._job is not None:
            self._job.kill()

    def _start(self) -> None:
        remaining = [name for name in self.names if name not in self._outcomes]
        self._results = self.folder / f"results-{self._deaths}.jsonl"
        self._last_sign = time.monotonic()
        self._lines_read = 0
        self._started: str | None = None
        command = ["--results", self._results, "--folder", self.checks, "--timeout", f"{self.timeout:g}", *remaining]
        self._job = Job(self.ranks, [HERE / "run.py", *command], self.folder / f"job-{self._deaths}", self.prefix)

    def _read(self) -> None:
        text = self._results.read_text() if self._results.exists() else ""
        lines = text.split("\n")[:-1]
        for line in lines[self._lines_read :]:
            event = json.loads(line)
            self._last_sign = time.monotonic()
            if event["status"] == "started":
                self._started = event["check"]
            else:
                self._started = None
                self._outcomes[event["check"]] = Outcome(event["status"], event.get("detail", ""))
        self._lines_read = len(lines)

    def _bury(self) -> None:
        """The job is gone and checks remain: blame the one that was running, and go on behind it."""
        assert self._job is not None
        self._job.kill()
        report = self._job.report()
        remaining = [name for name in self.names if name not in self._outcomes]
        self._deaths += 1
        if self._started is None or self._deaths == DEATHS:
            lost = Outcome("failed", f"not run: the job ended before, the {self._deaths}. to do so\n{report}")
            self._outcomes |= dict.fromkeys(remaining, lost)
        self._outcomes[self._started or remaining[0]] = Outcome("failed", report)
        if all(name in self._outcomes for name in self.names):
            self._job = None
        else:
            self._start()
