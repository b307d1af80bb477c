"""The page networks.md: allreduces in clusters of network namespaces, compared with goals and with simulations."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from compcoll.codecs import ZFP
from compcoll.plan import choose
from compcoll.plan.cost import DEFAULTS, Link, Profile, Speed
from compcoll.simulation import plot as simulation_plot
from compcoll.simulation import run as simulation
from compcoll.simulation.network import Network
from compcoll.simulation.run import Scenario
from compcoll.tools.arguments import amount

from .documents import MET, MIB, Output, Page, machines, results, runs, table
from .records import CALLS, Case, Record, Row, middle

CODECS = {"zfp8": 8.0, "zfp16": 16.0, "minmax8": 8 + 64 / 2048, "minmax4": 4 + 64 / 2048, "onebit": 1 + 64 / 2048}
"""Bits per value on the wire, by the end of a case's name."""
OWN = ("ring", "direct")
SPARSE = ("sparse_ring", "sparse_direct", "sparse_native")
AUTO_SLACK = 1.05, 5.0
"""Limits for `auto`: a factor of the best contender's time, or so many µs more, whichever is larger."""
BASELINES = {
    "Open MPI, tuned": ("zfp8", "native"),
    "Open MPI, default": ("default", "native"),
    "MPICH, tuned": ("mpich", "native"),
    "MPICH, default": ("mpich-default", "native"),
    "gloo": ("gloo", "gloo"),
}
"""Uncompressed allreduces of other libraries: the end of the case's name, and the contender."""
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
    """One line of the table of goals. `met` is None if the goal was not measured."""

    what: str
    goal: str
    figure: str = "not measured"
    met: bool | None = None


def bound(case: Case, nbytes: int) -> float:
    """Return the lower bound in µs of an uncompressed allreduce in a case's lab: 2(p-1)/p · n · β."""
    return 2 * (case.hosts - 1) / case.hosts * nbytes * 8 / _rate(case) * 1e6


def _rate(case: Case) -> float:
    """Return the rate of the links in a case's lab, in bits per second."""
    found = re.search(r"--rate (\d+)([mg])bit", case.lab)
    assert found is not None
    return float(found[1]) * (1e9 if found[2] == "g" else 1e6)


class Cases:
    """The cases of the page, and their goals."""

    def __init__(self, record: Record) -> None:
        self.cases = record.cases

    def least(self, measured: Iterable[Measured], size: int) -> float | None:
        """Return the smallest median in µs; None if nothing was measured."""
        found = [self.cases[case].us(contender, size) for case, contender in measured if case in self.cases]
        return min((us for us in found if us is not None), default=None)

    def goals(self) -> Iterator[Goal]:
        """Yield all goals."""
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
        """Return a goal for the ratio of an allreduce's time to the bound of its wires."""
        case = self.cases[name]
        rate = _rate(case) / 1e6
        where = f"{case.hosts} × " + (f"{rate:.0f} Mb/s" if rate < 1e3 else f"{rate / 1e3:.0f} Gb/s")
        names = " or ".join(map(_words, contenders))
        what = f"{names}, {name.partition('-')[2] if bits < 32 else 'no codec'}, {amount(size)}, {where}"
        goal = f"≤ {factor} × ({'bound' if bits == 32 else f'bound / {32 / bits:.3g}'})"
        taken = self.least([(name, contender) for contender in contenders], size)
        if taken is None:
            return Goal(what, goal)
        times = taken / (bound(case, size) * bits / 32)
        return Goal(what, goal, f"{times:.3f} ({taken / 1e3:.1f} ms)", times <= factor)

    def _every_size(self, codec: str) -> Goal:
        """Return the goal that a codec is faster than every baseline from 512 KiB to 8 MiB."""
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
        """Return the goal that the ring is faster than an allreduce that compresses inside send and receive.

        The figure includes the medians' confidence intervals.
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
        """Return the goal that `auto` is at most slightly slower than the best contender."""
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
    """Return all uncompressed allreduces on a network, including compcoll's ring."""
    others = [(f"{network}-{end}", contender) for end, contender in BASELINES.values()]
    return [*others, (f"{network}-zfp8", "ring_uncompressed")]


def _ratio(what: str, slow: float | None, fast: float | None, factor: float) -> Goal:
    goal = f"≥ {factor} ×"
    if slow is None or fast is None:
        return Goal(what, goal)
    return Goal(what, goal, f"{slow / fast:.2f} × ({slow / 1e3:.1f} / {fast / 1e3:.1f} ms)", slow >= factor * fast)


def _interval(row: Row | None) -> tuple[float, float]:
    """Return a median, and half of its confidence interval, relative to the median."""
    assert row is not None
    return row["median_us"], (row["median_high_us"] - row["median_low_us"]) / 2 / row["median_us"]


