"""Draw charts of the records in ``--json`` files: as a self-contained HTML page, or as a picture."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import UsageError
from .report import SCHEMA, STATISTICS, Record

Chart = dict[str, Any]
"""A chart for the page's script: kind, title, and series of points, each point with a text."""
Content = Mapping[str, Any]
"""The result of `report.content`."""

_TEMPLATE = Path(__file__).with_name("page.html")
_WHO = {"ddp": "contender", "codecs": "implementation", "selection": "method"}
_LEFT_OUT = ("collective", "total_bytes", "op", "data", "ranks", "nodes", "dtype", "seconds", "versus", "calls")
"""Fields that a page's table omits, since they are equal in all rows or not numbers. The JSON has them."""


def load(path: Path) -> dict[str, Any]:
    """Read a file that ``--json`` wrote."""
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(f"{path} was not written by --json of this version (schema {SCHEMA})")
    if not content["results"]:
        raise UsageError(f"{path} holds no results")
    return content


def run(arguments: Namespace) -> None:
    """Run the command ``plot``."""
    prefixed = len(arguments.files) > 1
    contents = [(path.stem if prefixed else "", load(path)) for path in arguments.files]
    if arguments.output.suffix.lower() in (".html", ".htm"):
        write_page(arguments.output, contents, arguments.statistic)
        return
    for path, (_, content) in zip(arguments.files, contents, strict=True):
        if content["kind"] != "collective":
            raise UsageError(
                f"{path} holds no results of a collective: a picture can show only allreduce, allgather …; a page "
                "can show all results: -o plot.html"
            )
    draw(arguments.output, contents, arguments.statistic)


def write_page(path: Path, contents: Sequence[tuple[str, Content]], statistic: str) -> None:
    """Write a page of charts and tables.

    Parameters
    ----------
    path : pathlib.Path
        The page's file.
    contents : sequence of (str, mapping)
        The name of each run, empty if there is only one, and its content.
    statistic : str
        One of `report.STATISTICS`: the time that is drawn.
    """
    title = " and ".join(dict.fromkeys(_title(content) for _, content in contents))
    parts = {
        "title": escape(f"osu_like_bench: {title}"),
        "sections": "\n".join(_section(name, content) for name, content in contents),
        "data": json.dumps(_charts(contents, statistic), allow_nan=False).replace("<", r"\u003c"),
    }
    path.write_text(re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _TEMPLATE.read_text("utf-8")), "utf-8")


