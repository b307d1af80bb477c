"""Pages: documents with marks, and the text between the marks, which is generated from a record."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine import REPOSITORY
from .pictures import for_both_schemes
from .records import Case, Record, Row, middle, why_older

FOLDER = Path("docs/measurements")

DISTURBED = 10.0
"""If other processes used more than this percentage of the machine, times are only hints."""
MIB = 1 << 20
MET = {True: "met", False: "**missed**", None: "not measured"}

_PART = re.compile(r"<!-- (?!end\b)([^\n]*?) -->(\n?)(.*?)<!-- end -->", re.DOTALL)


def filled(document: str, draw: Callable[..., Iterable[str]]) -> str:
    """Return the document with new text after each mark. ``draw`` takes the mark's words and returns lines.

    If a mark ends its line, the text gets lines of its own. Otherwise it stays within the mark's line.
    """

    def part(found: re.Match[str]) -> str:
        text = "\n".join(draw(*shlex.split(found[1])))
        return f"<!-- {found[1]} -->{found[2]}{text}{found[2] if text else ''}<!-- end -->"

    return _PART.sub(part, document)


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    for number, row in enumerate((head, *rows)):
        yield "|" + "".join(f" {cell} |" if cell != "" or number else " |" for cell in row)
        if not number:
            yield "|" + "---|" * len(head)


def command(case: Case, *, broken: bool = False) -> Iterator[str]:
    """Yield a code block with a case's command. With ``broken``, ``--compare`` gets a line of its own."""
    yield "```sh"
    if case.lab:
        yield f"launch/netlab up {case.lab}"
    yield case.command.replace(" --compare", " \\\n    --compare") if broken else case.command
    yield "```"


def about(case: Case) -> str:
    """Return a text with machine, date and commit of a case, and whether it was disturbed."""
    run, others = case.run, case.others_percent or 0.0
    software = run.get("mpi") or ("torch " + run["torch"] if "torch" in run else "one process")
    hints = ": **hints**" if others > DISTURBED else ""
    return (
        f"{machine(case)}, {software}, {run['date'][:10]}, commit `{run['commit']}`; "
        f"others used {others:.0f} % of the machine{hints}."
    )


def machine(case: Case | None) -> str:
    """Return a text with CPU, cores and instruction set."""
    run = {} if case is None else case.run
    return f"{run.get('cpu')}, {run.get('cores')} cores, {run.get('instruction_set')}"


def machines(record: Record) -> Iterator[str]:
    """Yield a part of a page: machines, dates and commits of all cases, and the largest load by other processes."""
    cases = [case for case in record.measured().values() if case.run]
    by_cores = sorted(cases, key=lambda case: case.run.get("cores", 0))
    where = {(case.run["cpu"], case.run["instruction_set"]): machine(case) for case in by_cores if "cpu" in case.run}
    dates = sorted({case.run["date"][:10] for case in cases if "date" in case.run})
    commits = ", ".join(f"`{commit}`" for commit in sorted(set().union(*(case.commits() for case in cases))))
    others = max((case.others_percent or 0.0 for case in cases), default=0.0)
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "not yet measured"
    yield f"Machine: {'; '.join(where.values())}; {when}, commit {commits}. Others used up to {others:.0f} % of it."


def runs(record: Record) -> Iterator[str]:
    """Yield a part of a page: a table with command, software, date and commit of each case."""
    lines = []
    for name, case in record.cases.items():
        run, shown = case.run, f"`{case.command.replace('{json}', f'{name}.json')}`"
        load = "" if case.others_percent is None else f"{case.others_percent:.0f} %"
        if not case.results:
            shown = f"not measured: {case.missing or 'never run'}"
        software = run.get("mpi") or ("torch " + run["torch"] if "torch" in run else "")
        commits = ", ".join(f"`{commit}`" for commit in sorted(case.commits()))
        lines.append((name, software, run.get("date", "")[:10], commits, load, shown))
    yield from table(("case", "by", "date", "commit", "load of others", "command"), lines)


Output = dict[str, Any]
"""The JSON that a command wrote."""


def results(output: Output) -> list[Row]:
    """Return the results in the output of a benchmark."""
    found: list[Row] = output["results"]
    return found


@dataclass(frozen=True)
class Page:
    """A document of docs/measurements and the record beside it.

    Attributes
    ----------
    name : str
        The name of both files, without suffix.
    parts : mapping
        Functions that generate the text after marks, by a mark's first word. They take the record and the other words.
    times : tuple of str
        Git pathspecs of the timed code.
    columns : tuple of str
        The figures that the record keeps of each row; all if empty.
    rows : callable
        Takes a command's output and returns its rows.
    merge : callable
        Takes the rows of each launch and returns the rows to keep.
    plot : callable, optional
        Draws pictures into the documents' folder.
    by_row : bool
        Whether each launch has a row of its own, with its number as ``"launch"`` and its commit. Launches already
        measured with the current code are skipped, and their rows stay.
    keep_failed : bool
        Whether the output of a failed command counts.
    derived : callable
        Takes the documents' folder and returns cases that follow from another page's record, by name.
    study : bool
        Whether the page is a study, whose figures are those of its date. Other pages are measured for each release.
    """

    name: str
    parts: Mapping[str, Callable[..., Iterator[str]]]
    times: tuple[str, ...]
    columns: tuple[str, ...] = ()
    rows: Callable[[Output], list[Row]] = results
    merge: Callable[[Sequence[list[Row]]], list[Row]] = middle
    plot: Callable[[Record, Path], None] | None = None
    by_row: bool = False
    keep_failed: bool = False
    derived: Callable[[Path], Mapping[str, Case]] = lambda folder: {}
    study: bool = False

    def shown(self, rows: Iterable[Row]) -> list[Row]:
        """Return rows with only the figures that the record keeps."""
        return [{name: row[name] for name in self.columns or row if row.get(name) is not None} for row in rows]

    def record(self, repository: Path = REPOSITORY) -> Record:
        """Read the record beside the document, and add the derived cases that it lacks."""
        folder = repository / FOLDER
        record = Record(folder / f"{self.name}.json")
        for name, case in self.derived(folder).items():
            record.cases.setdefault(name, case)
        return record

    def state(self, repository: Path = REPOSITORY) -> str:
        """Return `UP_TO_DATE`, or a text that begins with "older" if the code has changed; for a study its days."""
        if self.study:
            cases = self.record(repository).cases.values()
            days = sorted({row["date"][:10] for case in cases for row in (case.run, *case.results) if "date" in row})
            return "study of " + " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "study, not yet measured"
        return why_older(self.record(repository).cases.values(), self.times, repository)

    def write(self, record: Record) -> int:
        """Fill the document beside a record, draw its pictures, and return how many goals are missed."""
        path = record.path.with_suffix(".md")
        text = filled(path.read_text(), lambda part, *words: self.parts[part](record, *words))
        path.write_text(text)
        if self.plot is not None:
            with for_both_schemes():
                self.plot(record, path.parent)
        return text.count("| **missed**") + text.count(", **missed**")
