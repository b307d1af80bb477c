"""Show records as tables on the terminal, as JSON and as CSV. `conclusion` says what to make of a sweep.

A record is a dict with the results of one contender in one setting, which ``--json`` writes unchanged;
docs/benchmark.md explains its fields. Bandwidths are in 1e9 bytes per second; a time's name ends with its unit.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from compcoll.algorithms import ALGORITHMS
from compcoll.plan.choose import AUTO, NATIVE
from compcoll.tools.arguments import amount

from . import UsageError

SCHEMA = 1

Record = dict[str, Any]

STATISTICS = {"mean": ("Avg", "avg_us"), "median": ("Median", "median_us"), "p99": ("P99", "p99_us")}
STATISTICS["min"] = ("Min", "min_us")
"""Statistics of the iterations that tables can show: the column's head, and the field of a record."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    head : str
        The column's name on the first line.
    value : str or callable
        A field, or a function of a record; "-" is shown for None.
    width : int
        Characters; negative for text aligned to the left.
    form : str
        Format specification of the value.
    """

    head: str
    value: str | Callable[[Any], Any]
    width: int = 18
    form: str = ""

    def cell(self, record: Mapping[str, Any]) -> str:
        """Format a record's value and pad it to the column's width."""
        value = record.get(self.value) if isinstance(self.value, str) else self.value(record)
        return self.aligned("-" if value is None else format(value, self.form))

    def aligned(self, text: str) -> str:
        """Pad a text to the column's width."""
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)


class Table:
    """Formats the lines of a table: a head, and a line for each record."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns

    def head(self) -> str:
        """Return the line of column heads."""
        return "".join(column.aligned(column.head) for column in self.columns)

    def row(self, record: Mapping[str, Any]) -> str:
        """Return a record's line."""
        return "".join(column.cell(record) for column in self.columns)


COLUMNS: Mapping[str, Column] = {
    "ratio": Column("Ratio", "ratio", 9, ".2f"),
    "algbw": Column("algbw(GB/s)", "algbw", 14, ".3f"),
    "busbw": Column("busbw(GB/s)", "busbw", 14, ".3f"),
    "error": Column("Rel. error", "error", 13, ".2e"),
    "wrong": Column("#wrong", "wrong", 10),
    "different": Column("#different", "different", 12),
    "ran": Column("Ran", lambda r: r["algorithm"] + " (uncompressed)" * (r["codec"] is None), 36),
}
"""Columns that ``--show`` can add to the times."""


def _time_of(contender: str, field: str) -> Column:
    """Make a column with one contender's times, for rows with all contenders."""
    return Column(f"{contender}(us)", lambda row: row[contender][field], max(len(contender) + 6, 12), ".2f")


def _ratio_of(contender: str) -> Column:
    """Make a column with how many times as fast as the first a contender is, for rows with all contenders."""
    return Column("", lambda row: f"({row[contender]['speedup']:.2f})", 8)


class SweepTable(Table):
    """A table in OSU's form: one row per record, or one row per size with the contenders side by side.

    Parameters
    ----------
    names : sequence of str
        The contenders. Ratios compare the others with the first.
    statistic : str
        One of `report.STATISTICS`.
    full : bool
        Whether to show minimum, maximum, median, 99th percentile and number of iterations.
    show : sequence of str
        Additional columns, from `COLUMNS`.
    """

    def __init__(self, names: Sequence[str], statistic: str, full: bool, show: Sequence[str]) -> None:
        (head, field), first = STATISTICS[statistic], names[0]
        self._first, self._side_by_side = first, len(names) > 1 and not full and not show
        columns = [Column(f"{head} Latency(us)", field, form=".2f")]
        if self._side_by_side:
            columns = [_time_of(first, field)]
            for name in names[1:]:
                columns += [_time_of(name, field), _ratio_of(name)]
        elif len(names) > 1:
            columns.insert(0, Column("Contender", "contender", max(map(len, names)) + 3))
            columns.append(Column(f"{first}/this", "speedup", len(first) + 8, ".2f"))
        if full:
            columns += [
                Column("Min Latency(us)", "min_us", form=".2f"),
                Column("Max Latency(us)", "max_us", form=".2f"),
                Column("Iterations", "iterations", 13),
                Column("Median Latency(us)", "median_us", 20, ".2f"),
                Column("P99 Latency(us)", "p99_us", form=".2f"),
            ]
        super().__init__(Column("# Size", "size", -10), *columns, *(COLUMNS[name] for name in show))

    def head(self) -> str:
        """Return the line of column heads, below a line that explains the brackets if there are any."""
        brackets = f"# in brackets: how many times as fast as {self._first}\n" if self._side_by_side else ""
        return brackets + super().head().rstrip()

    def rows(self, records: Sequence[Record]) -> list[str]:
        """Return the lines of one size."""
        if self._side_by_side:
            together = {record["contender"]: record for record in records}
            return [self.row({"size": records[0]["size"], **together})]
        return [self.row(record) for record in records]


