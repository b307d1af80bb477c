"""The page docs/measurements/busy.md from the records: what must be true, met or missed, and every figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from busy_cases import CASES, MIB, OWN, WAITING_GOAL, Case, Goal

PAGE = "busy.md"
_SLACK_US = 5.0
"""Timers and turns cost that much of very short calls, whatever the cores do."""


class Figures(NamedTuple):
    """The time that one contender took at one size, in microseconds: means over a case's launches."""

    mean: float
    median: float
    p99: float
    ran: str


class Records:
    """All that was measured."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = {case.name: found for case in CASES if (found := self._read(case))}

    def _read(self, case: Case) -> list[dict[str, Any]]:
        names = [case.name] if case.launches == 1 else [f"{case.name}.{i + 1}" for i in range(case.launches)]
        paths = [self._folder / f"{name}.json" for name in names]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def __contains__(self, case: str) -> bool:
        return case in self._known

    def about(self, case: str) -> dict[str, Any]:
        """Tell what is known of a case's run."""
        return dict(self._known[case][0]["run"])

    def others(self, case: str) -> float:
        """Per cent of the machine that others used meanwhile, at most."""
        return max(float(launch["others_percent"]) for launch in self._known[case])

    def sizes(self, case: str) -> list[int]:
        """Bytes that were measured; of training steps, the parameters."""
        launches = self._known.get(case, [])
        return sorted({_size(result) for launch in launches for result in launch["results"]})

    def contenders(self, case: str) -> list[str]:
        """The contenders of a case."""
        return list(dict.fromkeys(r["contender"] for launch in self._known[case] for r in launch["results"]))

    def figures(self, case: str, contender: str, size: int) -> Figures | None:
        """The time that a contender took; None if that was not measured."""
        found = [
            result
            for launch in self._known.get(case, [])
            for result in launch["results"]
            if (result["contender"], _size(result)) == (contender, size)
        ]
        if not found:
            return None
        times = (fmean(_us(result, name) for result in found) for name in ("avg", "median", "p99"))
        return Figures(*times, ran=str(found[0].get("algorithm", "")))

    def waiting(self) -> dict[int, float]:
        """Milliseconds of CPU time that a rank used while it waited a second, by size."""
        path = self._folder / "waiting.json"
        if not path.exists():
            return {}
        return {result["size"]: result["cpu_ms"] for result in json.loads(path.read_text())["results"]}


def _size(result: dict[str, Any]) -> int:
    return int(result.get("size", result.get("parameters", 0)))


def _us(result: dict[str, Any], name: str) -> float:
    return float(result[f"{name}_us"] if f"{name}_us" in result else 1e3 * result[f"{name}_ms"])


class Row(NamedTuple):
    """One line of the table of goals; ``met`` is None where nothing was measured."""

    what: str
    goal: str
    figure: str
    met: bool | None


def rows(records: Records) -> list[Row]:
    """All goals, and whether the records show that they are met."""
    found = [_row(records, case, goal) for case in CASES for goal in case.goals]
    waited = records.waiting()
    return [
        *found,
        Row(
            "a rank waits 1 s for a late one, inside a node",
            f"≤ {WAITING_GOAL:g} ms of CPU time",
            ", ".join(f"{shown(size)}: {ms:.1f} ms" for size, ms in waited.items()) or "not measured",
            all(ms <= WAITING_GOAL for ms in waited.values()) if waited else None,
        ),
    ]


def _row(records: Records, case: Case, goal: Goal) -> Row:
    where, _, against = goal.against.rpartition(":")
    cells, met = [], True
    for size in records.sizes(case.name):
        own = records.figures(case.name, goal.contender, size)
        other = records.figures(where or case.name, against, size)
        if own is None or other is None or size < goal.least:
            continue
        ratio = own.mean / other.mean
        late = ratio > goal.most and own.mean > other.mean * goal.most + _SLACK_US
        met = met and not late
        cells.append(f"**{shown(size)}: {ratio:.2f}**" if late else f"{shown(size)}: {ratio:.2f}")
    whose = f" ({where})" if where else ""
    least = f" from {shown(goal.least)} on" if goal.least else ""
    return Row(
        f"{case.what}: {goal.contender}",
        f"≤ {goal.most:g} × {against}{whose}{least}",
        ", ".join(cells) or "not measured",
        met if cells else None,
    )


