"""The record of a page: commands and their figures, with machine, date and commit of each measurement.

A page is called older if its timed code has changed since a commit in its record, if the record lacks a commit, or if
the code had uncommitted changes. Changes of comments, docstrings, layout and stubs do not count.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..machine import REPOSITORY
from ..report import plain

RUN = ("date", "commit", "cpu", "cores", "instruction_set", "mpi", "torch", "seconds")
"""Fields of a run's description that the record keeps."""
DIGITS = 10
"""Significant digits of a figure in a record."""

UP_TO_DATE = "up to date"
_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""", re.DOTALL)
_STUBS = ":!*.pyi"
_NAMED = 3
"""Maximum number of changed files to list."""
_UNKNOWN = "?"
"""Placeholder for changed files if git does not know the commit."""

GPU = (":!compcoll/gpu", ":!compcoll/execute/gpu*", ":!compcoll/kernels/device*")
"""Git pathspecs that exclude (``:!``) GPU code, on which no CPU measurement depends."""
PROMISES = ("compcoll", ":!compcoll/torch", ":!compcoll/simulation", ":!compcoll/tools", *GPU)
"""Pathspecs of the code whose promises the tests of reliability check."""
_UNTIMED = (
    *("__init__.py", "__main__.py", "api.py", "deprecated.py", "encoding.py", "errors.py", "mpi", "plan/advice.py"),
    *("plan/explanation.py", "execute/failures.py", "execute/failure_detector.py", "execute/trace.py"),
    *("transports/job_end.py", "transports/loopback.py"),
)
CALLS = (*PROMISES, *(f":!compcoll/{name}" for name in _UNTIMED))
"""Pathspecs of the code that a timed collective over MPI runs: no messages of errors, and no other interfaces."""
NO_SHARDS = (":!compcoll/torch/gradients/fsdp.py", ":!compcoll/torch/gradients/columns.py")
"""Pathspecs that exclude FSDP2, which no page trains with."""
TRAINING = (*(name for name in CALLS if name != ":!compcoll/torch"), *NO_SHARDS)
"""Pathspecs of the code that training steps run."""
SENDING = tuple(
    f":!compcoll/kernels/{name}"
    for name in ("mpi_*", "shared_*", "collective.*", "program.*", "exchange.*", "operation.*")
)
"""Pathspecs that exclude code that only sends, on which no error of a result depends."""

Row = dict[str, Any]
"""The figures of one measurement, for example of a contender at a size."""


@dataclass
class Case:
    """A command and its measured figures.

    Attributes
    ----------
    command : str
        The command, to run in the repository's root. ``{json}`` stands for the file that it writes; without it,
        ``--json FILE`` is appended. ``{launch}`` stands for the launch's number, counted from 0.
    lab : str
        Arguments of ``netlab up``; empty if the command needs no lab.
    environment : dict
        Additional environment variables of the command.
    launches : int
        Number of launches.
    seconds : int
        Time limit of one launch.
    remark : str
        A text for the page.
    run : dict
        Machine, date and commit of the last launch.
    others_percent : float or None
        Largest share of the machine that other processes used during a launch; None if unknown.
    missing : str
        Why there are no figures; empty if there are.
    results : list of Row
        The figures.
    """

    command: str
    lab: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    launches: int = 1
    seconds: int = 600
    remark: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    others_percent: float | None = None
    missing: str = ""
    results: list[Row] = field(default_factory=list)

    @property
    def hosts(self) -> int:
        """Number of hosts of the lab; 0 without a lab."""
        found = re.search(r"--hosts (\d+)", self.lab)
        return int(found[1]) if found else 0

    @property
    def contenders(self) -> list[str]:
        """The contenders' names, in the order of the results."""
        return list(dict.fromkeys(row["contender"] for row in self.results))

    @property
    def sizes(self) -> list[int]:
        """The measured sizes in bytes, ascending."""
        return sorted({row["size"] for row in self.results})

    def row(self, contender: str, size: int) -> Row | None:
        """Return the figures of a contender at a size; None if it was not measured."""
        return self.by_contender(size).get(contender)

    def us(self, contender: str, size: int) -> float | None:
        """Return a median in microseconds; None if it was not measured."""
        row = self.row(contender, size)
        return None if row is None else float(row["median_us"])

    def by_contender(self, size: int | None = None) -> dict[str, Row]:
        """Return the results by contender: those at a size, or without ``size`` those of a case without sizes."""
        return {row["contender"]: row for row in self.results if row.get("size") == size}

    @property
    def ranks(self) -> int:
        """Number of ranks that the command starts (``-n``); 1 by default."""
        found = re.search(r" -n (\d+)", self.command)
        return int(found[1]) if found else 1

    def commits(self) -> set[str]:
        """Return the commits at which the figures were measured."""
        return {found for row in (self.run, *self.results) if (found := row.get("commit"))}


class Record:
    """Reads and writes the cases of a page, in the JSON file beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: dict[str, Case] = {}
        content = json.loads(path.read_text()) if path.exists() else {}
        columns: list[str] = []
        for name, written in content.items():
            columns, rows = written.pop("columns", columns), written.pop("rows", ())
            results = [{c: value for c, value in zip(columns, row, strict=False) if value is not None} for row in rows]
            self.cases[name] = Case(**written, results=results)

    def measured(self) -> dict[str, Case]:
        """Return the cases with figures."""
        return {name: case for name, case in self.cases.items() if case.results}

    def save(self) -> None:
        """Write the file, one field or row per line. Columns are omitted if they equal the previous case's."""
        dumps = functools.partial(json.dumps, ensure_ascii=False)
        cases, columns = [], None
        for name, case in self.cases.items():
            written = _written(case)
            rows = written.pop("rows", None)
            if written.get("columns", columns) == columns:
                written.pop("columns", None)
            columns = written.get("columns", columns)
            lines = [f"{dumps(key)}: {dumps(value)}" for key, value in written.items()]
            lines += [] if rows is None else ['"rows": [\n   ' + ",\n   ".join(map(dumps, rows)) + "]"]
            cases.append(f" {dumps(name)}: {{\n  " + ",\n  ".join(lines) + "}")
        self.path.write_text("{\n" + ",\n".join(cases) + "\n}\n")


