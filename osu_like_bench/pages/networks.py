"""Allreduces in clusters of network namespaces, against goals: networks.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from compcoll.tools.arguments import amount

from . import simulated
from .documents import MET, MIB, Output, Page, machines, results, runs, table
from .records import CALLS, Case, Record, Row, middle

CODECS = {"zfp8": 8.0, "zfp16": 16.0, "minmax8": 8 + 64 / 2048, "minmax4": 4 + 64 / 2048, "onebit": 1 + 64 / 2048}
"""Bits of a value on the wire, by the end of a case's name."""
OWN = ("ring", "direct")
SPARSE = ("sparse_ring", "sparse_direct", "sparse_native")
AUTO_SLACK = 1.05, 5.0
"""`auto` may take so many times the best, or so many µs more."""
BASELINES = {
    "Open MPI, tuned": ("zfp8", "native"),
    "Open MPI, default": ("default", "native"),
    "MPICH, tuned": ("mpich", "native"),
    "MPICH, default": ("mpich-default", "native"),
    "gloo": ("gloo", "gloo"),
}
"""Uncompressed allreduces of others: the end of the case's name, and the contender."""
SERIES = {name: (f"1g-{end}", contender) for name, (end, contender) in BASELINES.items()} | {
    "ring, no codec": ("1g-zfp8", "ring_uncompressed"),
    "ring, zfp rate 16": ("1g-zfp16", "ring"),
    "ring, zfp rate 8": ("1g-zfp8", "ring"),
    "ring, min-max 8 bits": ("1g-minmax8", "ring"),
    "ring, min-max 4 bits": ("1g-minmax4", "ring"),
}

Measured = tuple[str, str]
"""A case and a contender."""


class Goal(NamedTuple):
    """One line of the table of goals; `met` is None if it was not measured."""

    what: str
    goal: str
    figure: str = "not measured"
    met: bool | None = None


def bound(case: Case, nbytes: int) -> float:
    """Microseconds below which no uncompressed allreduce gets in a case's lab: 2(p-1)/p · n · β."""
    return 2 * (case.hosts - 1) / case.hosts * nbytes * 8 / _rate(case) * 1e6


def _rate(case: Case) -> float:
    """Bits a second of a case's lab."""
    found = re.search(r"--rate (\d+)([mg])bit", case.lab)
    assert found is not None
    return float(found[1]) * (1e9 if found[2] == "g" else 1e6)