def _goals(record: Record) -> Iterator[str]:
    verdicts = MET | {None: "–"}
    lines = ((goal.what, goal.goal, goal.figure, verdicts[goal.met]) for goal in Cases(record).goals())
    yield from table(("case", "goal", "figure", ""), lines)


def _series(record: Record) -> Iterator[str]:
    """Yield a table of milliseconds, and their ratio to the bound of the wires."""
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
    """Yield a table of microseconds of `auto` and all other contenders, and of the algorithm that `auto` ran."""
    case = record.cases[name]
    lines = []
    for size in case.sizes:
        found = case.by_contender(size)
        ran = found["auto"]["algorithm"] + ", zfp" * bool(found["auto"].get("codec"))
        lines.append((amount(size), *(f"{row['median_us']:.1f}" for row in found.values()), ran))
    yield from table(("bytes", *map(_words, case.contenders), "auto ran"), lines)


# --- the simulation, compared with measurements on 2, 4 and 8 hosts and with a paper's on larger clusters

MEDIAN_ERROR = 0.15


class Point(NamedTuple):
    """A measured and a simulated time, in seconds."""

    algorithm: str
    compressed: bool
    nbytes: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """The simulation's error, relative to the measured time."""
        return self.simulated / self.measured - 1


def points(record: Record, ranks: int) -> Iterator[Point]:
    """Yield measured and simulated times for a number of hosts. The simulation uses a profile measured there."""
    for measured in record.cases[f"simulated-{ranks}-profile"].results:
        profile = replace(
            DEFAULTS,
            inside=Link(**measured["inside"]),
            between=Link(**measured["between"]),
            message=measured["message"],
            call=measured["call"],
            speeds=tuple(Speed(**speed) for speed in measured["speeds"]),
        )
        network = Network(profile.inside, profile.between, message=profile.message)
        for row in record.cases[f"simulated-{ranks}"].results:
            algorithm, codec = row["contender"].removesuffix("_uncompressed"), ZFP(rate=8)
            compressed = algorithm == row["contender"]
            scenario = Scenario(ranks, network, row["size"], profile=profile, call=profile.call)
            seconds = simulation.allreduce(scenario, algorithm, codec if compressed else None).seconds
            yield Point(algorithm, compressed, row["size"], row["median_us"] / 1e6, seconds)


def _compared(record: Record, ranks: str) -> Iterator[str]:
    """Yield the errors of the simulation for a number of hosts: their median, and a table."""
    found = list(points(record, int(ranks)))
    if not found:
        yield f"{ranks} hosts: not measured"
        return
    median = statistics.median(abs(point.error) for point in found)
    verdict = MET[median <= MEDIAN_ERROR]
    yield f"{ranks} hosts: median error {100 * median:.1f} % (goal ≤ {100 * MEDIAN_ERROR:.0f} %: {verdict})"
    yield ""
    sizes = sorted({point.nbytes for point in found})
    lines = []
    for algorithm in choose.ALLREDUCE:
        for compressed in (False, True):
            chosen = {p.nbytes: p for p in found if (p.algorithm, p.compressed) == (algorithm, compressed)}
            cells = [
                f"{1e3 * p.measured:.3g} / {1e3 * p.simulated:.3g} ({100 * p.error:+.0f} %)"
                for size in sizes
                if (p := chosen.get(size))
            ]
            if cells:
                lines.append((_words(algorithm) + ", zfp8" * compressed, *cells))
    yield from table(("measured / simulated", *map(amount, sizes)), lines)


class Cluster(NamedTuple):
    """Nodes with GPUs. ``memory`` is the bandwidth of a GPU's memory in bytes per second."""

    name: str
    ranks_per_node: int
    memory: float
    inside: Link
    between: Link

    def profile(self, rate: int) -> Profile:
        """Return a profile with the speeds of kernels on this GPU. A sum reads two values and writes one."""
        add = SHARE_OF_MEMORY * self.memory / 3
        zfp = Speed("zfp", float(rate or 32), *ZFP_KERNELS)
        return replace(DEFAULTS, speeds=(zfp, Speed("none", 32.0, add, add, add, add)))

    def scenario(self, ranks: int, nbytes: int, rate: int) -> Scenario:
        """Return the scenario of an allreduce on this cluster, uncompressed if `rate` is 0."""
        network = Network(self.inside, self.between, self.ranks_per_node, message=1e-6)
        return Scenario(ranks, network, nbytes, profile=self.profile(rate))


