"""The page busy.md: allreduces and training steps on cores that are busy, shared, or limited by a quota."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from compcoll.tools.arguments import amount

from .documents import MET, MIB, Output, Page, about, machines, results, table
from .records import TRAINING, Case, Record, matches, means

OWN = ("auto", "auto_uncompressed")
SLACK_US = 5.0
"""Microseconds by which a call may miss a goal, since timing itself costs as much."""
WAITING = "waiting"
WAITING_MS = 20.0
"""Goal: milliseconds of CPU time that a rank may use while it waits one second for a late rank of its node."""


class Goal(NamedTuple):
    """A goal: an upper limit for the ratio of mean times of two contenders.

    Attributes
    ----------
    cases : str
        Patterns of the cases' names.
    contenders : tuple of str
        The contenders that must meet the goal.
    against : str
        The contender to compare with: ``NAME``, ``CASE:NAME``, or ``CASE:`` for the same contender of another case.
    most : float
        The largest allowed ratio.
    least : int
        The smallest size, in bytes, for which the goal holds.
    """

    cases: str
    contenders: tuple[str, ...]
    against: str
    most: float
    least: int = 0


GOALS = (
    Goal("quiet ranks-4 burners-*", OWN, "native", 1.05),
    Goal("burners-*", OWN, "native", 0.5, MIB),
    Goal("python-* native-*", OWN, "native", 1.1),
    Goal("namespaces-*", ("auto",), "auto_one_thread", 1.05),
    Goal("quota", OWN, "one-core:", 1.1),
    Goal("ddp-*", ("backend", "compcoll+zfp:rate=8"), "gloo", 1.0),
)


class Times(NamedTuple):
    """Statistics of one contender's time at one size, in microseconds, and the algorithm that ran."""

    mean: float
    median: float
    p99: float
    ran: str


def _times(case: Case) -> dict[tuple[str, int], Times]:
    """Return times by contender and size. The size of a training step is its number of parameters."""
    found = {}
    for row in case.results:
        mean, median, p99 = (
            row[f"{name}_us"] if f"{name}_us" in row else 1e3 * row[f"{name}_ms"] for name in Times._fields[:3]
        )
        key = str(row["contender"]), int(row["size" if "size" in row else "parameters"])
        found[key] = Times(mean, median, p99, row.get("algorithm", ""))
    return found


def _shown(size: int) -> str:
    """Format a size: bytes with a unit, or a number of parameters."""
    return amount(size) if size.bit_count() == 1 else f"{size:,}"


def _rows(output: Output) -> list[dict[str, object]]:
    """Return rows in which means have the same name for all programs."""
    renamed = {"avg_us": "mean_us", "avg_ms": "mean_ms"}
    return [{renamed.get(key, key): value for key, value in row.items()} for row in results(output)]


def _goals(record: Record) -> Iterator[str]:
    lines = [
        _goal(record, name, goal, contender)
        for name in record.cases
        for goal in GOALS
        if matches(name, goal.cases.split())
        for contender in goal.contenders
    ]
    waited = record.cases[WAITING].results if WAITING in record.cases else []
    figure = ", ".join(f"{_shown(row['size'])}: {row['cpu_ms']:.1f} ms" for row in waited) or "not measured"
    met = all(row["cpu_ms"] <= WAITING_MS for row in waited) if waited else None
    what = "a rank waits 1 s for a late one, inside a node"
    lines.append((what, f"≤ {WAITING_MS:g} ms of CPU time", figure, MET[met]))
    yield from table(("beside what: contender", "goal", "figure", ""), lines)


def _goal(record: Record, name: str, goal: Goal, contender: str) -> tuple[str, str, str, str]:
    """Return a table row: what is compared, the goal, the ratio at each size, and whether the goal is met."""
    where, _, against = goal.against.rpartition(":")
    against = against or contender
    case = record.cases[name]
    times, others = _times(case), _times(record.cases.get(where or name, case))
    cells, met = [], True
    for size in sorted({size for _, size in times}):
        if (contender, size) not in times or (against, size) not in others or size < goal.least:
            continue
        own, other = times[contender, size].mean, others[against, size].mean
        late = own > other * goal.most + (SLACK_US if own > other * goal.most else 0)
        met = met and not late
        cells.append(f"**{_shown(size)}: {own / other:.2f}**" if late else f"{_shown(size)}: {own / other:.2f}")
    whose = f" ({where})" if where else ""
    least = f" from {_shown(goal.least)} on" if goal.least else ""
    text = f"≤ {goal.most:g} × {against}{whose}{least}"
    return f"{case.remark}: {contender}", text, ", ".join(cells) or "not measured", MET[met if cells else None]


def _cases(record: Record) -> Iterator[str]:
    """Yield a section for each case, with all figures."""
    for name, case in record.measured().items():
        if name == WAITING:
            continue
        times = _times(case)
        yield from ("", f"## {case.remark[0].upper()}{case.remark[1:]}", "")
        yield from (f"`{case.command}`; {about(case)}", "")
        head = [f"{contender}: {what}" for contender in case.contenders for what in Times._fields[:3]]
        lines = []
        for size in sorted({size for _, size in times}):
            of_size = [times.get((contender, size)) for contender in case.contenders]
            cells = [cell for each in of_size for cell in ([f"{us:.4g}" for us in each[:3]] if each else ["–"] * 3)]
            ran = times[OWN[0], size].ran if (OWN[0], size) in times else ""
            lines.append((_shown(size), *cells, ran))
        yield from table(("", *head, "auto ran"), lines)


def _plot(record: Record, folder: Path) -> None:
    """Draw mean times, divided by those of MPI's own allreduce, against size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    index = 0
    for case in record.measured().values():
        times = _times(case) if case.results[0].get("contender") else {}
        for name in OWN:
            sizes = sorted(size for each, size in times if each == name and ("native", size) in times)
            if sizes:
                ratios = [times[name, size].mean / times["native", size].mean for size in sizes]
                style, label = "-" if name == OWN[0] else "--", f"{case.remark}, {name}"
                axes.plot(sizes, ratios, style, marker="o", markersize=3, color=f"C{index // 2}", label=label)
                index += 1
    axes.axhline(1, color="gray", linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="buffer of each rank (bytes)", ylabel="mean time / mpi4py's own")
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    figure.savefig(folder / "busy.png", dpi=110)


_TIMES = tuple(f"{name}_{unit}" for unit in ("us", "ms") for name in Times._fields[:3])
PAGES = (
    Page(
        "busy",
        {"machine": machines, "goals": _goals, "cases": _cases},
        (*TRAINING, ":!compcoll/torch/optimizers", ":!compcoll/torch/low_rank"),
        ("contender", "size", "parameters", *_TIMES, "algorithm", "cpu_ms"),
        rows=_rows,
        merge=means,
        plot=_plot,
        study=True,
    ),
)