class Cases:
    """The cases of the page."""

    def __init__(self, record: Record) -> None:
        self.cases = record.cases

    def least(self, measured: Iterable[Measured], size: int) -> float | None:
        """The least of some medians in µs; None if there is none."""
        found = [self.cases[case].us(contender, size) for case, contender in measured if case in self.cases]
        return min((us for us in found if us is not None), default=None)

    def goals(self) -> Iterator[Goal]:
        """All goals."""
        for codec, factor in (("zfp8", 1.08), ("zfp16", 1.08), ("minmax8", 1.08), ("minmax4", 1.12)):
            for size in (16 * MIB, 64 * MIB):
                yield self._of_bound(f"1g-{codec}", OWN, size, CODECS[codec], factor)
        for size in (16 * MIB, 64 * MIB):
            own = self.least([("1g-zfp8", name) for name in OWN], size)
            what = f"ring or direct, zfp8, {amount(size)}, against"
            yield _ratio(f"{what} best uncompressed", self.least(_uncompressed("1g"), size), own, 3.7)
            yield _ratio(f"{what} Open MPI's default", self.least([("1g-default", "native")], size), own, 6.0)
            yield self._of_bound("1g-zfp8", ("ring_uncompressed",), size, 32.0, 1.05)
        for codec in ("zfp8", "minmax8"):
            yield self._every_size(codec)
        yield self._of_bound("1g-onebit", OWN, 64 * MIB, CODECS["onebit"], 1.3)
        sparse = self.least([("1g-topk", name) for name in SPARSE], 64 * MIB)
        wires = bound(self.cases["1g-topk"], 64 * MIB)
        yield _ratio("top-k 0.1 %, 64 MiB, 4 × 1 Gb/s, against the bound", wires, sparse, 60)
        plain, zfp = (
            self.least([("1g-doubling", f"recursive_doubling{end}")], 16 * MIB) for end in ("_uncompressed", "")
        )
        yield _ratio("recursive doubling, zfp8 against uncompressed, 16 MiB", plain, zfp, 3.5)
        yield self._naive()
        for codec, factor in (("zfp8", 2.5), ("minmax8", 3.0)):
            own = self.least([(f"10g-{codec}", name) for name in OWN], 64 * MIB)
            baseline = self.least(_uncompressed("10g"), 64 * MIB)
            yield _ratio(f"2 hosts, 10 Gb/s, 64 MiB, {codec} against the best uncompressed", baseline, own, factor)
        yield self._of_bound("500m-zfp8", OWN, 64 * MIB, 8.0, 1.15)
        for lab, what in (("1g", "4 × 1 Gb/s"), ("10g", "2 × 10 Gb/s"), ("memory", "shared memory, 2 ranks")):
            yield self._auto(f"{lab}-auto", what)

    def _of_bound(self, name: str, contenders: Sequence[str], size: int, bits: float, factor: float) -> Goal:
        """Return how much longer than its wires an allreduce takes."""
        case = self.cases[name]
        rate = _rate(case) / 1e6
        where = f"{case.hosts} × " + (f"{rate:.0f} Mb/s" if rate < 1e3 else f"{rate / 1e3:.0f} Gb/s")
        names = " or ".join(contender.replace("_", " ") for contender in contenders)
        what = f"{names}, {name.partition('-')[2] if bits < 32 else 'no codec'}, {amount(size)}, {where}"
        goal = f"≤ {factor} × ({'bound' if bits == 32 else f'bound / {32 / bits:.3g}'})"
        taken = self.least([(name, contender) for contender in contenders], size)
        if taken is None:
            return Goal(what, goal)
        times = taken / (bound(case, size) * bits / 32)
        return Goal(what, goal, f"{times:.3f} ({taken / 1e3:.1f} ms)", times <= factor)

    def _every_size(self, codec: str) -> Goal:
        """Return whether a codec is faster than every baseline, from 512 KiB to 8 MiB."""
        what, goal = f"{codec}, 512 KiB … 8 MiB", "faster than every baseline"
        figures, good = [], True
        for size in (MIB // 2 << doubling for doubling in range(5)):
            own = self.least([(f"1g-{codec}", name) for name in OWN], size)
            baseline = self.least(_uncompressed("1g"), size)
            if own is None or baseline is None:
                return Goal(what, goal)
            times = own / (bound(self.cases[f"1g-{codec}"], size) * CODECS[codec] / 32)
            figures.append(f"{amount(size)}: {baseline / own:.2f} × faster, {times:.2f} × (bound / ratio)")
            good = good and own < baseline
        return Goal(what, goal, "; ".join(figures), good)

    def _naive(self) -> Goal:
        """Return whether the ring takes less time than compression inside send and receive, and never more.

        Medians' intervals show how sure that is.
        """
        what = "ring, zfp8, against naive point-to-point, over all networks and sizes"
        goal = "≥ 35 % less at best, never more"
        saved = []
        for network in ("1g", "10g", "memory"):
            case = self.cases[f"{network}-naive"]
            for size in case.sizes:
                (own, spread), (naive, more) = (_interval(case.row(name, size)) for name in ("ring", "p2p_ring"))
                saved.append((1 - own / naive, spread + more, f"{amount(size)}, {network}"))
            if not case.results:
                return Goal(what, goal)
        least, most = min(saved), max(saved)
        shown = (f"{100 * part:.1f} ± {100 * spread:.1f} % ({where})" for part, spread, where in (most, least))
        return Goal(what, goal, " … ".join(shown), most[0] >= 0.35 and least[0] >= 0)

    def _auto(self, name: str, where: str) -> Goal:
        """Return whether `auto` is never more than a little slower than the best of all."""
        what, goal = f"auto, zfp8, 4 B … 64 MiB, {where}", "≤ 5 % or 5 µs above the best"
        factor, slack = AUTO_SLACK
        worst, late = (0.0, ""), []
        case = self.cases[name]
        for size in case.sizes:
            others = {contender: row["median_us"] for contender, row in case.by_contender(size).items()}
            taken = others.pop("auto")
            best = min(others, key=others.__getitem__)
            if taken > max(factor * others[best], others[best] + slack):
                late.append(f"{amount(size)}: {taken:.0f} µs, {best} {others[best]:.0f}")
            if taken > others[best] + slack:
                worst = max(worst, (taken / others[best] - 1, amount(size)))
        if not case.sizes:
            return Goal(what, goal)
        figure = f"{100 * worst[0]:.1f} % at most ({worst[1]})" if worst[1] else "within 5 µs"
        return Goal(what, goal, f"{figure}; missed at {'; '.join(late)}" if late else figure, not late)


def _uncompressed(network: str) -> list[Measured]:
    """Everything that sends values as they are, our own ring among it."""
    others = [(f"{network}-{end}", contender) for end, contender in BASELINES.values()]
    return [*others, (f"{network}-zfp8", "ring_uncompressed")]


def _ratio(what: str, slow: float | None, fast: float | None, factor: float) -> Goal:
    goal = f"≥ {factor} ×"
    if slow is None or fast is None:
        return Goal(what, goal)
    return Goal(what, goal, f"{slow / fast:.2f} × ({slow / 1e3:.1f} / {fast / 1e3:.1f} ms)", slow >= factor * fast)


def _interval(row: Row | None) -> tuple[float, float]:
    """A median, and half its interval relative to it."""
    assert row is not None
    return row["median_us"], (row["median_high_us"] - row["median_low_us"]) / 2 / row["median_us"]


def _goals(record: Record) -> Iterator[str]:
    verdicts = MET | {None: "–"}
    lines = ((goal.what, goal.goal, goal.figure, verdicts[goal.met]) for goal in Cases(record).goals())
    yield from table(("case", "goal", "figure", ""), lines)


def _series(record: Record) -> Iterator[str]:
    """Milliseconds, and times the bound of what is on the wire."""
    sizes = [size for size in record.cases["1g-zfp8"].sizes if size >= MIB // 2]
    lines = []
    for name, (end, contender) in SERIES.items():
        case = record.cases[end]
        bits = CODECS[end.partition("-")[2]] if contender == "ring" else 32.0
        medians = [(size, case.us(contender, size)) for size in sizes]
        cells = (
            "–" if us is None else f"{us / 1e3:.3g} ({us / (bound(case, n) * bits / 32):.2f})" for n, us in medians
        )
        lines.append((name, *cells))
    yield from table(("", *map(amount, sizes)), lines)


def _auto(record: Record, name: str) -> Iterator[str]:
    """Microseconds of `auto` and all others, and what it ran."""
    case = record.cases[name]
    lines = []
    for size in case.sizes:
        found = case.by_contender(size)
        ran = found["auto"]["algorithm"] + ", zfp" * bool(found["auto"].get("codec"))
        lines.append((amount(size), *(f"{row['median_us']:.1f}" for row in found.values()), ran))
    yield from table(("bytes", *(name.replace("_", " ") for name in case.contenders), "auto ran"), lines)


def _plot(record: Record, folder: Path) -> None:
    """Draw time against size, as multiples of the bound; and simulated clusters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for index, (name, (end, contender)) in enumerate(SERIES.items()):
        case = record.cases[end]
        sizes = [size for size in case.sizes if size >= MIB // 2]
        times = [(case.us(contender, size) or float("nan")) / bound(case, size) for size in sizes]
        if sizes:
            style = "--" if name in BASELINES else "-"
            axes.plot(sizes, times, style, marker="o", markersize=4, color=f"C{index % 10}", label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_yticks([2, 1, 0.5, 0.25, 0.125], ["2", "1 (bound)", "1/2", "1/4", "1/8"])
    ticks = [size for size in record.cases["1g-zfp8"].sizes if size >= MIB // 2]
    axes.set_xticks(ticks, [amount(size) for size in ticks])
    axes.set(xlabel="buffer of each rank", ylabel="time / least time of any uncompressed allreduce")
    axes.set_title("allreduce, 4 hosts at 1 Gb/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(folder / "networks.png", dpi=110)
    simulated.plot(folder)


def _rows(output: Output) -> list[Row]:
    """The figures, with what `auto` ran and the intervals of what is compared with `p2p_ring`; of a profile, what the
    simulation takes from it.
    """
    if "profile" in output:
        return [{key: output["profile"][key] for key in ("inside", "between", "message", "call", "speeds")}]
    rows = results(output)
    sure = any(row["contender"] == "p2p_ring" for row in rows)
    found = []
    for row in rows:
        keys = ["contender", "size", "median_us"]
        keys += ["algorithm", "codec"] * (row["contender"] == "auto") + ["median_low_us", "median_high_us"] * sure
        found.append({key: row[key] for key in keys})
    return found


PAGES = (
    Page(
        "networks",
        {
            "machine": machines,
            "goals": _goals,
            "series": _series,
            "auto": _auto,
            "simulation": simulated.compared,
            "published": simulated.published,
            "runs": runs,
        },
        CALLS,
        (
            *("contender", "size", "algorithm", "codec", "median_us", "median_low_us", "median_high_us"),
            *("inside", "between", "message", "call", "speeds"),
        ),
        _rows,
        merge=partial(middle, ours="auto"),
        plot=_plot,
    ),
)
