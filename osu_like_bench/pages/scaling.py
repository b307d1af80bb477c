"""The page scaling.md: simulated training steps of four networks, on the cluster of the ACP-SGD paper and on others.

python -m osu_like_bench.pages.scaling --json FILE      # compute the figures: some minutes on one core

Allreduces run compcoll's algorithms on simulated networks (`python -m compcoll simulate`), and gradients are fused by
compcoll's rules. The published figures are from L. Zhang et al., "Evaluation and Optimization of Gradient Compression
for Distributed Deep Learning", ICDCS 2023. Needs torch, but no GPU and no network.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from .documents import MET, Page, table
from .records import Record, Row

S_SGD, POWER, POWER_OVERLAP, ACP = METHODS = ("S-SGD", "Power-SGD", "Power-SGD, overlap", "ACP-SGD")
PAPERS = "10 Gb/s Ethernet"
GOAL = 0.25
"""The largest allowed relative error of the ratios to S-SGD."""
COUNTS = (8, 16, 32, 64)
BUFFERS = (0, 1, 5, 25, 50, 100, 500, 1000, 1500)
WAYS: dict[str, dict[str, Any]] = {"no overlap": {"overlap": False}, "overlap": {"buffer_mb": 0.0}}
WAYS["overlap and fusion"] = {}
PARTS = ("compute", "compression", "exposed")


def simulate() -> Iterator[Row]:
    """Yield all figures. Times are in milliseconds."""
    from . import scaling_paper
    from .scaling_paper import step

    papers, works = scaling_paper.cluster(32, PAPERS), scaling_paper.works()
    for between, (name, work), ranks, method in product(scaling_paper.NETWORKS_BETWEEN, works.items(), COUNTS, METHODS):
        taken = step(method, work, scaling_paper.cluster(ranks, between))
        row = {"work": name, "method": method, "ms": 1e3 * taken.total, "between": between, "ranks": ranks}
        if (between, ranks) == (PAPERS, 32):
            row["published"] = scaling_paper.TABLE_III[name][method]
        yield row
    for (name, work), method in product(works.items(), (S_SGD, ACP)):
        for way, options in WAYS.items():
            taken = step(method, work, papers, **options)
            row = {"work": name, "method": method, "ms": 1e3 * taken.total, "way": way}
            yield row | {part: 1e3 * getattr(taken, part) for part in PARTS}
        for size in BUFFERS:
            taken = step(method, work, papers, buffer_mb=size)
            yield {"work": name, "method": method, "ms": 1e3 * taken.total, "buffer": size}
    yield from scaling_paper.findings()


def _steps(record: Record) -> dict[tuple[str, int, str, str], float]:
    """Return milliseconds by network between nodes, number of ranks, trained network, and method."""
    rows = (row for row in record.cases["simulated"].results if "between" in row)
    return {(row["between"], row["ranks"], row["work"], row["method"]): row["ms"] for row in rows}


def _published(record: Record) -> dict[str, dict[str, Row]]:
    """Return the rows that are also in the paper's table III, by trained network and method."""
    found: dict[str, dict[str, Row]] = {}
    for row in record.cases["simulated"].results:
        if "published" in row and "work" in row:
            found.setdefault(row["work"], {})[row["method"]] = row
    return found


def _ratios(of: dict[str, Row], method: str) -> tuple[float, float]:
    """Return the ratio of S-SGD's time to a method's: published, and simulated."""
    return of[S_SGD]["published"] / of[method]["published"], of[S_SGD]["ms"] / of[method]["ms"]


def _table_iii(record: Record) -> Iterator[str]:
    """Yield a table that compares published and simulated times."""
    lines = []
    for name, of in _published(record).items():
        for method, row in of.items():
            theirs, ours = _ratios(of, method)
            cells = (row["published"], f"{row['ms']:.0f}", f"{theirs:.2f}", f"{ours:.2f}")
            lines.append((name, method, *cells, f"{100 * (ours / theirs - 1):+.0f} %"))
    head = ("step, ms: published", "simulated", "S-SGD / this: published", "simulated", "off by")
    yield from table(("", "", *head), lines)


def worst_ratio(record: Record) -> float:
    """Return the largest relative error of a simulated ratio to S-SGD."""
    pairs = (_ratios(of, method) for of in _published(record).values() for method in of)
    return max(abs(ours / theirs - 1) for theirs, ours in pairs)


def misplaced(record: Record) -> list[str]:
    """Return pairs of methods whose simulated times differ by more than 1 %, but in another order than published."""
    return [
        f"{name}: {one} before {other}"
        for name, of in _published(record).items()
        for one in of
        for other in of
        if of[one]["published"] > of[other]["published"] and 1.01 * of[one]["ms"] < of[other]["ms"]
    ]