def _written(case: Case) -> dict[str, Any]:
    """Return a case in the file's form: without default values, and with figures as rows of columns."""
    default = vars(Case(""))
    written = {name: value for name, value in vars(case).items() if name != "results" and value != default[name]}
    if case.results:
        rows = plain(case.results, DIGITS)
        columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if value is not None))
        written |= {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}
    return written


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns matches a case's name, or a part of the name between commas."""
    return any(fnmatchcase(part, pattern) for pattern in patterns for part in {name, *name.split(", ")})


def middle(launches: Sequence[list[Row]], ours: str = "") -> list[Row]:
    """Merge launches: for each size, return the results of the median launch.

    The launches of a size are ordered by the time of contender ``ours`` divided by the fastest other time; without
    ``ours``, by the fastest time. Ratios within a launch are used, since conditions that differ between launches affect
    all contenders of a launch. Rows also get the medians and algorithms of all launches.
    """
    if len(launches) == 1:
        return launches[0]
    of_sizes = [[list(same) for _, same in groupby(launch, key=itemgetter("size"))] for launch in launches]
    found: list[Row] = []
    for same in zip(*of_sizes, strict=True):
        for place, row in enumerate(sorted(same, key=lambda rows: _lateness(rows, ours))[len(same) // 2]):
            each = {"median_us_of_launches": [rows[place]["median_us"] for rows in same]}
            if row.get("ran"):
                each["ran_in_launches"] = [rows[place]["ran"] for rows in same]
            found.append(row | each)
    return found


def _lateness(rows: Sequence[Row], ours: str) -> float:
    """Return the number by which `middle` orders launches, for the results at one size."""
    taken = {row["contender"]: float(row["median_us"]) for row in rows}
    own = taken.pop(ours, None)
    least = min(taken.values())
    return least if own is None else own / least


def means(launches: Sequence[list[Row]]) -> list[Row]:
    """Merge launches: return results whose times are means over all launches."""
    times = [name for name in launches[0][0] if name.endswith(("_us", "_ms"))]
    return [
        same[0] | {name: math.fsum(row[name] for row in same) / len(same) for name in times}
        for same in zip(*launches, strict=True)
    ]


def why_older(cases: Iterable[Case], times: Sequence[str], repository: Path = REPOSITORY) -> str:
    """Return `UP_TO_DATE` if the code at the paths ``times`` is as measured, else a text that begins with "older"."""
    noted = [case.commits() for case in cases if not case.missing]
    if not noted:
        return "older: never measured"
    found = set().union(*noted)
    why = []
    if missing := sum(not commits for commits in noted):
        why.append(f"{missing} of its records note no commit")
    if dirty := sorted(commit for commit in found if commit.endswith("-dirty")):
        why.append(f"measured with changes that no commit has ({', '.join(dirty)})")
    later = {commit: files for commit in sorted(found - set(dirty)) if (files := _later(commit, times, repository))}
    if later:
        worst = max(later, key=lambda commit: len(later[commit]))
        why.append(_shown(later[worst], worst, len(later) - 1))
    return f"older: {'; '.join(why)}" if why else UP_TO_DATE


def _later(commit: str, paths: Sequence[str], repository: Path) -> list[str]:
    """Return the files under these paths whose code has changed since a commit."""
    raw = ["diff", "--raw", "-z", "--no-renames", "--abbrev=40", commit, "HEAD", "--", *paths, _STUBS]
    try:
        listed = _git(repository, *raw).split("\0")
    except subprocess.CalledProcessError:
        return [_UNKNOWN]
    changed = []
    for about, name in zip(listed[::2], listed[1::2], strict=False):
        before, after = about.split()[2:4]
        if _code(repository, before, Path(name).suffix) != _code(repository, after, Path(name).suffix):
            changed.append(name)
    return changed


def _shown(files: Sequence[str], commit: str, others: int) -> str:
    """Return a text that lists the files changed since a commit, and counts other commits with changes."""
    more = f", some since {others} other commit{'s' * (others > 1)}" if others else ""
    if files == [_UNKNOWN]:
        return f"{commit} is no commit of this repository{more}"
    named = ", ".join(files[:_NAMED]) + ", …" * (len(files) > _NAMED)
    return f"{len(files)} file{'s' * (len(files) > 1)} that it times changed since {commit} ({named}){more}"


@functools.cache
def _code(repository: Path, blob: str, suffix: str) -> str:
    """Return the code of a stored file, without comments, docstrings and layout; empty if the file does not exist."""
    if not blob.strip("0"):
        return ""
    text = _git(repository, "cat-file", "blob", blob)
    if suffix == ".py":
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
        return ast.dump(tree)
    if suffix in (".h", ".cpp", ".cu"):
        text = _COMMENT.sub(lambda found: found[0] if found[0][0] in "\"'" else " ", text)
    return " ".join(text.split())


def _is_text(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _git(repository: Path, *words: str) -> str:
    asked = ["git", "-C", str(repository), *words]
    return subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout
