"""Records as tables on the terminal, JSON and CSV.

A record is what one contender did in one setting, as a dict that ``--json`` writes as it is; docs/benchmark.md explains
its fields. Bandwidths are in 1e9 bytes a second, times in the unit that ends their names.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import UsageError

SCHEMA = 1

Record = dict[str, Any]

STATISTICS = {"mean": ("Avg", "avg_us"), "median": ("Median", "median_us"), "p99": ("P99", "p99_us")}
STATISTICS["min"] = ("Min", "min_us")
"""Statistics of the iterations that tables can show, as head and field of a record."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    head : str
        Its name on the first line.
    value : str or callable
        A field, or a function of a record; "-" is shown for None.
    width : int
        Characters; negative for text aligned to the left.
    form : str
        How the value is formatted.
    """

    head: str
    value: str | Callable[[Any], Any]
    width: int = 18
    form: str = ""

    def cell(self, record: Mapping[str, Any]) -> str:
        """Format a record's value, as wide as the column."""
        value = record.get(self.value) if isinstance(self.value, str) else self.value(record)
        return self.aligned("-" if value is None else format(value, self.form))

    def aligned(self, text: str) -> str:
        """Fill a text up to the column's width."""
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)


class Table:
    """Lines of a table: a head, and one for each record."""

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
"""What ``--show`` can add to the times."""


class SweepTable:
    """A table in OSU's form: one row a record, or one a size with the contenders side by side.

    Parameters
    ----------
    names : sequence of str
        The contenders; ratios compare the others with the first.
    statistic : str
        One of `report.STATISTICS`.
    full : bool
        Whether to show minimum, maximum, median, 99th percentile and number of iterations.
    show : sequence of str
        More columns, of `COLUMNS`.
    """

    def __init__(self, names: Sequence[str], statistic: str, full: bool, show: Sequence[str]) -> None:
        (head, field), first = STATISTICS[statistic], names[0]
        self._side_by_side = len(names) > 1 and not full and not show
        columns = [Column(f"{head} Latency(us)", field, form=".2f")]
        if self._side_by_side:
            times = [(name, lambda row, name=name: row[name][field]) for name in names]
            ratios = [(name, lambda row, name=name: row[name]["speedup"]) for name in names[1:]]
            columns = [Column(f"{name}(us)", value, max(len(name) + 6, 12), ".2f") for name, value in times]
            columns += [Column(f"{first}/{name}", value, len(first + name) + 4, ".2f") for name, value in ratios]
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
        self._table = Table(Column("# Size", "size", -10), *columns, *(COLUMNS[name] for name in show))
        self.head = self._table.head()

    def rows(self, records: Sequence[Record]) -> list[str]:
        """Return the lines of one size."""
        if self._side_by_side:
            together = {record["contender"]: record for record in records}
            return [self._table.row({"size": records[0]["size"], **together})]
        return [self._table.row(record) for record in records]


class Progress:
    """A bar on a terminal, if tqdm is installed, and lines above it.

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
        self.close()

    def print(self, *lines: str) -> None:
        """Print lines, on the rank that prints."""
        for line in lines if not self.quiet else ():
            if self._bar is not None:
                self._bar.write(line, file=sys.stdout)
            else:
                print(line, flush=True)

    def step(self, what: str) -> None:
        """Show what comes next."""
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)
            self._bar.update()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def check_writable(*paths: Path | None) -> None:
    """Refuse files that cannot be written, before anything is measured."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{path} cannot be written: a file in a folder that exists is needed")


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
    """Return records and the run's description, as JSON and pages hold them."""
    return {"schema": SCHEMA, "kind": kind, "run": _plain(run), "results": _plain(records)}


def write_json(path: Path, written: Mapping[str, Any]) -> None:
    """Write what `content` returned."""
    path.write_text(json.dumps(written, indent=1) + "\n")


def write_csv(path: Path, run: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Write records as CSV: one row each, with the run's description."""
    rows = [_flat(record) | _flat(run) for record in records]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def _flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as names joined by underscores."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{inner}": part for inner, part in _flat(value).items()}
        else:
            flat[name] = value
    return flat
