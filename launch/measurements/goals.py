"""The goals, row by row, and whether the records show that they are met."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cases import CASES, CODECS, MANY, MIB, ONE, SPARSE, Case, Lab

OWN = ("ring", "direct")
AUTO_SLACK = 1.05, 5.0
"""`auto` may take so many times the best, or so many µs more."""


class Records:
    """Everything that was measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, dict[str, Any]] = {}
        for case in CASES:
            path = folder / f"{case.name}.json"
            if path.exists():
                self._known[case.name] = json.loads(path.read_text())

    def __contains__(self, case: str) -> bool:
        return case in self._known

    def about(self, case: str) -> dict[str, Any]:
        """Tell what is known of a case's run."""
        return dict(self._known[case].get("run", {}))

    def load(self, case: str) -> str:
        """Tell what others used of the machine during a case's run."""
        path = self.folder / f"{case}.run.json"
        if not path.exists():
            return ""
        told = json.loads(path.read_text())
        return f"{told['other_load_meanwhile_percent']:.0f} %" + (" (disturbed)" if told["disturbed"] else "")

    def results(self, case: str) -> list[dict[str, Any]]:
        """The results of a case; none if it was not measured."""
        return list(self._known[case]["results"]) if case in self._known else []

    def sizes(self, case: str) -> list[int]:
        """Bytes that were measured."""
        return sorted({result["size"] for result in self.results(case)})

    def result(self, case: str, contender: str, size: int) -> dict[str, Any] | None:
        """The result of a case's contender at a size; None if there is none."""
        return next((r for r in self.results(case) if (r["contender"], r["size"]) == (contender, size)), None)

    def us(self, case: str, contender: str, size: int) -> float | None:
        """The median, in µs."""
        found = self.result(case, contender, size)
        return None if found is None else float(found["median_us"])

    def least(self, measured: Iterable[tuple[str, str]], size: int) -> float | None:
        """The least of some medians."""
        found = [us for case, contender in measured if (us := self.us(case, contender, size)) is not None]
        return min(found, default=None)


class Row(NamedTuple):
    """One line of the table of goals.

    Attributes
    ----------
    met : bool or None
        None if it was not measured.
    """

    what: str
    goal: str
    figure: str
    met: bool | None


def rows(records: Records) -> Iterator[Row]:
    """All goals."""
    for codec, factor in (("zfp8", 1.08), ("zfp16", 1.08), ("minmax8", 1.08), ("minmax4", 1.12)):
        for size in (16 * MIB, 64 * MIB):
            yield _of_bound(records, f"1g-{codec}", OWN, size, ONE, CODECS[codec][1], factor)
    for size in (16 * MIB, 64 * MIB):
        yield _faster(records, size, "best uncompressed", _uncompressed("1g"), 3.7)
        yield _faster(records, size, "Open MPI's default", [("1g-default", "native")], 6.0)
        yield _of_bound(records, "1g-zfp8", ("ring_uncompressed",), size, ONE, 32.0, 1.05)
    for codec in ("zfp8", "minmax8"):
        yield _every_size(records, codec)
    yield _of_bound(records, "1g-onebit", OWN, 64 * MIB, ONE, CODECS["onebit"][1], 1.3)
    sparse = records.least([("1g-topk", name) for name in SPARSE.split(",")], 64 * MIB)
    yield _ratio("top-k 0.1 %, 64 MiB, 4 × 1 Gb/s, against the bound", ONE.bound(64 * MIB) * 1e6, sparse, 60)
    doubling = [records.us("1g-doubling", f"recursive_doubling{end}", 16 * MIB) for end in ("_uncompressed", "")]
    yield _ratio("recursive doubling, zfp8 against uncompressed, 16 MiB", doubling[0], doubling[1], 3.5)
    yield _naive(records)
    for codec, factor in (("zfp8", 2.5), ("minmax8", 3.0)):
        own = records.least([(f"10g-{codec}", name) for name in OWN], 64 * MIB)
        baseline = records.least(_uncompressed("10g"), 64 * MIB)
        yield _ratio(f"2 hosts, 10 Gb/s, 64 MiB, {codec} against the best uncompressed", baseline, own, factor)
    yield _of_bound(records, "500m-zfp8", OWN, 64 * MIB, MANY, 8.0, 1.15)
    for lab, what in (("1g", "4 × 1 Gb/s"), ("10g", "2 × 10 Gb/s"), ("memory", "shared memory, 2 ranks")):
        yield _auto(records, f"{lab}-auto", what)


BASELINES = {
    "Open MPI, tuned": ("zfp8", "native"),
    "Open MPI, default": ("default", "native"),
    "MPICH, tuned": ("mpich", "native"),
    "MPICH, default": ("mpich-default", "native"),
    "gloo": ("gloo", "gloo"),
}
"""Uncompressed allreduces of others: the end of the case's name, and the contender."""


def _uncompressed(network: str) -> list[tuple[str, str]]:
    """Everything that sends values as they are, our own ring among it."""
    others = [(f"{network}-{end}", contender) for end, contender in BASELINES.values()]
    return [*others, (f"{network}-zfp8", "ring_uncompressed")]


def mebibytes(size: int) -> str:
    """The size as people write it."""
    if size >= MIB:
        return f"{size // MIB} MiB"
    return f"{size // 1024} KiB" if size >= 1024 else f"{size} B"


