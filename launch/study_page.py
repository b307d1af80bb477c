"""Table, plot and page of launch/study.py's records."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study_methods import BASELINE, Method, Study

from osu_like_bench.errors import UsageError

_NAMES_HIGH = 30
"""Names of a plot's points in a column."""
_OF_TOKENS = (
    "*At most*: kB in a step, where what travels during several counts for each in equal\n"
    "shares. *Bytes a token*: what a rank sends, for each token that it learns from.\n"
)


@dataclass(frozen=True)
class Row:
    """A method's figures, means over its seeds; or why it could not run.

    Attributes
    ----------
    accuracies, losses : list of float
        After the last epoch, of each seed; NaN where training diverged.
    nbytes : float
        Sent by a rank in a step, over all epochs; of the ring's least where nothing is compressed.
    ratio : float
        Uncompressed bytes of the same algorithm divided by these.
    times : float
        Bytes of an uncompressed ring divided by these: what the network notices.
    compressed : float
        The ratio of compressed parameters alone, without those that stay exact.
    at_end : float
        The same in the last epoch.
    per_token : float
        Bytes that a rank sent for each token that it learned from; NaN where examples have none.
    peak : float
        The most that a rank sent in a step; NaN where that is not counted, since all steps are alike.
    refused : str
        Why there are no figures; else empty.
    """

    method: Method
    seeds: list[int]
    accuracies: list[float]
    losses: list[float]
    nbytes: float = math.nan
    ratio: float = math.nan
    times: float = math.nan
    compressed: float = math.nan
    at_end: float = math.nan
    per_token: float = math.nan
    peak: float = math.nan

    @property
    def of_compressed(self) -> str:
        """The ratio of compressed parameters, for people."""
        if math.isnan(self.compressed):
            return "–"
        rises = self.at_end > 1.5 * self.compressed
        return f"{self.compressed:.1f}" + (f"; {self.at_end:.0f} at the end" if rises else "")

    refused: str = ""

    @property
    def accuracy(self) -> float:
        """The mean."""
        return statistics.fmean(self.accuracies) if self.accuracies else math.nan

    @property
    def loss(self) -> float:
        """The mean."""
        return statistics.fmean(self.losses) if self.losses else math.nan


