"""The page groups.md: collectives and training over gloo without MPI, compared with gloo and others that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest

from compcoll.tools.arguments import amount

from .documents import MET, Page, about, table
from .records import TRAINING, Case, Record, Row, middle

OURS, AGAIN = "compcoll+zfp:rate=8", "gloo_again"
Times = dict[tuple[str, int], float]
"""Medians in microseconds, by contender and bytes (0 for training steps)."""


def _times(rows: list[Row]) -> Times:
    return {(r["contender"], r.get("size", 0)): r.get("median_us", 1e3 * r.get("median_ms", 0.0)) for r in rows}


def _of_launches(case: Case) -> list[list[Row]]:
    """Return the rows of each launch with its own median and algorithm; an empty list for a single launch."""
    of_rows = (
        zip_longest(row.get("median_us_of_launches", ()), row.get("ran_in_launches", ()), fillvalue="")
        for row in case.results
    )
    return [
        [row | {"median_us": us, "ran": ran} for row, (us, ran) in zip(case.results, launch, strict=True)]
        for launch in zip(*of_rows, strict=True)
    ]


def _step(rows: list[Row]) -> tuple[str, bool]:
    times = _times(rows)
    found = times["gloo", 0] / times[OURS, 0]
    return f"{found:.2f} ×", found >= 2.8


def _bound(rows: list[Row]) -> tuple[str, bool]:
    """Compare 16 MiB on 4 ranks with the time of the wires at 1 Gb/s and a compression ratio of 4."""
    bound = 2 * 3 / 4 * (1 << 24) * 8 / 1e9 * 1e6 / 4
    taken = _times(rows)["group", 1 << 24]
    return f"{taken / bound:.2f} × ({taken / 1e3:.1f} ms)", taken <= 1.15 * bound


def _ahead(rows: list[Row]) -> tuple[str, bool]:
    times = _times(rows)
    ratios = {key: taken / times["group", key[1]] for key, taken in times.items() if key[0][:2] == "fp"}
    text = ", ".join(f"{name} at {nbytes >> 20} MiB {ratio:.2f} ×" for (name, nbytes), ratio in ratios.items())
    return text, all(ratio > 1 for ratio in ratios.values())


def _late(rows: list[Row], name: str = "group") -> list[tuple[Row, float]]:
    """Return a contender's rows that are slower than gloo by more than 3 % and 20 µs, each with gloo's time."""
    gloo = {nbytes: taken for (other, nbytes), taken in _times(rows).items() if other == "gloo"}
    own = [row for row in rows if row["contender"] == name]
    return [
        (row, gloo[row["size"]])
        for row in own
        if row["median_us"] > max(1.03 * gloo[row["size"]], gloo[row["size"]] + 20)
    ]


def _never_slower(rows: list[Row]) -> tuple[str, bool]:
    late = _late(rows)
    text = ", ".join(
        f"{amount(row['size'])}: {row['median_us']:.0f} instead of {gloo:.0f} µs, by {row['ran']}" for row, gloo in late
    )
    return text or "nowhere slower", not late


def _at_its_price(rows: list[Row]) -> tuple[str, bool]:
    times = _times(rows)
    beyond = {n: times["group", n] - taken for (name, n), taken in times.items() if name == "gloo" and n <= 1024}
    worst = max(beyond, key=lambda nbytes: beyond[nbytes])
    return f"{amount(worst)}: {beyond[worst]:+.1f} µs", beyond[worst] <= 10


VERDICTS: dict[str, Callable[[list[Row]], tuple[str, bool]]] = {
    "step": _step,
    "16M": _bound,
    "peers": _ahead,
    "10g": _never_slower,
    "node": _never_slower,
    "small": _at_its_price,
}
"""Functions of a case's rows, by case. They return the figure, and whether the goal in the case's remark is met. With
several launches, each must meet the goal.
"""


def _where(case: Case) -> str:
    return f"{case.hosts} hosts, {case.lab.split()[-1]}" if case.lab else "one node, 2 ranks"


def _goals(record: Record) -> Iterator[str]:
    lines = []
    for name, case in record.measured().items():
        seen, met = VERDICTS[name](case.results)
        met = met and all(VERDICTS[name](rows)[1] for rows in _of_launches(case))
        lines.append((name, _where(case), case.remark, seen + _worst(case) + _control(case), MET[met]))
    yield from table(("case", "where", "goal", "seen", ""), lines)


def _worst(case: Case) -> str:
    """Return a text on the worst launch's ratio of `group` to gloo's median; an empty string for a single launch."""
    late = [
        (row["median_us"] / times["gloo", row["size"]], row["size"], row["ran"])
        for rows in _of_launches(case)
        for times in [_times(rows)]
        for row in rows
        if row["contender"] == "group"
    ]
    if not late:
        return ""
    worst, nbytes, ran = max(late)
    return f"; in the worst launch {worst:.2f} × gloo's median, at {amount(nbytes)}, by {ran}"


def _control(case: Case) -> str:
    """Return a text that counts how often `group` is late, and how often a second gloo contender is."""
    launches = _of_launches(case)
    cells = sum(row["contender"] == AGAIN for rows in launches for row in rows)
    if not cells:
        return ""
    own, again = (sum(len(_late(rows, name)) for rows in launches) for name in ("group", AGAIN))
    return f"; of all launches' {cells} medians `group`'s is late in {own}, gloo's own second one in {again}"


def _cases(record: Record) -> Iterator[str]:
    for name, case in record.measured().items():
        yield from ("", f"## {name}: {_where(case)}", "", f"`{case.command}`; {_launches(case)}{about(case)}", "")
        yield from _table(case)


def _launches(case: Case) -> str:
    """Return a text on the number of launches; an empty string for a single one."""
    number = len(_of_launches(case))
    middle = "each size's figures are those of the one in the middle by `group` over gloo's best; "
    return f"{number} launches, {middle}" if number else ""


def _table(case: Case) -> Iterator[str]:
    times = _times(case.results)
    ran = {row["size"]: row["ran"] for row in case.results if row["contender"] == "group" and row.get("ran")}
    lines = (
        (
            amount(nbytes) if nbytes else "step",
            *(f"{times[name, nbytes] / 1e3:.4g}" for name in case.contenders),
            *[ran.get(nbytes, "")] * bool(ran),
        )
        for nbytes in dict.fromkeys(nbytes for _, nbytes in times)
    )
    yield from table(("ms", *case.contenders, *["`group` ran"] * bool(ran)), lines)


PAGES = (
    Page(
        "groups",
        {"goals": _goals, "cases": _cases},
        (*TRAINING, ":!compcoll/torch/optimizers", ":!compcoll/torch/low_rank"),
        ("contender", "size", "ran", "median_us", "median_ms", "median_us_of_launches", "ran_in_launches"),
        merge=partial(middle, ours="group"),
        study=True,
    ),
)
