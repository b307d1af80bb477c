"""The pages study.md, study-text.md and study-muon.md: accuracy and loss against bytes sent, for all methods to send
gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .documents import Output, Page, table
from .records import GPU, NO_SHARDS, SENDING, Case, Record, Row

BASELINE = "uncompressed"
_NAMES_HIGH = 30
"""Number of names in a column of a plot's legend."""


@dataclass(frozen=True)
class Study:
    """Trainings of one task.

    Attributes
    ----------
    name : str
        The page's name.
    measure : str
        The figure that is compared with the baseline's: ``"accuracy"`` or ``"loss"``.
    goal : float
        How much worse than the baseline's it may be: absolute for accuracy, relative for the loss.
    tokens : int
        Tokens of an example; 0 if examples have no tokens.
    """

    name: str
    measure: str
    goal: float
    tokens: int = 0

    @property
    def within(self) -> str:
        """The goal as a text."""
        return f"within {100 * self.goal:.0f} %"


@dataclass(frozen=True)
class Method:
    """The figures of a method, whose launches have different seeds; or the reason why it could not run."""

    name: str
    case: Case

    @property
    def baseline(self) -> str:
        """The name of the uncompressed method with the same optimizer, to compare with."""
        suffix = next((each for each in ("-adamw", "-muon", "-momentum") if each in self.name), "")
        return BASELINE + suffix

    def values(self, measure: str) -> dict[int, float]:
        """Return accuracies or losses after the last epoch, by seed; NaN if training diverged."""
        return {row["launch"]: row.get(measure, math.nan) for row in self.case.results}

    def mean(self, figure: str) -> float:
        """Return the mean of a figure over all seeds."""
        return statistics.fmean(row.get(figure, math.nan) for row in self.case.results)

    @property
    def ratio(self) -> float:
        """Uncompressed bytes of the same algorithm divided by what was sent."""
        return self.mean("raw") / self.mean("sent")

    @property
    def times(self) -> float:
        """Bytes of an uncompressed ring divided by what was sent: the saving for the network."""
        return self.mean("ring") / self.mean("sent")

    @property
    def of_compressed(self) -> str:
        """A text with the ratio for compressed parameters only, and the ratio in the last epoch if much larger."""
        exact = self.mean("exact")
        compressed, at_end = (self.mean("raw") - exact) / (self.mean("sent") - exact), self.mean("at_end")
        if math.isnan(compressed):
            return "–"
        return f"{compressed:.1f}" + f"; {at_end:.0f} at the end" * (at_end > 1.5 * compressed)


def rows(output: Output) -> list[Row]:
    """Return the figures of one training. Bytes are those of a rank and a step, as means over all epochs."""
    ranks, epochs = output["run"]["ranks"], output["epochs"]
    ring = 2 * (ranks - 1) / ranks * 4 * output["parameters"]
    sent = [epoch.get("wire_nbytes", ring) for epoch in epochs]
    raw = [nbytes * epoch.get("ratio", 1.0) for nbytes, epoch in zip(sent, epochs, strict=True)]
    exact = [_exact_nbytes(output, epoch) for epoch in epochs]
    peaks = [epoch["peak_step_nbytes"] for epoch in epochs if "peak_step_nbytes" in epoch]
    figures: Row = {
        "accuracy": epochs[-1]["accuracy"],
        "loss": epochs[-1]["loss"],
        "sent": statistics.fmean(sent),
        "raw": statistics.fmean(raw),
        "exact": statistics.fmean(exact),
        "at_end": (raw[-1] - exact[-1]) / (sent[-1] - exact[-1]),
        "peak": max(peaks, default=None),
        "ring": ring,
        "examples": output["settings"]["examples a step"],
        "epochs": epochs[-1]["epoch"],
        "steps": epochs[-1]["step"],
    }
    return [figures]


def _exact_nbytes(output: Output, epoch: dict[str, Any]) -> float:
    """Return the bytes of exact gradients that a rank sends in a step, by a ring or once through shared memory."""
    ranks, by = output["run"]["ranks"], {call for call in epoch.get("calls", ()) if "," not in call}
    times = 1.0 if by == {"shared_memory"} else 2 * (ranks - 1) / ranks
    return times * 4 * float(output.get("exact_parameters", math.nan))


def methods(record: Record) -> list[Method]:
    """Return all methods that have run or could not run."""
    return [Method(name, case) for name, case in record.cases.items() if case.results or case.missing]


def verdict(study: Study, method: Method, found: Iterable[Method]) -> str:
    """Return a text whether a method is within the goal of its baseline, by means over the seeds that both have run."""
    baseline = next((each for each in found if each.name == method.baseline), None)
    mine, theirs = method.values(study.measure), {} if baseline is None else baseline.values(study.measure)
    shared = mine.keys() & theirs.keys()
    if not shared:
        return "?"
    own, other = (statistics.fmean(values[seed] for seed in shared) for values in (mine, theirs))
    lost = own / other - 1 if study.measure == "loss" else other - own
    return "yes" if lost <= study.goal + 1e-12 else "**no**"


def _about(study: Study, record: Record) -> Iterator[str]:
    measured = list(record.measured().values())
    every = [row for case in measured for row in case.results]
    run, dates = measured[0].run, sorted({row["date"][:10] for row in every})
    cpus = " and ".join(sorted({case.run["cpu"] for case in measured}))
    epochs, steps = (max(row[name] for row in every) for name in ("epochs", "steps"))
    yield (
        f"{' and '.join(dict.fromkeys((dates[0], dates[-1])))}: {cpus}, {run['cores']} cores, "
        f"{run['instruction_set']}; {measured[0].ranks} ranks. The task: "
        f"{'text' if study.tokens else 'digits'}, {every[0]['examples']} examples a step, "
        f"{epochs} epochs ({steps} steps)."
    )


def _commits(record: Record) -> Iterator[str]:
    """Yield a list of the commits at which the methods were measured."""
    made: dict[tuple[str, ...], list[str]] = {}
    for method in methods(record):
        made.setdefault(tuple(sorted(method.case.commits())), []).append(f"`{method.name}`")
    for commits, names in made.items():
        yield f"* Commit {' and '.join(commits) or 'not noted'}: {', '.join(names)}."


def _table(study: Study, record: Record) -> Iterator[str]:
    by_loss, found = study.measure == "loss", methods(record)
    seeds = ("of each seed",)
    head = ["accuracy, %", "loss, nats", "loss of each seed"] if by_loss else ["accuracy, %", *seeds, "loss, nats"]
    head += ["ratio", "of what is compressed", "kB a step", *["at most", "bytes a token"] * bool(study.tokens)]
    lines: list[list[str]] = []
    for method in found:
        if not method.case.results:
            dashes = ["–"] * (len(head) + 1)
            lines.append([method.name, *dashes, "refused", method.case.remark or method.case.missing])
            continue
        digits, scale = (4, 1) if by_loss else (2, 100)
        each = ", ".join(f"{scale * value:.{digits}f}" for value in method.values(study.measure).values())
        accuracy, loss = f"{100 * method.mean('accuracy'):.2f}", f"{method.mean('loss'):.4f}"
        cells = [accuracy, loss, each] if by_loss else [accuracy, each, loss]
        cells += [f"{method.ratio:.1f}", method.of_compressed, f"{method.mean('sent') / 1e3:.1f}"]
        if study.tokens:
            rows = method.case.results
            peak = max((row["peak"] for row in rows if "peak" in row), default=method.mean("sent"))
            tokens = study.tokens * rows[0]["examples"] / method.case.ranks
            cells += [f"{peak / 1e3:.1f}", f"{method.mean('sent') / tokens:.0f}"]
        lines.append([method.name, *cells, f"{method.times:.1f}", verdict(study, method, found), method.case.remark])
    yield from table(("method", *head, "ring / this", study.within, ""), lines)


def _summary(study: Study, record: Record) -> Iterator[str]:
    """Yield lists of methods: with fewer seeds than others, not run yet, within the goal, and not within it."""
    found = methods(record)
    ran = [method for method in found if method.case.results]
    held: dict[str, list[str]] = {}
    for method in ran:
        if len(method.case.results) < max(len(each.case.results) for each in ran):
            held.setdefault(", ".join(map(str, method.values("loss"))), []).append(f"`{method.name}`")
    for seeds, names in held.items():
        yield f"* Seed {seeds} alone: {', '.join(names)}."
    there = {method.name for method in found}
    if missing := [f"`{name}`" for name in record.cases if name not in there]:
        yield f"* Not run yet: {', '.join(missing)}."
    for answer, what in (("yes", study.within.capitalize()), ("**no**", f"Not {study.within}")):
        others = [m for m in ran if m.name != m.baseline and verdict(study, m, found) == answer]
        yield f"* {what}: {', '.join(f'`{method.name}`' for method in others) or 'none'}."