def draw(output: Path, contents: Sequence[tuple[str, Content]], statistic: str) -> None:
    """Draw latency, and speed-up over each run's first contender, against message size.

    Parameters
    ----------
    output : pathlib.Path
        The picture; its suffix selects the format.
    contents, statistic
        As of `write_page`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    sample = contents[0][1]["results"][0]
    figure.suptitle(f"{sample['collective']}, {sample['ranks']} ranks, {sample['dtype']}")
    latency, speedup = figure.subplots(1, 2)
    charts = _charts(contents, statistic)
    for axes, start in ((latency, f"{statistic} latency"), (speedup, "speed-up")):
        drawn = [chart for chart in charts if chart["title"].startswith(start)]
        for series in (series for chart in drawn for series in chart["series"]):
            sizes, values, _ = zip(*series["points"], strict=True)
            axes.plot(sizes, values, marker="o", markersize=3, label=series["name"])
        axes.set_xscale("log", base=2)
        axes.set_xlabel(drawn[0]["x"])
        axes.set_ylabel(drawn[0]["title"])
        axes.grid(alpha=0.3)
        axes.legend()
    latency.set_yscale("log")
    supported = figure.canvas.get_supported_filetypes()
    if output.suffix.lstrip(".").lower() not in supported:
        raise UsageError(f"{output}: the suffix must be one of {', '.join(sorted(supported))}")
    figure.savefig(output, dpi=150)


def _title(content: Content) -> str:
    run, sample = content["run"], content["results"][0]
    what = sample["collective"] if content["kind"] == "collective" else content["kind"]
    ranks = f", {run['ranks']} ranks" if "ranks" in run else ""
    return f"{what}{ranks}, {run.get('cpu', '')}, compcoll {run.get('compcoll', '')}"


def _charts(contents: Sequence[tuple[str, Content]], statistic: str) -> list[Chart]:
    """Return the charts of all runs. Charts with the same title are merged."""
    joined: dict[str, Chart] = {}
    for name, content in contents:
        for chart in _charts_of(f"{name}: " if name else "", content["kind"], content["results"], statistic):
            known = joined.setdefault(chart["title"], chart | {"series": []})
            known["series"] += chart["series"]
            if "labels" in chart:
                known["labels"] = list(dict.fromkeys(known["labels"] + chart["labels"]))
    return list(joined.values())


def _charts_of(prefix: str, kind: str, results: Sequence[Record], statistic: str) -> list[Chart]:
    field = STATISTICS[statistic][1]

    def lines(title: str, value: Callable[[Record], float | None]) -> Chart:
        who = _WHO.get(kind, "contender")
        points = [(prefix + r[who], r["size"], found, r) for r in results if (found := value(r)) is not None]
        series = [{**each, "points": sorted(each["points"])} for each in _series(points)]
        return {"kind": "lines", "title": title, "x": "message size (bytes)", "series": series}

    def bars(title: str, shown: Sequence[Record], label: str, value: str) -> Chart:
        labels = list(dict.fromkeys(r[label] for r in shown))
        points = [(prefix + r[_WHO[kind]], r[label], r[value], r) for r in shown]
        return {"kind": "bars", "title": title, "labels": labels, "series": _series(points)}

    if kind == "ddp":
        return [bars(f"{statistic} step (ms)", results, "contender", field.replace("_us", "_ms"))]
    if kind == "codecs":
        by_operation: dict[str, list[Record]] = {}
        for result in results:
            by_operation.setdefault(result["operation"], []).append(result)
        return [
            bars(f"{operation or 'copy'} (GB/s of uncompressed bytes)", shown, "codec", "throughput")
            for operation, shown in by_operation.items()
        ]
    if kind == "selection":
        return [lines("median (µs)", lambda r: r["median_us"])]
    first = {r["size"]: r[field] for r in results if r["contender"] == results[0]["contender"]}
    return [
        lines(f"{statistic} latency (µs)", lambda r: r[field]),
        lines(
            f"speed-up over {results[0]['contender']}",
            lambda r: first[r["size"]] / r[field] if r["size"] in first else None,
        ),
        lines("bus bandwidth (GB/s)", lambda r: r.get("busbw") or None),
    ]


def _series(points: Iterable[tuple[str, Any, float, Record]]) -> list[dict[str, Any]]:
    """Group points (name, place, value, record) by name. Each gets a text with value, algorithm, ratio and error."""
    series: dict[str, list[tuple[Any, float, str]]] = {}
    for name, place, value, result in points:
        about = [str(result["algorithm"])] if "algorithm" in result else []
        about += [f"ratio {result['ratio']:.2f}"] if result.get("ratio") not in (None, 1.0) else []
        about += [f"error {result['error']:.1e}"] if result.get("error") else []
        text = f"{value:.4g}" + (f"  ({', '.join(about)})" if about else "")
        series.setdefault(name, []).append((place, value, text))
    return [{"name": name, "points": found} for name, found in series.items()]


def _section(name: str, content: Content) -> str:
    """Return the HTML section of a run: its machine, command, and a table of all results."""
    run, results = content["run"], content["results"]
    about = "".join(f"<dt>{escape(key)}</dt><dd>{_value(key, value)}</dd>" for key, value in run.items() if value)
    who = _WHO.get(content["kind"], "contender")
    columns = sorted((c for c in results[0] if c not in _LEFT_OUT), key=lambda c: (c != who, c != "size"))
    texts = {column for column in columns if any(isinstance(result[column], str) for result in results)}
    heads = "".join(f'<th scope="col"{_class(column in texts)}>{escape(column)}</th>' for column in columns)
    rows = "\n".join(
        f"<tr>{''.join(_cell(result[column], column in texts, column == 'wrong') for column in columns)}</tr>"
        for result in results
    )
    table = f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    head = f"<h2>{escape(name or 'Run')}</h2>\n<dl>{about}</dl>"
    return f'<section>\n{head}\n<div class="scroll">{table}</div>\n</section>'


def _value(key: str, value: Any) -> str:
    text = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
    return f"<code>{escape(text)}</code>" if key == "command" else escape(text)


def _class(text: bool, wrong: bool = False) -> str:
    names = ["text"] * text + ["wrong"] * wrong
    return f' class="{" ".join(names)}"' if names else ""


def _cell(value: Any, text: bool, counts_wrong: bool) -> str:
    shown = "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"<td{_class(text, counts_wrong and bool(value))}>{escape(shown)}</td>"