def _of_bound(
    records: Records, case: str, contenders: Sequence[str], size: int, lab: Lab, bits: float, factor: float
) -> Row:
    part = "bound" if bits == 32 else f"bound / {32 / bits:.3g}"
    where = f"{lab.hosts} × {lab.rate / 1e6:.0f} Mb/s" if lab.rate < 1e9 else f"{lab.hosts} × {lab.rate / 1e9:.0f} Gb/s"
    names = " or ".join(name.replace("_", " ") for name in contenders)
    what = f"{names}, {case.partition('-')[2] if bits < 32 else 'no codec'}, {mebibytes(size)}, {where}"
    taken = records.least([(case, name) for name in contenders], size)
    if taken is None:
        return Row(what, f"≤ {factor} × ({part})", "not measured", None)
    times = taken / (lab.bound(size) * bits / 32 * 1e6)
    return Row(what, f"≤ {factor} × ({part})", f"{times:.3f} ({taken / 1e3:.1f} ms)", times <= factor)


def _ratio(what: str, slow: float | None, fast: float | None, factor: float) -> Row:
    if slow is None or fast is None:
        return Row(what, f"≥ {factor} ×", "not measured", None)
    return Row(
        what, f"≥ {factor} ×", f"{slow / fast:.2f} × ({slow / 1e3:.1f} / {fast / 1e3:.1f} ms)", slow >= factor * fast
    )


def _faster(records: Records, size: int, whom: str, baselines: list[tuple[str, str]], factor: float) -> Row:
    own = records.least([("1g-zfp8", name) for name in OWN], size)
    what = f"ring or direct, zfp8, {mebibytes(size)}, against {whom}"
    return _ratio(what, records.least(baselines, size), own, factor)


def _every_size(records: Records, codec: str) -> Row:
    """Tell whether a codec is faster than every baseline, from 512 KiB to 8 MiB."""
    what, goal = f"{codec}, 512 KiB … 8 MiB", "faster than every baseline"
    told, good = [], True
    for size in (MIB // 2 << doubling for doubling in range(5)):
        own = records.least([(f"1g-{codec}", name) for name in OWN], size)
        baseline = records.least(_uncompressed("1g"), size)
        if own is None or baseline is None:
            return Row(what, goal, "not measured", None)
        times = own / (ONE.bound(size) * CODECS[codec][1] / 32 * 1e6)
        told.append(f"{mebibytes(size)}: {baseline / own:.2f} × faster, {times:.2f} × (bound / ratio)")
        good = good and own < baseline
    return Row(what, goal, "; ".join(told), good)


def _naive(records: Records) -> Row:
    """Tell whether the ring takes less time than compression inside send and receive, and never more.

    Medians' intervals tell how sure that is.
    """
    what = "ring, zfp8, against naive point-to-point, over all networks and sizes"
    goal = "≥ 35 % less at best, never more"
    saved = []
    for network in ("1g", "10g", "memory"):
        case = f"{network}-naive"
        if case not in records:
            return Row(what, goal, "not measured", None)
        for size in records.sizes(case):
            own, naive = records.result(case, "ring", size), records.result(case, "p2p_ring", size)
            assert own is not None and naive is not None
            taken, theirs = _interval(own), _interval(naive)
            spread = sum((high - low) / 2 / middle for low, middle, high in (taken, theirs))
            saved.append((1 - taken[1] / theirs[1], spread, f"{mebibytes(size)}, {network}"))
    least, most = min(saved), max(saved)
    figure = " … ".join(f"{100 * part:.1f} ± {100 * spread:.1f} % ({where})" for part, spread, where in (most, least))
    return Row(what, goal, figure, most[0] >= 0.35 and least[0] >= 0)


def _interval(result: dict[str, Any]) -> tuple[float, float, float]:
    """A median and its interval around it; older records have none."""
    median = result["median_us"]
    return result.get("median_low_us", median), median, result.get("median_high_us", median)


def _auto(records: Records, case: str, where: str) -> Row:
    """Tell whether `auto` is never more than a little slower than the best of all."""
    what, goal = f"auto, zfp8, 4 B … 64 MiB, {where}", "≤ 5 % or 5 µs above the best"
    factor, slack = AUTO_SLACK
    worst, late = (0.0, ""), []
    for size in records.sizes(case):
        taken = records.us(case, "auto", size)
        others = {r["contender"]: r["median_us"] for r in records.results(case) if r["size"] == size}
        assert taken is not None
        del others["auto"]
        name = min(others, key=others.__getitem__)
        beyond = taken / others[name] - 1
        if taken > max(factor * others[name], others[name] + slack):
            late.append(f"{mebibytes(size)}: {taken:.0f} µs, {name} {others[name]:.0f}")
        if taken > others[name] + slack:
            worst = max(worst, (beyond, mebibytes(size)))
    if not records.sizes(case):
        return Row(what, goal, "not measured", None)
    figure = f"{100 * worst[0]:.1f} % at most ({worst[1]})" if worst[1] else "within 5 µs"
    return Row(what, goal, f"{figure}; missed at {'; '.join(late)}" if late else figure, not late)


def case_named(name: str) -> Case:
    """Find a case by its name."""
    return next(case for case in CASES if case.name == name)
