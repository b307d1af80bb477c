"""Training steps over slow links, and the backend's calls: ddp.md, low-rank.md and local-steps.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .documents import MET, Page, about, command, table
from .records import Record, Row
from .stale import TRAINING

ACPSGD, POWERSGD, HOOK = "acpsgd:rank=4", "powersgd:rank=4", "gloo+powersgd:rank=4"
ZFP, MINMAX = "compcoll+zfp:rate=8", "compcoll+minmax:bits=8"
BLOCKING, ASYNCHRONOUS, MPI = "inline", "async", "mpi4py"
ALONE, DDP, ONE_BIT, DILOCO = "alone", "ddp", "onebit-adam", "diloco"
"""Contenders of `osu_like_bench ddp`, of `osu_like_bench.backends`, and of `optimizer_speed`."""
RATE = "examples_per_second"

Results = dict[str, Row]
"""Of a case, by contender."""


class Goal(NamedTuple):
    """What is wanted, the figure that tells, its limit, and whether more is better."""

    text: str
    figure: Callable[[Results], float]
    limit: float
    more: bool

    def told(self, found: Results) -> str:
        """A line of a list: the figure, and whether the goal is met."""
        figure = self.figure(found)
        met = figure >= self.limit if self.more else figure <= self.limit
        return f"- {self.text}: {figure:.3g}, {MET[met]}."


def _faster(what: str, than: str, times: float) -> Goal:
    text = f"`{what}` ≥ {times:g} × as fast as `{than}`"
    return Goal(text, lambda found: found[than]["median_ms"] / found[what]["median_ms"], times, True)


def _less_work(what: str, than: str, most: float) -> Goal:
    text = f"`{what}` compresses in ≤ {most:g} of what `{than}` takes"

    def share(found: Results) -> float:
        own_copies = found["gloo"]["exposed_ms"] if than.startswith("gloo") else 0.0
        return float(found[what]["exposed_ms"] / (found[than]["exposed_ms"] - own_copies))

    return Goal(text, share, most, False)


def _over(contender: str, most: float) -> Goal:
    text = f"`{contender}` ≤ {most:g} µs over `{MPI}`"
    return Goal(text, lambda found: found[contender]["median_us"] - found[MPI]["median_us"], most, False)


def _at_most(contender: str, than: str, times: float) -> Goal:
    text = f"`{contender}` ≤ {times:g} × `{than}`"
    return Goal(text, lambda found: found[contender]["median_us"] / found[than]["median_us"], times, False)


def _more_examples(contender: str, than: str, times: float) -> Goal:
    text = f"`{contender}` ≥ {times:g} × `{than}`"
    return Goal(text, lambda found: found[contender][RATE] / found[than][RATE], times, True)


_UNDER_WAY = Goal(
    "a step with an average under way ≤ 1.05 × one without, medians",
    lambda found: float(found[DILOCO]["under_way_median"]),
    1.05,
    False,
)
_CALLS = (_over(BLOCKING, 10), _over(ASYNCHRONOUS, 30))
_WORK = (_less_work(ACPSGD, HOOK, 0.5), _less_work(ACPSGD, POWERSGD, 0.5))
GOALS: dict[str, dict[str, tuple[Goal, ...]]] = {
    "ddp": {
        "1g-4hosts": (_faster(ZFP, "gloo", 2.5),),
        "10g-2hosts": tuple(_faster(name, "gloo", 1) for name in ("compcoll", ZFP, MINMAX)),
        "latency-memory": _CALLS,
        "large-memory": (_at_most(BLOCKING, MPI, 1.05), _at_most(ASYNCHRONOUS, MPI, 1.05)),
        "latency-tcp": (*_CALLS, _at_most(ASYNCHRONOUS, "gloo", 1)),
        "large-tcp": (_at_most(ASYNCHRONOUS, "gloo", 1),),
    },
    "low-rank": {
        "1g-4hosts": (_faster(ACPSGD, "gloo", 5), _faster(ACPSGD, HOOK, 1.4)),
        "10g-2hosts": (_faster(ACPSGD, "gloo", 1), _faster(POWERSGD, "gloo", 1)),
        "work-perceptron": _WORK,
        "work-resnet50": _WORK,
    },
    "local-steps": {
        "4hosts": (
            _more_examples(DILOCO, DDP, 50),
            _more_examples(DILOCO, ALONE, 0.95),
            _more_examples(ONE_BIT, DDP, 10),
            _UNDER_WAY,
        ),
    },
}
"""By page and case."""


def _case(record: Record, name: str) -> Iterator[str]:
    """The command of a case, its table, its goals, and where it was measured."""
    case = record.cases[name]
    yield from command(case, broken=True)
    yield ""
    if case.results:
        yield from next(draw for field, draw in _TABLES.items() if field in case.results[0])(case.by_contender())
        yield ""
        goals = GOALS[record.path.stem].get(name, ())
        yield from (goal.told(case.by_contender()) for goal in goals)
        yield from [""] * bool(goals)
    yield f"{about(case) if case.results else case.missing} [Figures]({record.path.name})."


def _steps(found: Results) -> Iterator[str]:
    first = next(iter(found.values()))
    columns = ("median_ms", "compute_ms", "exposed_ms", "communication_ms", "codec_ms")
    names = ("step", "compute", "exposed", "communication", "codec", "MB sent")
    yield from table(
        ("", *names, f"`{first['contender']}` / this"),
        (
            (
                f"`{name}`",
                *(_ms(each.get(key)) for key in columns),
                f"{each['sent_megabytes']:.1f}" if "sent_megabytes" in each else "",
                f"{first['median_ms'] / each['median_ms']:.2f}",
            )
            for name, each in found.items()
        ),
    )


def _ms(taken: float | None) -> str:
    return "" if taken is None else f"{taken:.0f}" if taken >= 100 else f"{taken:.1f}"


def _calls(found: Results) -> Iterator[str]:
    head = ["", *(f"`{name}`" for name in found)]
    yield from table(head, [("µs", *(f"{each['median_us']:.4g}" for each in found.values()))])


def _rates(found: Results) -> Iterator[str]:
    rows = []
    for name, each in found.items():
        times, share = each[RATE] / found[DDP][RATE], 100 * each[RATE] / found[ALONE][RATE]
        rows.append((f"`{name}`", _ms(each["mean_ms"]), f"{each[RATE]:.3g}", f"{times:.3g}", f"{share:.3g} %"))
    yield from table(("", "mean step, ms", "examples a second", f"× `{DDP}`", f"of `{ALONE}`"), rows)
    median, mean = (found[DILOCO][f"under_way_{how}"] for how in ("median", "mean"))
    yield from ("", f"A step with an average under way takes {median:.3f} × one without (mean {mean:.3f} ×).")


_TABLES: dict[str, Callable[[Results], Iterator[str]]] = {"median_ms": _steps, "median_us": _calls, RATE: _rates}
"""By a figure that the rows have."""
_COLUMNS = (
    *("contender", "median_ms", "compute_ms", "exposed_ms", "communication_ms", "codec_ms", "sent_megabytes"),
    *("median_us", "mean_ms", RATE, "under_way_median", "under_way_mean"),
)

PAGES = (
    Page("ddp", {"case": _case}, (*TRAINING, ":!compcoll/torch/optimizers", ":!compcoll/torch/low_rank"), _COLUMNS),
    Page("low-rank", {"case": _case}, (*TRAINING, ":!compcoll/torch/optimizers"), _COLUMNS),
    Page("local-steps", {"case": _case}, (*TRAINING, ":!compcoll/torch/low_rank"), _COLUMNS),
)
