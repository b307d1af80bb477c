"""How the cases of a page are run, with commands of a shell in the place of benchmarks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from processes import ends

from osu_like_bench.pages import run
from osu_like_bench.pages.documents import Page
from osu_like_bench.pages.records import UP_TO_DATE, Case, Record, means
from osu_like_bench.pages.run import Measurement

TIMES = ("compcoll",)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "TRIES", 1)


def writing(text: str) -> str:
    """A command that writes this to its file; a launch's number stands for N."""
    return f"sh -c 'echo {json.dumps(text)} | sed s/N/{{launch}}/ > {{json}}'"


def result(value: str) -> str:
    return json.dumps({"results": [{"contender": "a", "mean_us": value, "codec_us": None}]}).replace('"N"', "N")


def test_launches_take_turns_and_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(tmp_path / "page.json")
    record.cases = {name: Case(writing(result("N")), launches=3 - (name == "b")) for name in "ab"}
    page = Page("page", {}, TIMES, ("contender", "mean_us"), merge=means)
    assert not Measurement(page, record).run(["a", "b"])
    said = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["a, launch 0", "b, launch 0", "a, launch 1", "b, launch 1", "a, launch 2"]
    again = Record(tmp_path / "page.json")
    assert [case.results for case in again.cases.values()] == [
        [{"contender": "a", "mean_us": 1.0}],
        [{"contender": "a", "mean_us": 0.5}],
    ]
    assert again.cases["a"].run["cores"] and again.cases["a"].others_percent is not None


def test_a_case_that_fails_keeps_its_figures(tmp_path: Path) -> None:
    record = Record(tmp_path / "page.json")
    old = [{"contender": "a", "mean_us": 7.0}]
    record.cases = {"old": Case("sh -c 'exit 3'", results=old), "new": Case("sh -c 'exit 3'")}
    failed = Measurement(Page("page", {}, TIMES), record).run(["old", "new"])
    assert failed == dict.fromkeys(("old", "new"), "failed with exit status 3")
    assert record.cases["old"].results == old and not record.cases["old"].missing
    assert Record(record.path).cases["new"].missing == "failed with exit status 3"


def test_what_failing_tests_saw_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    record = Record(tmp_path / "page.json")
    record.cases = {"a": Case(writing(result("1")).rstrip("'") + "; exit 1'")}
    failed = Measurement(Page("page", {}, TIMES, keep_failed=True), record).run(["a"])
    assert failed == {"a": "exit status 1"} and record.cases["a"].results


def test_a_command_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_GRACE", 1.0)  # all of it passes where a shell's background jobs ignore SIGINT
    case = Case("sh -c 'sleep 100 & echo $! > pid; wait'")
    began = time.monotonic()
    status, _ = run.launch(case, tmp_path / "a.json", 0, 1.0)
    assert status == run.NOT_ENDED and time.monotonic() - began < 20
    assert ends(int((tmp_path / "pid").read_text()))


def test_what_is_not_here_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(run, "REPOSITORY", tmp_path)
    record = Record(tmp_path / "page.json")
    record.cases = {"lab": Case("x", lab="--hosts 2"), "mpi": Case("MPI=impi launch/mpirun -n 2 x")}
    Measurement(Page("page", {}, TIMES), record).run(["lab", "mpi"])
    told = [case.missing for case in record.cases.values()]
    assert told == ["netlab needs root", "not installed: make MPI=impi install"]


def test_launches_with_rows_of_their_own_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a row of today's code is not launched again; what was refused neither; a row of older code is."""
    states = {"new": UP_TO_DATE, "old": "older"}
    monkeypatch.setattr(run, "why_older", lambda cases, times: states[cases[0].run["commit"]])
    monkeypatch.setattr(run, "commit", lambda: "dirty")
    record = Record(tmp_path / "page.json")
    rows = [{"launch": launch, "commit": commit, "mean_us": 7} for launch, commit in ((0, "new"), (1, "old"))]
    record.cases = {
        "a": Case(writing(result("N")), launches=3, results=rows),
        "refused": Case("sh -c 'exit 2'"),
        "b": Case(writing(result("N")), run={"commit": "new"}, missing="refused"),
    }
    page = Page("page", {}, TIMES, ("mean_us",), by_row=True)
    late = Measurement(page, record, end=time.monotonic() - 1).run(["a"])
    assert "no time was left" in late["a"] and record.cases["a"].results == rows
    assert not Measurement(page, record).run(["a", "refused", "b"])
    found = record.cases["a"].results
    assert [(row["launch"], row["mean_us"]) for row in found] == [(0, 7), (1, 1), (2, 2)]
    assert record.cases["refused"].missing == "refused" and not record.cases["b"].results