def write(folder: Path) -> int:
    """Write the page and its picture, and return how many goals were measured and missed."""
    records = Records(folder)
    found = rows(records)
    lines = [
        *_head(records),
        "",
        "## What must be true",
        "",
        "| beside what: contender | goal | figure | |",
        "|---|---|---|---|",
    ]
    verdicts = {True: "met", False: "**missed**", None: "not measured"}
    lines += [f"| {row.what} | {row.goal} | {row.figure} | {verdicts[row.met]} |" for row in found]
    for case in CASES:
        if case.name in records:
            lines += ["", f"## {case.what[0].upper()}{case.what[1:]}", "", *_table(records, case)]
    if _plot(records, folder.parent / "busy.png"):
        lines += ["", "![means by those of MPI's own](busy.png)"]
    (folder.parent / PAGE).write_text("\n".join(lines) + "\n")
    return sum(row.met is False for row in found)


def _head(records: Records) -> list[str]:
    first = next((case.name for case in CASES if case.name in records), None)
    about = {} if first is None else records.about(first)
    machine = [f"{about.get('cpu')}, {about.get('cores')} cores, {about.get('instruction_set')}", about.get("mpi", "")]
    others = [records.others(case.name) for case in CASES if case.name in records]
    disturbed = f" Others used up to {max(others, default=0.0):.0f} % of the machine meanwhile."
    return [
        "# Busy cores",
        "",
        "Made by `python launch/busy` (as root, for the namespaces and the control group): allreduces and training",
        "steps where cores are busy, shared, or fewer than they look. Two ranks on one machine unless said;",
        f"machine: {'; '.join(machine)}.{disturbed}",
        "Cases are measured one by one: each table says of which commit it is, and when.",
        "",
        "Contenders take turns within one run, one call each after a barrier; figures are ratios of means, those that",
        "miss a goal in bold. `auto` compresses with ZFP at rate 8 where it finds that this pays, `auto_uncompressed`",
        f"never; `native` is mpi4py's own call. Of less than {_SLACK_US:g} µs no row is missed.",
        "The tables have means, medians and 99th percentiles, in µs.",
    ]


def _table(records: Records, case: Case) -> Iterator[str]:
    names = records.contenders(case.name)
    about = records.about(case.name)
    when = f"Commit {about.get('commit') or 'not noted'}, {about.get('date', '')[:10]}, {about.get('instruction_set')}."
    yield f"{when} Others used {records.others(case.name):.0f} % of the machine. `python -m {case.program}`"
    yield ""
    head = [f"{name}: {what}" for name in names for what in ("mean", "median", "p99")]
    yield "| | " + " | ".join(head) + " | auto ran |"
    yield "|---|" + "---|" * (len(head) + 1)
    for size in records.sizes(case.name):
        cells, ran = [], ""
        for name in names:
            figures = records.figures(case.name, name, size)
            cells += ["–"] * 3 if figures is None else [f"{value:.4g}" for value in figures[:3]]
            ran = figures.ran if figures is not None and name == OWN[0] else ran
        yield f"| {shown(size)} | " + " | ".join(cells) + f" | {ran} |"


def _plot(records: Records, path: Path) -> bool:
    """Draw the means by MPI's own against size; tell whether there was anything to draw."""
    curves = []
    for case in CASES:
        for name in OWN:
            points = []
            for size in records.sizes(case.name):
                own, native = (records.figures(case.name, each, size) for each in (name, "native"))
                if own is not None and native is not None:
                    points.append((size, own.mean / native.mean))
            if points:
                curves.append((f"{case.what}, {name}", points, "-" if name == OWN[0] else "--"))
    if not curves:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    for index, (label, points, style) in enumerate(curves):
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, color=f"C{index // 2}", label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="buffer of each rank (bytes)", ylabel="mean time / mpi4py's own")
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=110)
    return True


def shown(size: int) -> str:
    """A size as text."""
    for unit, name in ((MIB, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B" if size < MIB else f"{size:,}"
