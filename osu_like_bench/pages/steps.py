"""The pages ddp.md, low-rank.md and local-steps.md: training steps over slow links, and calls of the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .documents import MET, Page, about, command, table
from .records import TRAINING, Record, Row

ACPSGD, POWERSGD, HOOK = "acpsgd:rank=4", "powersgd:rank=4", "gloo+powersgd:rank=4"
ZFP, MINMAX = "compcoll+zfp:rate=8", "compcoll+minmax:bits=8"
BLOCKING, ASYNCHRONOUS, MPI = "inline", "async", "mpi4py"
ALONE, DDP, ONE_BIT, DILOCO = "alone", "ddp", "onebit-adam", "diloco"
"""Contenders of `osu_like_bench ddp`, of `osu_like_bench.backends`, and of `optimizer_speed`."""
RATE = "examples_per_second"

Results = dict[str, Row]
"""The results of a case, by contender."""
Figure = Callable[[Results, str, str], float]
"""Computes a figure from the results and the names of two contenders."""


class Goal(NamedTuple):
    """A goal for a figure that compares two contenders.

    Attributes
    ----------
    contender, than : str
        The contender, and the one to compare with.
    kind : str
        The kind of figure, one of `KINDS`.
    limit : float
        The limit of the figure, lower or upper by its kind.
    """

    contender: str
    kind: str
    limit: float
    than: str

    def line(self, found: Results) -> str:
        """Return a line of a list with the figure, and whether the goal is met."""
        text, figure, more = KINDS[self.kind]
        value = figure(found, self.contender, self.than)
        met = value >= self.limit if more else value <= self.limit
        text = text.format(what=self.contender, limit=f"{self.limit:g}", than=self.than)
        return f"- {text}: {value:.3g}, {MET[met]}."


def _ratio(field: str) -> Figure:
    return lambda found, what, than: float(found[what][field] / found[than][field])


def _work(found: Results, what: str, than: str) -> float:
    """Return the ratio of two contenders' times for compression on one rank. A hook's excludes DDP's own copies."""
    own_copies = found["gloo"]["exposed_ms"] if than.startswith("gloo") else 0.0
    return float(found[what]["exposed_ms"] / (found[than]["exposed_ms"] - own_copies))


KINDS: dict[str, tuple[str, Figure, bool]] = {
    "faster": (
        "`{what}` ≥ {limit} × as fast as `{than}`",
        lambda found, what, than: float(found[than]["median_ms"] / found[what]["median_ms"]),
        True,
    ),
    "work": ("`{what}` compresses in ≤ {limit} of what `{than}` takes", _work, False),
    "over": (
        "`{what}` ≤ {limit} µs over `{than}`",
        lambda found, what, than: float(found[what]["median_us"] - found[than]["median_us"]),
        False,
    ),
    "at most": ("`{what}` ≤ {limit} × `{than}`", _ratio("median_us"), False),
    "examples": ("`{what}` ≥ {limit} × `{than}`", _ratio(RATE), True),
    "under way": (
        "a step with an average under way ≤ {limit} × one without, medians",
        lambda found, what, than: float(found[what]["under_way_median"]),
        False,
    ),
}
"""Kinds of goals: a text, a function that computes the figure, and whether larger is better."""
_CALLS = (Goal(BLOCKING, "over", 10, MPI), Goal(ASYNCHRONOUS, "over", 30, MPI))
_WORK = (Goal(ACPSGD, "work", 0.5, HOOK), Goal(ACPSGD, "work", 0.5, POWERSGD))
GOALS: dict[str, dict[str, tuple[Goal, ...]]] = {
    "ddp": {
        "1g-4hosts": (Goal(ZFP, "faster", 2.5, "gloo"),),
        "10g-2hosts": tuple(Goal(name, "faster", 1, "gloo") for name in ("compcoll", ZFP, MINMAX)),
        "latency-memory": _CALLS,
        "large-memory": tuple(Goal(name, "at most", 1.05, MPI) for name in (BLOCKING, ASYNCHRONOUS)),
        "latency-tcp": (*_CALLS, Goal(ASYNCHRONOUS, "at most", 1, "gloo")),
        "large-tcp": (Goal(ASYNCHRONOUS, "at most", 1, "gloo"),),
    },
    "low-rank": {
        "1g-4hosts": (Goal(ACPSGD, "faster", 5, "gloo"), Goal(ACPSGD, "faster", 1.4, HOOK)),
        "10g-2hosts": (Goal(ACPSGD, "faster", 1, "gloo"), Goal(POWERSGD, "faster", 1, "gloo")),
        "work-perceptron": _WORK,
        "work-resnet50": _WORK,
    },
    "local-steps": {
        "4hosts": (
            Goal(DILOCO, "examples", 50, DDP),
            Goal(DILOCO, "examples", 0.95, ALONE),
            Goal(ONE_BIT, "examples", 10, DDP),
            Goal(DILOCO, "under way", 1.05, DILOCO),
        ),
    },
}
"""Goals by page and case."""


def _case(record: Record, name: str) -> Iterator[str]:
    """Yield the section of a case: its command, table, goals, and where it was measured."""
    case = record.cases[name]
    yield from command(case, broken=True)
    yield ""
    if case.results:
        yield from next(draw for field, draw in _TABLES.items() if field in case.results[0])(case.by_contender())
        yield ""
        goals = GOALS[record.path.stem].get(name, ())
        yield from (goal.line(case.by_contender()) for goal in goals)
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
"""Functions that yield a table, by a figure that the rows have."""
_COLUMNS = (
    *("contender", "median_ms", "compute_ms", "exposed_ms", "communication_ms", "codec_ms", "sent_megabytes"),
    *("median_us", "mean_ms", RATE, "under_way_median", "under_way_mean"),
)

PAGES = (
    Page("ddp", {"case": _case}, (*TRAINING, ":!compcoll/torch/optimizers", ":!compcoll/torch/low_rank"), _COLUMNS),
    Page("low-rank", {"case": _case}, (*TRAINING, ":!compcoll/torch/optimizers"), _COLUMNS, study=True),
    Page("local-steps", {"case": _case}, (*TRAINING, ":!compcoll/torch/low_rank"), _COLUMNS, study=True),
)