class Progress:
    """Prints lines, and shows a progress bar below them if stderr is a terminal and tqdm is installed.

    Attributes
    ----------
    quiet : bool
        Whether this rank prints nothing.
    """

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._bar: Any = None
        if not quiet and sys.stderr.isatty() and find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=steps, leave=False, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def print(self, *lines: str) -> None:
        """Print lines, unless ``quiet``."""
        for line in lines if not self.quiet else ():
            if self._bar is not None:
                self._bar.write(line, file=sys.stdout)
            else:
                print(line, flush=True)

    def step(self, what: str) -> None:
        """Advance the bar and show the name of the next step."""
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)
            self._bar.update()


def plain(value: Any, digits: int = 17) -> Any:
    """Convert a value for JSON: round floats to ``digits`` significant digits; replace NaN and infinity by None."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: plain(part, digits) for name, part in value.items()}
    return [plain(part, digits) for part in value] if isinstance(value, list | tuple) else value


def check_writable(*paths: Path | None) -> None:
    """Raise `UsageError` if a file cannot be written, before anything is measured."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{path} cannot be written: give a file in an existing folder")


def complaints(records: Sequence[Record]) -> list[str]:
    """Return a line for each wrong result."""
    lines = []
    for record in records:
        if record["wrong"]:
            who = record.get("contender") or record.get("method") or f"{record['codec']}, {record['implementation']}"
            size = f" at {record['size']} bytes" if "size" in record else ""
            different = f" ({record['different']} differ between ranks)" if "different" in record else ""
            error = f", relative error {record['error']:.2e}" if "error" in record else ""
            lines.append(f"{who}{size}: {record['wrong']} wrong elements{different}{error}")
    return list(dict.fromkeys(lines))