def _goal(record: Record) -> Iterator[str]:
    wrong, worst = misplaced(record), worst_ratio(record)
    order = (
        f"another ({'; '.join(wrong)}): **missed**"
        if wrong
        else "the same for all four networks, times within 1 % of each other aside: **met**"
    )
    yield f"Goal: the order of the four methods: {order}. Ratios within {GOAL:.0%}: the worst is off by {worst:.0%}: "
    yield f"**{MET[worst <= GOAL].strip('*')}**."


def _elsewhere(record: Record) -> Iterator[str]:
    """Yield a table of the paper's other results."""
    lines = []
    for row in record.cases["simulated"].results:
        if "where" in row:
            off = f"{100 * (row['simulated'] / row['published'] - 1):+.0f} %"
            lines.append((row["where"], row["what"], f"{row['published']:g}", f"{row['simulated']:.2f}", off))
    yield from table(("", "", "published", "simulated", "off by"), lines)


def _counts(record: Record) -> Iterator[str]:
    times, lines = _steps(record), []
    for between, name in dict.fromkeys((between, name) for between, _, name, _ in times):
        for method in METHODS:
            cells = (f"{times[between, ranks, name, method]:.0f}" for ranks in COUNTS)
            lines.append((f"{name}, {between}", method, *cells))
        gains = (times[between, ranks, name, S_SGD] / times[between, ranks, name, ACP] for ranks in COUNTS)
        lines.append(("", "**S-SGD / ACP-SGD**", *(f"**{gain:.2f}**" for gain in gains)))
    yield from table(("", "", *(f"{ranks} ranks" for ranks in COUNTS)), lines)


def _ablation(record: Record) -> Iterator[str]:
    lines = (
        (row["work"], f"{row['method']}, {row['way']}", *(f"{row[part]:.0f}" for part in ("ms", *PARTS)))
        for row in record.cases["simulated"].results
        if "way" in row
    )
    yield from table(("", "", "step", *PARTS), lines)


def _buffers(record: Record) -> Iterator[str]:
    lines: dict[tuple[str, str], list[str]] = {}
    for row in record.cases["simulated"].results:
        if "buffer" in row:
            lines.setdefault((row["work"], row["method"]), []).append(f"{row['ms']:.0f}")
    yield from table(("", "", *BUFFERS), ((*names, *cells) for names, cells in lines.items()))


def _plot(record: Record, folder: Path) -> None:
    """Draw step times against ranks, in a panel for each trained network and each link."""
    from matplotlib.figure import Figure

    times, theirs = _steps(record), _published(record)
    betweens = list(dict.fromkeys(between for between, *_ in times))
    figure = Figure(figsize=(14, 9), layout="constrained")
    panels = figure.subplots(len(betweens), len(theirs), sharex=True)
    colours = dict(zip(METHODS, ("C7", "C1", "C3", "C0"), strict=True))
    for row, between in zip(panels, betweens, strict=True):
        for axes, (name, of) in zip(row, theirs.items(), strict=True):
            for method, colour in colours.items():
                taken = [times[between, ranks, name, method] for ranks in COUNTS]
                axes.plot(COUNTS, taken, marker="o", markersize=4, color=colour, label=f"{method}, simulated")
                if between == PAPERS:
                    ms, label = of[method]["published"], f"{method}, published"
                    axes.plot([32], [ms], "x", color=colour, markersize=9, label=label)
            axes.set_xscale("log", base=2)
            axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
            axes.set_ylim(bottom=0)
            axes.set_title(f"{name}, {between}", fontsize=9)
            axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("ranks")
    for axes in panels[:, 0]:
        axes.set_ylabel("ms a step")
    panels[1, 0].legend(fontsize=6)
    figure.savefig(folder / "scaling.png", dpi=110)


PAGES = (
    Page(
        "scaling",
        {
            "table-iii": _table_iii,
            "goal": _goal,
            "elsewhere": _elsewhere,
            "counts": _counts,
            "ablation": _ablation,
            "buffers": _buffers,
        },
        ("compcoll/algorithms", "compcoll/layout.py", "compcoll/simulation", "compcoll/torch/low_rank"),
        plot=_plot,
        study=True,
    ),
)


def main() -> None:
    """Simulate all steps and write the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the figures' file")
    path = parser.parse_args().json
    path.write_text(json.dumps({"results": list(simulate())}))


if __name__ == "__main__":
    main()