CLUSTERS = (
    Cluster("v100-edr", 4, 900e9, Link(4e-6, 1 / 60e9), Link(3e-6, 1 / 12.5e9)),
    Cluster("rtx5000-fdr", 4, 448e9, Link(6e-6, 1 / 12e9), Link(3e-6, 1 / 7e9)),
    Cluster("a100-hdr", 2, 1555e9, Link(4e-6, 1 / 200e9), Link(3e-6, 1 / 25e9)),
)
"""Models of the clusters in the paper on collective-level ZFP, with the usual memory and links of such machines: NVLink
or PCIe inside a node; InfiniBand EDR (100 Gb/s), FDR (56) or HDR (200) between nodes.
"""

SHARE_OF_MEMORY = 0.75
ZFP_KERNELS = (100e9, 100e9, 100e9, 80e9)
"""Assumed speeds of ZFP's kernels. They are so high that the wire is the limit, as the paper found."""

SIZES = [MIB // 2 << doubling for doubling in range(0, 11, 2)]
NAMES = ("ring", "recursive_doubling")
GPUS = (16, 64, 256)
PUBLISHED = {("ring", 8): 81.2, ("recursive_doubling", 8): 77.4, ("ring", 16): 61.0, ("recursive_doubling", 16): 57.8}
"""The paper's largest savings of time in percent, compared with the same algorithm without compression."""
PUBLISHED_OVER_MPI = {"ring": 85.3, "recursive_doubling": 75.5}
"""Savings in percent at rate 8, compared with the MPI library's allreduce; for the ring, with 64 MB on 16 GPUs."""
PUBLISHED_CROSSOVER = 4 * MIB

Seconds = Mapping[tuple[str, int, int, int], float]
"""Seconds by algorithm, rate (0: uncompressed), GPUs and bytes."""


def _plot_clusters(folder: Path) -> None:
    """Draw simulated times on the clusters: 512 MiB on up to 256 ranks, and 512 KiB to 512 MiB on 256 ranks."""
    for cluster in CLUSTERS:
        scenario = cluster.scenario(256, 64 * MIB, 8)
        simulation_plot.plot(folder / f"simulated-{cluster.name}.png", scenario, NAMES, [None, ZFP(rate=8)], SIZES)


def _published(record: Record) -> Iterator[str]:
    """Yield a table that compares the results of the paper on collective-level ZFP with simulations."""
    found = [_simulated(cluster) for cluster in CLUSTERS]
    lines = [
        (
            f"{_words(name)}, rate {rate}, against itself uncompressed",
            f"up to −{theirs:g} %",
            *(f"−{_saved(each, name, rate, (name,)):.0f} %" for each in found),
        )
        for (name, rate), theirs in PUBLISHED.items()
    ]
    own = "against MPI's own (simulated: the faster uncompressed one of these two)"
    for name, theirs in PUBLISHED_OVER_MPI.items():
        cells = (f"−{_saved(each, name, 8, NAMES):.0f} %" for each in found)
        lines.append((f"{_words(name)}, rate 8, {own}", f"up to −{theirs:g} %", *cells))
    crossover = f"about {amount(PUBLISHED_CROSSOVER)}"
    lines.append(("with rate 8 the ring wins from, on 16 GPUs", crossover, *map(_crossover, found)))
    yield from table(("", "published", *(cluster.name for cluster in CLUSTERS)), lines)


def _simulated(cluster: Cluster) -> Seconds:
    return {
        (name, rate, ranks, nbytes): simulation.allreduce(
            cluster.scenario(ranks, nbytes, rate), name, ZFP(rate=rate) if rate else None
        ).seconds
        for name in NAMES
        for rate in (0, 8, 16)
        for ranks in GPUS
        for nbytes in SIZES
    }


def _saved(found: Seconds, name: str, rate: int, others: Sequence[str]) -> float:
    """Return the largest saving of time in percent, compared with the fastest of ``others`` without compression."""
    return max(
        100 * (1 - found[name, rate, ranks, nbytes] / min(found[other, 0, ranks, nbytes] for other in others))
        for ranks in GPUS
        for nbytes in SIZES
    )


def _crossover(found: Seconds) -> str:
    """Return the size from which on the ring is faster than recursive doubling."""
    ring, doubling = ([found[name, 8, GPUS[0], nbytes] for nbytes in SIZES] for name in NAMES)
    slower = [nbytes for nbytes, one, other in zip(SIZES, ring, doubling, strict=True) if one >= other]
    after = [nbytes for nbytes in SIZES if nbytes > max(slower, default=0)]
    return amount(after[0]) if after else "never"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _plot(record: Record, folder: Path) -> None:
    """Draw times as multiples of the bound against size, and the simulated clusters."""
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
    axes.axhline(1, color="gray", linewidth=1.2)
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
    _plot_clusters(folder)


def _rows(output: Output) -> list[Row]:
    """Return the figures to keep: also what `auto` ran, and the medians' intervals if `p2p_ring` is a contender. For a
    profile, return the values that the simulation uses.
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
            "simulation": _compared,
            "published": _published,
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