def rows(study: Study, records: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each of a study's methods that has records."""
    found = []
    for method in study.methods:
        mine = sorted((each for each in records if each["method"] == method.name), key=lambda each: int(each["seed"]))
        ran = [each for each in mine if "epochs" in each]
        if ran:
            found.append(_row(study, method, ran))
        elif mine:
            found.append(Row(method, [], [], [], refused=mine[0]["refused"]))
    return found


def _row(study: Study, method: Method, ran: Sequence[dict[str, Any]]) -> Row:
    last = [each["epochs"][-1] for each in ran]
    ranks = ran[0]["ranks"]
    uncompressed = 2 * (ranks - 1) / ranks * 4 * ran[0]["parameters"]
    epochs = [epoch for each in ran for epoch in each["epochs"]]
    exact = [_exact_nbytes(each, epoch) for each in ran for epoch in each["epochs"]]
    sent = [epoch.get("wire_nbytes", uncompressed) for epoch in epochs]
    raw = [nbytes * epoch.get("ratio", 1.0) for nbytes, epoch in zip(sent, epochs, strict=True)]
    return Row(
        method,
        [each["seed"] for each in ran],
        [epoch["accuracy"] for epoch in last],
        [epoch["loss"] for epoch in last],
        statistics.fmean(sent),
        sum(raw) / sum(sent),
        uncompressed / statistics.fmean(sent),
        (sum(raw) - sum(exact)) / (sum(sent) - sum(exact)),
        statistics.fmean(
            (nbytes * epoch.get("ratio", 1.0) - stayed) / (nbytes - stayed)
            for each, epoch in zip(ran, last, strict=True)
            for nbytes, stayed in [(epoch.get("wire_nbytes", uncompressed), _exact_nbytes(each, epoch))]
        ),
        statistics.fmean(sent) * ranks / (study.tokens * ran[0]["settings"]["examples a step"] or math.nan),
        max(epoch.get("peak_step_nbytes", math.nan) for epoch in epochs),
    )


def _exact_nbytes(record: dict[str, Any], epoch: dict[str, Any]) -> float:
    """Bytes that a rank sent of exact gradients in a step: once through shared memory, else as by a ring."""
    ranks, by = record["ranks"], {call for call in epoch.get("calls", ()) if "," not in call}
    times = 1.0 if by == {"shared_memory"} else 2 * (ranks - 1) / ranks
    return times * 4 * float(record.get("exact_parameters", math.nan))


def table(study: Study, found: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown."""
    by_loss = study.measure == "loss"
    seeds = "loss of each seed" if by_loss else "of each seed"
    yield (
        f"| method | accuracy, % | {'' if by_loss else seeds + ' | '}loss, nats | {seeds + ' | ' if by_loss else ''}"
        f"ratio | of what is compressed | kB a step | {'at most | bytes a token | ' if study.tokens else ''}"
        f"ring / this | {_within(study)} | |"
    )
    more = 2 if study.tokens else 0
    yield "|---" * (10 + more) + "|"
    for row in found:
        if row.refused:
            yield (f"| {row.method.name} |{' – |' * (7 + more)} refused | {row.method.remark or row.refused} |")
            continue
        peak = row.nbytes if math.isnan(row.peak) else row.peak
        of_tokens = f"{peak / 1e3:.1f} | {row.per_token:.0f} | " if study.tokens else ""
        accuracies = ", ".join(f"{100 * accuracy:.2f}" for accuracy in row.accuracies)
        losses = ", ".join(f"{loss:.4f}" for loss in row.losses)
        yield (
            f"| {row.method.name} | {100 * row.accuracy:.2f} | {'' if by_loss else accuracies + ' | '}{row.loss:.4f} "
            f"| {losses + ' | ' if by_loss else ''}{row.ratio:.1f} "
            f"| {row.of_compressed} | {row.nbytes / 1e3:.1f} | {of_tokens}"
            f"{row.times:.1f} | {verdict(study, row, found)} | {row.method.remark} |"
        )


def _within(study: Study) -> str:
    return f"within {100 * study.goal:.0f} %"


def verdict(study: Study, row: Row, found: Iterable[Row]) -> str:
    """Tell whether a method is within the goal of the training that it is held against, in the mean over the seeds
    that both have run.
    """
    baseline = next((each for each in found if each.method.name == row.method.baseline), None)
    shared = [] if baseline is None else [seed for seed in row.seeds if seed in baseline.seeds]
    if baseline is None or not shared:
        return "?"

    def mean(of: Row) -> float:
        values = of.losses if study.measure == "loss" else of.accuracies
        return statistics.fmean(values[of.seeds.index(seed)] for seed in shared)

    lost = mean(row) / mean(baseline) - 1 if study.measure == "loss" else mean(baseline) - mean(row)
    return "yes" if lost <= study.goal + 1e-12 else "**no**"


def _seeds(study: Study, found: Sequence[Row]) -> Iterator[str]:
    """Tell which methods have fewer seeds than others, and which have no record."""
    held: dict[str, list[str]] = {}
    most = max(len(row.seeds) for row in found)
    for row in found:
        if row.seeds and len(row.seeds) < most:
            held.setdefault(", ".join(map(str, row.seeds)), []).append(f"`{row.method.name}`")
    for seeds, names in held.items():
        yield f"* Seed {seeds} alone: {', '.join(names)}."
    there = {row.method for row in found}
    missing = [f"`{method.name}`" for method in study.methods if method not in there]
    if missing:
        yield f"* Not run yet: {', '.join(missing)}."


def _summary(study: Study, found: Sequence[Row]) -> Iterator[str]:
    """Tell who is within the goal, and what is to be said besides."""
    yield from _seeds(study, found)
    judged = {row.method: verdict(study, row, found) for row in found if not row.refused}
    within = _within(study)
    for answer, what in (("yes", within.capitalize()), ("**no**", f"Not {within}")):
        names = [f"`{m.name}`" for m, said in judged.items() if said == answer and m.name != m.baseline]
        yield f"* {what}: {', '.join(names) or 'none'}."
    yield from study.notes


def _commits(found: Sequence[Row], records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The commits that the rows are of."""
    made: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        mine = [each["run"].get("commit", "") for each in records if each["method"] == row.method.name]
        made.setdefault(tuple(sorted(set(mine))), []).append(f"`{row.method.name}`")
    for commits, names in made.items():
        of = " and ".join(each or "not noted" for each in commits)
        yield f"* Commit {of}: {', '.join(names)}."


def page(study: Study, found: Sequence[Row], records: Sequence[dict[str, Any]], path: Path, picture: str | None) -> str:
    """The whole page, which lies at a path."""
    first = next(each for each in records if "epochs" in each)
    about, settings = first["run"], first["settings"]
    dates = sorted({each["run"]["date"][:10] for each in records})
    processors = " and ".join(sorted({each["run"]["cpu"] for each in records}))
    lines = [
        "# Accuracy and what is sent",
        "",
        f"Made by `launch/study.py`, {' and '.join(dict.fromkeys((dates[0], dates[-1])))}: {processors}, "
        f"{about['cores']} cores, {about['instruction_set']}; {first['ranks']} ranks. "
        f"The task: {settings['task']}, {settings['examples a step']} examples a step, "
        f"{max(each['epochs'][-1]['epoch'] for each in records if 'epochs' in each)} epochs "
        f"({max(each['epochs'][-1]['step'] for each in records if 'epochs' in each)} steps).",
        "",
        "Accuracy and loss are those of the test data at the end, means over the seeds. *Ratio*: bytes of",
        "the same algorithm without a codec, divided by what was sent; biases, norms and small parameters are sent",
        "exactly and count, but not in the ratio *of what is compressed*. *Ring / this*: bytes of an uncompressed ring",
        "divided by what was sent: sparse sums send (p − 1) contributions, a ring 2(p − 1)/p. All over the whole",
        f"training. {_OF_TOKENS if study.tokens else ''}*{_within(study).capitalize()}*: of the {study.measure} of the "
        "uncompressed training with the same",
        "optimizer, in the mean over the seeds that both have run.",
        "",
        *_commits(found, records),
        "",
        *table(study, found),
        "",
        *_summary(study, found),
        "",
    ]
    if picture is not None:
        lines += [f"![{study.measure} against ratio]({picture})", ""]
    lines += [
        "## Commands",
        "",
        f"Other seeds likewise; figures of all epochs are in [the records]({path.stem}).",
        "",
        "```sh",
    ]
    commands = {each["method"]: each["run"]["command"] for each in sorted(records, key=lambda each: -each["seed"])}
    lines += [f"{commands[row.method.name]}  # {row.method.name}" for row in found]
    return "\n".join([*lines, "```", ""])


def plot(study: Study, found: Sequence[Row], path: Path) -> None:
    """Accuracy or loss against ratio, one point a method, by number: a panel for each baseline, names beside it."""
    from matplotlib.figure import Figure

    def values(row: Row) -> list[float]:
        return row.losses if study.measure == "loss" else [100 * accuracy for accuracy in row.accuracies]

    drawn = [row for row in found if row.seeds and not row.refused and all(map(math.isfinite, values(row)))]
    baselines = list(dict.fromkeys(row.method.baseline for row in drawn))
    figure = Figure(figsize=(12, 5.5 * len(baselines)), layout="constrained")
    unit = "loss, nats" if study.measure == "loss" else "accuracy, %"
    for axes, baseline in zip(figure.subplots(len(baselines), squeeze=False)[:, 0], baselines, strict=True):
        names = []
        panel = sorted((row for row in drawn if row.method.baseline == baseline), key=lambda row: row.times)
        for number, row in enumerate(panel, 1):
            of_seeds, lost = values(row), "no-feedback" in row.method.name
            mean = statistics.fmean(of_seeds)
            axes.errorbar(
                row.times,
                mean,
                yerr=[[max(mean - min(of_seeds), 0)], [max(max(of_seeds) - mean, 0)]],
                marker="x" if lost else "o",
                capsize=2,
                color="tab:red" if lost else "tab:blue",
            )
            axes.annotate(str(number), (row.times, mean), (4, 4), textcoords="offset points", fontsize=8)
            names.append(f"{number:2} {row.method.name.replace(baseline.removeprefix(BASELINE), '')}")
        # Of one height each, in as many columns as the panel's height asks for.
        for column in range(0, len(names), _NAMES_HIGH):
            text = "\n".join(names[column : column + _NAMES_HIGH])
            axes.text(1.02 + 0.28 * column / _NAMES_HIGH, 1, text, transform=axes.transAxes, va="top", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlabel("bytes of an uncompressed ring / bytes sent")
        axes.set_ylabel(f"{unit} (mean; bars: lowest and highest of the seeds)")
        axes.set_title(f"against {baseline}; crosses: without feedback")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def report(study: Study, folder: Path) -> None:
    """Write page and plot beside the folder of records."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found = rows(study, records)
    if not any(row.seeds for row in found):
        raise UsageError(f"{folder} holds no records: run launch/study.py without --report first")
    picture = folder.with_suffix(".png")
    try:
        plot(study, found, picture)
    except ImportError:
        print("study: no plot without matplotlib: pip install 'compcoll[plot]'", file=sys.stderr)
    path = folder.with_suffix(".md")
    path.write_text(page(study, found, records, path, picture.name if picture.exists() else None))
