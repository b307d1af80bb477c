"""The pages one-machine.md (codec kernels and allreduces on one machine) and selection.md (selectors)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from compcoll.tools.arguments import amount

from ..charts import draw
from .documents import MET, Page, about, command, table
from .records import CALLS, Case, Record, Row

KERNELS = {
    "zfp rate=8": "zfp, 8 bits a value",
    "zfp rate=16": "zfp, 16 bits",
    "minmax bits=8": "minmax, 8 bits",
    "cast float16": "cast to float16",
    "cast bfloat16": "cast to bfloat16",
    "fp8": "fp8",
    "qsgd bits=4": "qsgd, 4 bits",
    "onebit": "onebit",
}
RIVALS = ("zfpy", "numpy", "torch")
FOUR_RANKS = {
    "native": "MPI's own",
    "shared_memory": "shared memory",
    "ring": "ring, zfp",
    "direct": "direct, zfp",
    "p2p_ring": "naive ring, zfp",
}
TWO_RANKS = {"native": "MPI's own", "auto": "`auto`, not tuned, and what it ran", "shared_memory": "shared memory"}
TABLES = {"4-ranks": (FOUR_RANKS, (16, 20, 22, 24, 26, 27)), "2-ranks": (TWO_RANKS, (2, *range(10, 27, 2), 17, 23))}
"""Contenders and sizes (as powers of two) in the tables of allreduces, by case."""
METHODS = ("copy", "read", "ldte", "hierarchical", "exact", "trimmed", "bisection", "strom", "randomk")
SELECTORS = METHODS[2:7]
LIBRARIES = {"argpartition": "argpartition", "topk": "torch.topk"}

Times = dict[tuple[str, int], float]
"""Medians in microseconds, by method and size."""


def _about(record: Record, name: str) -> Iterator[str]:
    """Yield the command of a case, and its machine, date and commit."""
    yield from command(record.cases[name])
    yield from ("", f"{about(record.cases[name])} [All figures]({record.path.name}).")


def _codecs(record: Record) -> Iterator[str]:
    rows = {
        (r["codec"], r["operation"]): r for r in record.cases["codecs"].results if r["implementation"] not in RIVALS
    }
    lines = []
    for codec, shown in KERNELS.items():
        encode, decode, add = (rows[codec, operation] for operation in ("encode", "decode", "accumulate"))
        compared = (f"{r['throughput']:.1f} ({r['versus']['memcpy']:.2f} × memcpy)" for r in (encode, add))
        lines.append((shown, next(compared), f"{decode['throughput']:.1f}", *compared, _best(encode), _best(add)))
    head = ("encode", "decode", "decode and add", "encode × fastest other", "decode and add × fastest other")
    yield from table(("", *head), lines)


def _best(row: Row) -> str:
    """Return a cell: the ratio of a throughput to that of the fastest other implementation, and its name."""
    others = {name: times for name, times in row["versus"].items() if name in RIVALS}
    fastest = min(others, key=lambda name: others[name], default="")
    return f"{others[fastest]:.3g} × {fastest}" if fastest else ""


def _allreduces(record: Record, name: str) -> Iterator[str]:
    """Yield a table of allreduces with a line for each size. Cells of `auto` include the algorithm that ran."""
    contenders, powers = TABLES[name]
    rows = {(row["contender"], row["size"]): row for row in record.cases[name].results}

    def cell(contender: str, size: int) -> str:
        row = rows[contender, size]
        return _digits(row["median_us"]) + f" {row['algorithm']}" * (contender == "auto")

    sizes = sorted(1 << power for power in powers)
    lines = ((amount(size), *(cell(contender, size) for contender in contenders)) for size in sizes)
    yield from table(("", *contenders.values()), lines)


def _plot(record: Record, folder: Path) -> None:
    """Draw the allreduces on four ranks with the benchmark's ``plot``."""
    common = {"collective": "allreduce", "ranks": 4, "dtype": "float32"}
    results = [common | row for row in record.cases["4-ranks"].results]
    draw(folder / "one-machine.png", [("", {"kind": "collective", "results": results})], "median")


def _digits(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}".replace(",", " ")


def _times(case: Case) -> Times:
    return {(row["method"], row["size"]): row["median_us"] for row in case.results}


def _choices(record: Record, name: str) -> Iterator[str]:
    """Yield a table of methods with a line for each size: medians, and some of their ratios."""
    times = _times(record.cases[name])
    names = [f"`{method}`" for method in (*METHODS, *LIBRARIES.values())]
    lines = []
    for size in dict.fromkeys(size for _, size in times):
        fastest = min(SELECTORS, key=lambda method: times[method, size])
        cells = {method: _digits(times[method, size]) for method in (*METHODS, *LIBRARIES)}
        cells[fastest] = f"**{cells[fastest]}**"
        copies = f"{times['copy', size] / times['ldte', size]:.2f}"
        others = (f"{times[method, size] / times['exact', size]:.1f}" for method in LIBRARIES)
        lines.append((amount(size), *cells.values(), copies, *others))
    yield from table(("", *names, "`ldte` × copy", "`exact` × argpartition", "× torch.topk"), lines)


def _wrong(record: Record) -> Iterator[str]:
    """Yield a sentence with the number of wrong choices."""
    wrong = sum(row["wrong"] for case in record.cases.values() for row in case.results)
    yield f"Every choice was checked: {wrong or 'none'} {'were' if wrong > 1 else 'was'} wrong."


def _goals(record: Record) -> Iterator[str]:
    size = 32 << 20
    both = [_times(record.cases[name]) for name in ("normal", "laplace")]
    for library, goal in (("argpartition", 10), ("topk", 40)):
        gains = [times[library, size] / times["exact", size] for times in both]
        yield _goal(f"32 MiB, exact against `{LIBRARIES[library]}`, at least {goal} ×", gains, goal)
    gains = [times["copy", size] / times["ldte", size] for times in both]
    yield _goal("32 MiB, `ldte` at least 0.5 of a copy", gains, 0.5)
    slower = [
        f"{amount(size)} of {name}"
        for name, case in record.cases.items()
        for times in [_times(case)]
        for size in dict.fromkeys(size for _, size in times)
        if size > 64 << 10 and times["ldte", size] > min(times[other, size] for other in SELECTORS)
    ]
    verdict = f"missed at {', '.join(slower)}" if slower else "met"
    yield f"* `ldte` faster than every other selector above 64 KiB: {verdict}."


def _goal(text: str, gains: list[float], least: float) -> str:
    seen = " and ".join(f"{gain:.3g}" for gain in gains)
    return f"* {text}: {seen} (normal, Laplacian): {MET[min(gains) >= least].strip('*')}."


PAGES = (
    Page(
        "one-machine",
        {"about": _about, "codecs": _codecs, "allreduces": _allreduces},
        CALLS,
        ("codec", "operation", "implementation", "throughput", "versus", "contender", "size", "median_us", "algorithm"),
        plot=_plot,
    ),
    Page(
        "selection",
        {"about": _about, "choices": _choices, "wrong": _wrong, "goals": _goals},
        (
            *("compcoll/codecs/sparse/selectors.py", "compcoll/host/selection.py", "compcoll/kernels/sparse*"),
            *(":!compcoll/kernels/sparse_wire*", "compcoll/kernels/laplacian.h", "compcoll/kernels/threshold_search.h"),
        ),
        ("method", "size", "median_us", "wrong"),
        study=True,
    ),
)