def _commands(record: Record) -> Iterator[str]:
    yield "```sh"
    yield from (f"{m.case.command.replace('{launch}', '0')}  # {m.name}" for m in methods(record))
    yield "```"


def _plot(study: Study, record: Record, folder: Path) -> None:
    """Draw accuracy or loss against ratio: a panel for each baseline, with a numbered point for each method."""
    from matplotlib.figure import Figure

    scale = 1 if study.measure == "loss" else 100
    drawn = [m for m in methods(record) if m.case.results and math.isfinite(m.mean(study.measure))]
    baselines = list(dict.fromkeys(method.baseline for method in drawn))
    figure = Figure(figsize=(12, 5.5 * len(baselines)), layout="constrained")
    unit = "loss, nats" if study.measure == "loss" else "accuracy, %"
    for axes, baseline in zip(figure.subplots(len(baselines), squeeze=False)[:, 0], baselines, strict=True):
        names = []
        panel = sorted((method for method in drawn if method.baseline == baseline), key=lambda method: method.times)
        for number, method in enumerate(panel, 1):
            of_seeds = [scale * value for value in method.values(study.measure).values()]
            mean, lost = statistics.fmean(of_seeds), "no-feedback" in method.name
            axes.errorbar(
                method.times,
                mean,
                yerr=[[max(mean - min(of_seeds), 0)], [max(max(of_seeds) - mean, 0)]],
                marker="x" if lost else "o",
                capsize=2,
                color="C3" if lost else "C0",
            )
            axes.annotate(str(number), (method.times, mean), (4, 4), textcoords="offset points", fontsize=8)
            names.append(f"{number:2} {method.name.replace(baseline.removeprefix(BASELINE), '')}")
        # All columns have the same height, that of the panel.
        for column in range(0, len(names), _NAMES_HIGH):
            text = "\n".join(names[column : column + _NAMES_HIGH])
            axes.text(1.02 + 0.28 * column / _NAMES_HIGH, 1, text, transform=axes.transAxes, va="top", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlabel("bytes of an uncompressed ring / bytes sent")
        axes.set_ylabel(f"{unit} (mean; bars: lowest and highest of the seeds)")
        axes.set_title(f"against {baseline}; crosses: without feedback")
        axes.grid(alpha=0.3)
    figure.savefig(folder / f"{study.name}.png", dpi=100, bbox_inches="tight")


def by_muon(folder: Path) -> dict[str, Case]:
    """Return a shorter training by Muon for each case of study-text that averages AdamW's gradients."""
    cases = {}
    for name, case in Record(folder / f"{TEXT.name}.json").cases.items():
        if "-adamw" in name and "--optimizer" not in case.command:
            command = case.command.replace("--task text", "--task text --optimizer muon")
            for given, instead in (("-n 4", "-n 2"), ("--batch 2", "--batch 4"), ("--steps 500", "--steps 100")):
                command = command.replace(given, instead)
            cases[name.replace("-adamw", "-muon")] = Case(command, launches=case.launches, seconds=case.seconds)
    return cases


def _page(study: Study, *times: str, derived: Callable[[Path], dict[str, Case]] = lambda folder: {}) -> Page:
    return Page(
        study.name,
        {
            "about": partial(_about, study),
            "commits": _commits,
            "table": partial(_table, study),
            "summary": partial(_summary, study),
            "commands": _commands,
        },
        (*_LOSING, *times),
        rows=rows,
        plot=partial(_plot, study),
        by_row=True,
        derived=derived,
        study=True,
    )


_LOSING = (
    *("compcoll/codecs", "compcoll/kernels", "compcoll/feedback.py"),
    *("compcoll/torch/gradients", "compcoll/torch/low_rank", *NO_SHARDS, *GPU, *SENDING),
)
"""Pathspecs of the code that accuracy depends on: compression, but not the code that only sends."""
DIGITS = Study("study", "accuracy", 0.01)
TEXT = Study("study-text", "loss", 0.02, tokens=128)
MUON = Study("study-muon", "loss", 0.02, tokens=128)
PAGES = (_page(DIGITS), _page(TEXT, "compcoll/torch/optimizers"), _page(MUON, derived=by_muon))
