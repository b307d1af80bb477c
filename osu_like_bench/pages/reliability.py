"""The page reliability.md: long tests of time-outs, dead ranks, bad bytes and long runs. Each case runs some tests.

A first table lists the cases and their outcomes. The figures of each case follow in tables with one row per figure. If
a case exceeds its time limit, it is ended, and the page says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .documents import Output, Page, machines, table
from .records import PROMISES, Case, Record, Row

_NUMBER = r"([\d.]+)"

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        rf"(.+), (\d+) ranks: {_NUMBER} s \(sleeps came up to {_NUMBER} s late\)",
        ("wait", "ranks", "error after, s", "sleeps late by up to, s"),
    ),
    (
        rf"(.+), progress='(\w+)': (\d+) ranks killed and survived, longest time to the error {_NUMBER} s, "
        r"(\d+ of \d+) survivors knew that a rank had died",
        ("calls", "`progress=`", "ranks killed", "longest time to the error, s", "survivors that knew"),
    ),
    (
        r"training (.+): ranks died after steps \[(.*)\], losses \[(.*)\]",
        ("training", "ranks died after steps", "training losses"),
    ),
    (rf"(.+): {_NUMBER} µs, {_NUMBER} of the core", ("call", "time, µs", "of it computed by the rank, µs")),
    (rf"(.+): (.+) after {_NUMBER} s", ("attack", "the ranks raise", "after, s")),
    (
        rf"soak on (\w+), seed (\d+): {{'collectives': (\d+), 'ranks': (\d+), 'seconds': {_NUMBER}, "
        r"'resident_mib': \[(.*)\], 'memory_grown_by': (-?\d+), 'descriptors_grown_by': (-?\d+), "
        r"'requests_left': (\d+)}",
        (
            *("MPI", "seed", "collectives", "ranks", "s", "resident memory at each tenth, MiB"),
            *("memory grown by, bytes", "descriptors grown by", "requests left"),
        ),
    ),
    (
        rf"fuzzing, seed (\d+): (\d+) inputs without a finding, (\d+) kept for (\d+) edges, {_NUMBER} s: (.+)",
        ("seed", "inputs without a finding", "inputs kept", "edges", "s", "inputs of each decoder"),
    ),
    (r"(.+?): (.+)", ("figure", "value")),
    (r"(.+)", ("figure",)),
)
"""Patterns of the tests' figures, with a table's column for each group. The first pattern that matches counts."""


def _rows(output: Output) -> list[Row]:
    outcomes = {kind: count for kind, count in output["outcomes"].items() if count}
    return [{"outcomes": [f"{count} {kind}" for kind, count in outcomes.items()], "seen": output["figures"]}]


def _well(case: Case) -> bool:
    """Return whether all tests passed."""
    kinds = {outcome.split()[1] for row in case.results for outcome in row["outcomes"]}
    return "passed" in kinds and not kinds & {"failed", "error"}


def _table(record: Record) -> Iterator[str]:
    """Yield a table of the cases: what they test, and the outcome."""
    lines = []
    for name, case in record.cases.items():
        outcomes = case.results[0]["outcomes"] if case.results else [case.missing or "not run yet"]
        outcome = ", ".join(outcomes) or "no test ran"
        seconds = f" in {case.run['seconds']:.0f} s" if "seconds" in case.run else ""
        when = f"{case.run.get('date', '')[:10]}, `{case.run.get('commit') or 'no commit'}`"
        when += f", others used {case.others_percent:.0f} %" if case.others_percent is not None else ""
        lines.append((name, case.remark, (outcome if _well(case) else f"**{outcome}**") + seconds, when))
    yield from table(("case", "promise", "outcome", "when"), lines)


def _figures(record: Record) -> Iterator[str]:
    """Yield a section with tables for each case that has figures."""
    between = False
    for name, case in record.measured().items():
        tables = _by_kind([line for row in case.results for line in row["seen"]])
        if tables:
            yield from ([""] * between) + [f"### Case {name}", "", case.remark + "."]
            between = True
        for head, rows in tables.items():
            yield ""
            yield from table(head, rows)


def _by_kind(lines: Sequence[str]) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the rows of figures by the head of their table."""
    found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for line in lines:
        matching = ((head, re.fullmatch(pattern, line)) for pattern, head in _KINDS)
        head, match = next((head, match) for head, match in matching if match)
        found.setdefault(head, []).append(tuple(map(_cell, match.groups())))
    return found


def _cell(text: str) -> str:
    """Return a table's cell. Options of a command are shown as code, since Markdown makes a dash of two hyphens."""
    text = text.replace("|", "/")
    return f"`{text}`" if text.startswith("--") else text


PARTS = {"machine": machines, "rows": _table, "figures": _figures}
PAGES = (Page("reliability", PARTS, PROMISES, rows=_rows, keep_failed=True),)
