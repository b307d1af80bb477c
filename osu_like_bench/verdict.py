"""What was faster in a sweep, by how much, and why: one line for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from compcoll.plan.choose import SHARED_MEMORY
from compcoll.tools.arguments import amount

from .report import STATISTICS, Record

_ABOUT = 1.03
"""How many times as fast as the first contender, or as short, something must be to count as faster, or as shorter."""

_MOST_RANGES = 4
"""Ranges of sizes that are told one by one; of more, how many sizes each contender was fastest at."""


def verdict(records: Sequence[Record], statistic: str) -> str:
    """Say which contender was fastest at which sizes, how much faster than the first one, and why; if one that
    compresses was not fastest at the largest size, what became of it there.

    Parameters
    ----------
    records : sequence of Record
        Of a sweep: all contenders at one size after the other.
    statistic : str
        One of `report.STATISTICS`, by which they are compared.
    """
    by_size: dict[int, list[Record]] = {}
    for record in records:
        by_size.setdefault(record["size"], []).append(record)
    best = [_fastest(rows, statistic) for rows in by_size.values()]
    parts = _ranges(best)
    faster = [record for record in best if record["contender"] != records[0]["contender"]]
    for why in dict.fromkeys(map(_why, faster)):
        parts.append(_gain([record for record in faster if _why(record) == why], records[0]["contender"], why))
    last = list(by_size.values())[-1]
    coded = [record for record in last if record["codec"] is not None and "encode" in record["seconds"]]
    if coded and best[-1]["codec"] is None:
        parts.append(_why_not(_fastest(coded, statistic), statistic))
    return f"# Fastest: {'; '.join(parts)}"


def _time(record: Record, statistic: str) -> float:
    return float(record[STATISTICS[statistic][1]])


def _fastest(rows: Sequence[Record], statistic: str) -> Record:
    """The fastest, or the first if none is clearly faster."""
    least = min(rows, key=lambda record: _time(record, statistic))
    return least if _time(rows[0], statistic) > _ABOUT * _time(least, statistic) else rows[0]


def _ranges(best: Sequence[Record]) -> list[str]:
    """Who was fastest, from which size to which."""
    runs = [list(run) for _, run in groupby(best, key=lambda record: record["contender"])]
    if len(runs) > _MOST_RANGES:
        names = dict.fromkeys(record["contender"] for record in best)
        counts = {name: sum(record["contender"] == name for record in best) for name in names}
        (name, count), *others = counts.items()
        return [", ".join([f"{name} at {count} of {len(best)} sizes", *(f"{name} at {n}" for name, n in others)])]
    if len(runs) == 1:
        return [f"{best[0]['contender']} at {'all sizes' if len(best) > 1 else amount(best[0]['size'])}"]
    return [", ".join(f"{run[0]['contender']} {_range(run, best)}" for run in runs)]


def _range(run: Sequence[Record], best: Sequence[Record]) -> str:
    first, last = run[0]["size"], run[-1]["size"]
    if run[0] is best[0]:
        return f"up to {amount(last)}"
    if run[-1] is best[-1]:
        return f"from {amount(first)} on"
    return f"at {amount(first)}" if first == last else f"from {amount(first)} to {amount(last)}"


def _gain(own: Sequence[Record], first: str, why: str) -> str:
    """How much faster than the first one some were, and by what."""
    names = list(dict.fromkeys(record["contender"] for record in own))
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    least, most = (f"{end(record['speedup'] for record in own):.1f}" for end in (min, max))
    times = least if least == most else f"{least} to {most}"
    return f"{listed} {'is' if len(names) == 1 else 'are'} {times} times as fast as {first}, {why}"


def _why(record: Record) -> str:
    if record["codec"] is not None:
        return f"with {record['ratio']:.1f} times fewer bytes" if record["ratio"] > _ABOUT else "with as many bytes"
    shared = record["algorithm"] == SHARED_MEMORY
    return "uncompressed" + ", through memory that the ranks share" * bool(shared)


def _why_not(coded: Record, statistic: str) -> str:
    """What the fastest one that compresses did at the largest size."""
    whole, work = _time(coded, statistic), 1e6 * (coded["seconds"]["encode"] + coded["seconds"]["decode"])
    return (
        f"{coded['contender']} sends {coded['ratio']:.1f} times fewer bytes, but encodes and decodes for "
        f"{work / 1e3:.3g} of its {whole / 1e3:.3g} ms at {amount(coded['size'])}"
    )