def content(kind: str, run: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Return a run's description and records in the form of ``--json``."""
    return {"schema": SCHEMA, "kind": kind, "run": plain(run), "results": plain(records)}


def write_json(path: Path, written: Mapping[str, Any]) -> None:
    """Write the result of `content` as JSON."""
    path.write_text(json.dumps(written, indent=1) + "\n")


def write_csv(path: Path, run: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Write records as CSV. Each row also holds the run's description."""
    rows = [_flat(record) | _flat(run) for record in records]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: join the names by underscores."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        flat |= _flat(value, f"{prefix}{name}_") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


_ABOUT = 1.03
"""A contender counts as faster if it is at least so many times as fast, and a wire as shorter likewise."""

_CLEARLY = 1.1
"""A contender is clearly faster than another if it is at least so many times as fast, and the 95 % confidence intervals
of their medians do not overlap."""

_MOST_RANGES = 4
"""`fastest` lists up to so many ranges of sizes. Otherwise it counts the sizes at which each contender was fastest."""


def fastest(records: Sequence[Record], statistic: str) -> str:
    """Return a line that says which contender was fastest at which sizes.

    Parameters
    ----------
    records : sequence of Record
        The records of a sweep, in the order of sizes.
    statistic : str
        The statistic to compare, one of `report.STATISTICS`.
    """
    by_size = [list(rows) for _, rows in groupby(records, key=itemgetter("size"))]
    return f"# Fastest: {_ranges([_fastest(rows, statistic) for rows in by_size])}"


def conclusion(records: Sequence[Record], statistic: str) -> str:
    """Return a line with the conclusions from the times at the largest size: what to use, and whether compression pays.

    Parameters
    ----------
    records : sequence of Record
        The records of a sweep with several contenders, in the order of sizes.
    statistic : str
        The statistic to compare, one of `report.STATISTICS`.
    """
    rows = sorted(
        (record for record in records if record["size"] == records[-1]["size"]),
        key=lambda record: _time(record, statistic),
    )
    nodes, size = rows[0]["nodes"], amount(rows[0]["size"])
    where = "On one node" if nodes == 1 else f"Between these {nodes} nodes"
    sentences = [f"{where}, at {size}, {_advice(rows, records[0]['contender'], statistic)}."]
    coded = next((row for row in rows if row["codec"] is not None), None)
    uncoded = next((row for row in rows if row["codec"] is None), None)
    if coded is not None and uncoded is not None:
        sentences.append(_of_compression(coded, uncoded, statistic))
        if nodes == 1 and not _clearly(coded, uncoded, statistic):
            sentences.append(_elsewhere(rows[0]))
    return f"# {' '.join(sentences)}"


def _advice(rows: Sequence[Record], first: str, statistic: str) -> str:
    """Return a clause about what to use. ``rows`` begins with the fastest contender."""
    by_name = {row["contender"]: row for row in rows}
    best, auto = rows[0], by_name.get(AUTO)
    if auto is None or first == AUTO:
        if not _clearly(best, by_name[first], statistic):
            return f"no contender is clearly faster than {first}"
        return f"{best['contender']} is the fastest, {_compared(best, by_name[first], statistic)}"
    compressed = " with compression" if auto["codec"] is not None else " without compression"
    ran = f"{auto['algorithm']}{compressed if auto['algorithm'] != NATIVE else ''}"
    if not _clearly(best, auto, statistic):
        return f'use algorithm="auto" (the default): it ran {ran}, {_compared(auto, by_name[first], statistic)}'
    slow = f"{best['contender']} is the fastest, {_compared(best, auto, statistic)}, which ran {ran}"
    if best["algorithm"] == auto["algorithm"]:
        return f"{slow}, too"
    if best["algorithm"] not in ALGORITHMS:
        return slow
    return f"{slow}; measure this machine for auto by: mpirun -n {best['ranks']} python -m compcoll tune"


def _gain(row: Record, other: Record, statistic: str) -> float:
    """Return how many times as fast as another contender a contender is."""
    return _time(other, statistic) / _time(row, statistic)


def _clearly(row: Record, other: Record, statistic: str) -> bool:
    """Return whether a contender is clearly faster than another; see `_CLEARLY`."""
    apart: bool = row["median_high_us"] < other["median_low_us"]
    return apart and _gain(row, other, statistic) >= _CLEARLY


def _compared(row: Record, other: Record, statistic: str) -> str:
    """Return a clause that compares a contender with another that is not clearly faster."""
    gain = _gain(row, other, statistic)
    if _clearly(row, other, statistic):
        return f"{gain:.1f} times as fast as {other['contender']}"
    if max(gain, 1 / gain) < _CLEARLY:
        return f"about as fast as {other['contender']}"
    return f"not clearly {'faster' if gain > 1 else 'slower'} than {other['contender']}, since the times scatter"


def _of_compression(coded: Record, uncoded: Record, statistic: str) -> str:
    """Return a sentence that compares the fastest contender that compressed with the fastest that did not."""
    if _clearly(coded, uncoded, statistic):
        fewer = f"sends {coded['ratio']:.1f} times fewer bytes and " if coded["ratio"] > _ABOUT else ""
        return f"Compression pays: {coded['contender']} {fewer}is {_compared(coded, uncoded, statistic)}."
    if _clearly(uncoded, coded, statistic):
        slower = f"takes {_gain(uncoded, coded, statistic):.1f} times as long as {uncoded['contender']}"
    else:
        slower = f"is {_compared(coded, uncoded, statistic)}"
    return f"Compression does not pay: {coded['contender']} {slower}."


def _elsewhere(row: Record) -> str:
    """Return a sentence about compression between nodes, after a sweep on one node."""
    if row["collective"] != "allreduce":
        return "Between nodes on a slow network it can."
    asked = f"--bytes {amount(row['size']).replace(' ', '')} --ranks {max(row['ranks'], 2)} --link 10gbit"
    return f"Between nodes at 1 to 25 Gb/s it can; for a prediction: python -m compcoll choose {asked}"


def _time(record: Record, statistic: str) -> float:
    return float(record[STATISTICS[statistic][1]])


def _fastest(rows: Sequence[Record], statistic: str) -> Record:
    """Return the record of the fastest contender; of the first contender if none is clearly faster."""
    least = min(rows, key=lambda record: _time(record, statistic))
    return least if _time(rows[0], statistic) > _ABOUT * _time(least, statistic) else rows[0]


def _ranges(best: Sequence[Record]) -> str:
    """Return a text with the fastest contenders and their ranges of sizes."""
    runs = [list(run) for _, run in groupby(best, key=itemgetter("contender"))]
    if len(runs) > _MOST_RANGES:
        names = dict.fromkeys(record["contender"] for record in best)
        counts = {name: sum(record["contender"] == name for record in best) for name in names}
        (name, count), *others = counts.items()
        return ", ".join([f"{name} at {count} of {len(best)} sizes", *(f"{name} at {n}" for name, n in others)])
    if len(runs) == 1:
        return f"{best[0]['contender']} at {'all sizes' if len(best) > 1 else amount(best[0]['size'])}"
    return ", ".join(f"{run[0]['contender']} {_range(run, best)}" for run in runs)


def _range(run: Sequence[Record], best: Sequence[Record]) -> str:
    first, last = run[0]["size"], run[-1]["size"]
    if run[0] is best[0]:
        return f"up to {amount(last)}"
    if run[-1] is best[-1]:
        return f"from {amount(first)} on"
    return f"at {amount(first)}" if first == last else f"from {amount(first)} to {amount(last)}"
