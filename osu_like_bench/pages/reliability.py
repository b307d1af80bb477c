"""The page reliability.md: long tests of time-outs, dead ranks, bad bytes and long runs. Each case runs some tests.

The page shows what the tests reported. If a case exceeds its time limit, it is ended, and the page says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from .documents import Output, Page, machines, table
from .records import PROMISES, Case, Record, Row


def _rows(output: Output) -> list[Row]:
    outcomes = {kind: count for kind, count in output["outcomes"].items() if count}
    return [{"outcomes": [f"{count} {kind}" for kind, count in outcomes.items()], "seen": output["figures"]}]


def _well(case: Case) -> bool:
    """Return whether all tests passed."""
    kinds = {outcome.split()[1] for row in case.results for outcome in row["outcomes"]}
    return "passed" in kinds and not kinds & {"failed", "error"}


def _table(record: Record) -> Iterator[str]:
    lines = []
    for name, case in record.cases.items():
        row = case.results[0] if case.results else {"outcomes": [case.missing or "not run yet"], "seen": []}
        outcome = ", ".join(row["outcomes"]) or "no test ran"
        seconds = f" in {case.run['seconds']:.0f} s" if "seconds" in case.run else ""
        seen = "<br>".join(row["seen"]).replace("|", "/")
        when = f"{case.run.get('date', '')[:10]}, `{case.run.get('commit') or 'no commit'}`"
        when += f", others used {case.others_percent:.0f} %" if case.others_percent is not None else ""
        lines.append((name, case.remark, (outcome if _well(case) else f"**{outcome}**") + seconds, seen, when))
    yield from table(("", "promise", "outcome", "seen", "when"), lines)


PAGES = (Page("reliability", {"machine": machines, "rows": _table}, PROMISES, rows=_rows, keep_failed=True),)
