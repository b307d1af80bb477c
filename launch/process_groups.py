"""Collectives and training over gloo without MPI, against gloo and others over it: docs/measurements/groups.md.

sudo .venv/bin/python launch/process_groups.py             # everything, in some twenty minutes
sudo .venv/bin/python launch/process_groups.py --quick     # fewer sizes and repetitions, in some five
.venv/bin/python launch/process_groups.py --only node      # no root is needed inside one node
.venv/bin/python launch/process_groups.py --report         # the page again, from the records that are there
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from labs import lab, measure, middle, netlab

from compcoll.tools.arguments import amount
from compcoll.tools.machine import cpu

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "measurements" / "groups.md"
RECORDS = PAGE.with_suffix("")
LAB = "groups"
LONGEST = 600.0
"""Seconds of a run."""
DDP, CALLS = "osu_like_bench ddp", "osu_like_bench.backends"
OURS = "compcoll+zfp:rate=8"
AGAIN = "gloo_again"


class Taken(NamedTuple):
    """A median in milliseconds, and what ran."""

    median: float
    ran: str


Times = dict[tuple[str, int], Taken]
"""By contender and bytes; of training steps, 0 bytes."""


@dataclass(frozen=True)
class Case:
    """A command that is measured.

    Attributes
    ----------
    hosts, rate : int, str
        Of the lab; no hosts: torchrun starts two processes on this machine.
    program, words : str
        What is run.
    goal : str
        For people.
    verdict : callable
        Tells by the times what was seen, and whether the goal is met: of several launches by each.
    launches : int
        Each size's results are those of the launch that is in the middle by our time over gloo's.
    """

    hosts: int
    rate: str
    program: str
    words: str
    goal: str
    verdict: Callable[[Times], tuple[str, bool]]
    launches: int = 1


def _step(times: Times) -> tuple[str, bool]:
    found = times["gloo", 0].median / times[OURS, 0].median
    return f"{found:.2f} ×", found >= 2.8


def _bound(times: Times) -> tuple[str, bool]:
    """Against the time of the wires of 16 MiB, of 4 ranks at 1 Gb/s, by the compression ratio of 4."""
    bound = 2 * 3 / 4 * (1 << 24) * 8 / 1e9 * 1e3 / 4
    taken = times["group", 1 << 24].median
    return f"{taken / bound:.2f} × ({taken:.1f} ms)", taken <= 1.15 * bound


def _ahead(times: Times) -> tuple[str, bool]:
    ratios = {
        (name, nbytes): taken.median / times["group", nbytes].median
        for (name, nbytes), taken in times.items()
        if name[:2] == "fp"
    }
    text = ", ".join(f"{name} at {nbytes >> 20} MiB {ratio:.2f} ×" for (name, nbytes), ratio in ratios.items())
    return text, all(ratio > 1 for ratio in ratios.values())


def _late(times: Times, name: str = "group") -> dict[int, tuple[Taken, Taken]]:
    """At which sizes a contender is slower than gloo by more than 3 % or 20 µs: its time and gloo's."""
    return {
        nbytes: (times[name, nbytes], taken)
        for (other, nbytes), taken in times.items()
        if other == "gloo" and times[name, nbytes].median > max(1.03 * taken.median, taken.median + 0.02)
    }


def _never_slower(times: Times) -> tuple[str, bool]:
    late = _late(times)
    text = ", ".join(
        f"{_shown(nbytes)}: {1e3 * own.median:.0f} instead of {1e3 * gloo.median:.0f} µs, by {own.ran}"
        for nbytes, (own, gloo) in late.items()
    )
    return text or "nowhere slower", not late


def _at_its_price(times: Times) -> tuple[str, bool]:
    beyond = {
        n: 1e3 * (times["group", n].median - taken.median)
        for (name, n), taken in times.items()
        if name == "gloo" and n <= 1024
    }
    worst = max(beyond, key=lambda nbytes: beyond[nbytes])
    return f"{_shown(worst)}: {beyond[worst]:+.1f} µs", beyond[worst] <= 10


CASES = {
    "step": Case(
        *(4, "1gbit", DDP, "--threads 1 --parameters 25e6 --batch 1 -x 1 -i 6 --statistic median"),
        "a DDP step of 25 million parameters with ZFP at rate 8 ≥ 2.8 × as fast as plain DDP",
        _step,
    ),
    "16M": Case(4, "1gbit", CALLS, "-m 16M --time-cap 8", "16 MiB ≤ 1.15 × what its wires take alone", _bound),
    "peers": Case(4, "1gbit", CALLS, "-m 4M,64M --time-cap 8", "ahead of fp16 and float8 over the same gloo", _ahead),
    "10g": Case(
        *(2, "10gbit", CALLS, "-m 4K:64M -i 5000 --time-cap 4"),
        "nowhere slower than gloo by 3 % or 20 µs",
        _never_slower,
        launches=5,  # what runs is decided by what each launch measures
    ),
    "node": Case(0, "", CALLS, "-m 4:64M --time-cap 2", "nowhere slower than gloo by 3 % or 20 µs", _never_slower),
    "small": Case(
        0, "", CALLS, "-m 4:1K -x 300 -i 4000 --time-cap 3", "≤ gloo's price + 10 µs up to 1 KiB", _at_its_price
    ),
}
CONTENDERS = {
    "step": f"gloo,{OURS},gloo+fp16,gloo+bf16",
    "16M": "gloo,group,group_direct",
    "peers": "group,fp16,fp8",
    "10g": f"gloo,group,{AGAIN}",
}
QUICK = {"step": "-i 3", "node": "-m 4:64M --time-cap 0.5"}


def main() -> int:
    """The exit status: 1 if something could not be measured, or misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--only", default=",".join(CASES), metavar="NAMES", help="cases (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"there is no {', '.join(sorted(unknown))}: the cases are {', '.join(CASES)}")
    os.chdir(REPOSITORY)
    failed = [] if options.report else [name for name in names if not _measured(name, quick=options.quick)]
    missed = write()
    for name in failed:
        print(f"process_groups: {name} could not be measured", file=sys.stderr)
    return 1 if failed or missed else 0


def command(name: str, *, quick: bool) -> list[str]:
    """The program of a case, and its arguments."""
    case = CASES[name]
    words = [*case.words.split(), *(QUICK.get(name, "").split() if quick else ())]
    return [*case.program.split(), *words, "--compare", CONTENDERS.get(name, "gloo,group")]


def _measured(name: str, *, quick: bool) -> bool:
    """Measure a case and keep its record; False if it failed."""
    case, path, words = CASES[name], RECORDS / f"{name}.json", command(name, quick=quick)
    one = path.with_suffix(".launch.json")
    # The record keeps the command: no path of this machine.
    program = ["-m", *words, "--json", str(one.relative_to(REPOSITORY))]
    started = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", *program]
    if case.hosts:
        started = netlab("run", "--name", LAB, "-n", str(case.hosts), "--mpi", "none", "--", "python", *program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("COMPCOLL_PROFILE", None)  # `auto` is to measure the links itself
    launches = []
    with lab(LAB, case.hosts, "--rate", case.rate) if case.hosts else nullcontext():
        for _ in range(1 if quick else case.launches):
            if measure(started, one, LONGEST, environment):
                return False
            launches.append(json.loads(one.read_text()))
            one.unlink()
    others = max(launch.pop("others_percent") for launch in launches)
    record = launches[0]
    if len(launches) > 1:
        record = middle(launches, "group") | {"results_of_launches": [launch["results"] for launch in launches]}
        del record["median_us_of_launches"]
    record["about"] = {
        "command": " ".join(["python", "-m", *words]),
        "cpu": cpu()[0],
        "cores": os.cpu_count(),
        "date": f"{date.today()}",
        "launches": len(launches),
        "others_percent": others,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return True


def _times(results: Sequence[dict[str, Any]]) -> Times:
    return {
        (found["contender"], found.get("size", 0)): Taken(
            found.get("median_ms", found.get("median_us", 0.0) / 1e3), found.get("ran", "")
        )
        for found in results
    }


def write() -> int:
    """Write the page, and return how many goals are missed."""
    records = {name: json.loads(path.read_text()) for name in CASES if (path := RECORDS / f"{name}.json").exists()}
    missed, rows, tables = 0, [], []
    for name, record in records.items():
        case, times = CASES[name], _times(record["results"])
        seen, met = case.verdict(times)
        seen += _worst(record) + _control(record)
        met = met and all(case.verdict(each)[1] for each in _of_launches(record))
        missed += not met
        where = f"{case.hosts} hosts, {case.rate}" if case.hosts else "one node, 2 ranks"
        rows.append(f"| {name} | {where} | {case.goal} | {seen} | {'met' if met else '**missed**'} |")
        about = record["about"]
        tables += [
            *("", f"## {name}: {where}", ""),
            f"`{about['command']}`; {about['cpu']}, {record['run']['instruction_set']}, {about['cores']} cores, "
            f"{about['date']}, commit {record['run']['commit']}; {_launches(about)}others used "
            f"{about['others_percent']:.0f} % of the machine.",
            *("", *_table(times)),
        ]
    head = [
        *("# Over gloo, without MPI", ""),
        "Made by `python launch/process_groups.py` (as root, for [netlab](../launching/netlab.md)), on ranks that no",
        "MPI started. Medians, in turns. `group` is `compcoll.torch.all_reduce` with ZFP at rate 8 by `auto`,",
        "`group_direct` by `direct`; `gloo_again` is gloo once more in its turn: how far apart equal contenders are;",
        "`fp16` sums halves, as PyTorch's hook does; `fp8` is torchft's way in PyTorch's operations: rows of float8 by",
        "all_to_all, added, and gathered.",
        *("", "| case | where | goal | seen | |", "|---|---|---|---|---|"),
    ]
    PAGE.write_text("\n".join([*head, *rows, *tables]) + "\n")
    return missed


def _launches(about: dict[str, Any]) -> str:
    """Say how many there were, if each size's results are those of another."""
    if (number := about.get("launches", 1)) == 1:
        return ""
    return f"{number} launches, each size's figures are those of the one in the middle by `group` over gloo's best; "


def _worst(record: dict[str, Any]) -> str:
    """Say how late `group` was in the worst of several launches."""
    late = [
        (times["group", nbytes].median / taken.median, nbytes, times["group", nbytes].ran)
        for times in _of_launches(record)
        for (name, nbytes), taken in times.items()
        if name == "gloo"
    ]
    if not late:
        return ""
    worst, nbytes, ran = max(late)
    return f"; in the worst launch {worst:.2f} × gloo's median, at {_shown(nbytes)}, by {ran}"


def _control(record: dict[str, Any]) -> str:
    """Say how often gloo itself, called once more in its turn, is as late as `group` may not be."""
    launches = [times for times in _of_launches(record) if any(name == AGAIN for name, _ in times)]
    if not launches:
        return ""
    cells = sum(name == AGAIN for times in launches for name, _ in times)
    own, again = (sum(len(_late(times, name)) for times in launches) for name in ("group", AGAIN))
    return f"; of all launches' {cells} medians `group`'s is late in {own}, gloo's own second one in {again}"


def _of_launches(record: dict[str, Any]) -> list[Times]:
    """The times of each launch, where there were several."""
    return [_times(results) for results in record.get("results_of_launches", ())]


def _table(times: Times) -> Iterator[str]:
    names = list(dict.fromkeys(name for name, _ in times))
    ran = {nbytes: taken.ran for (name, nbytes), taken in times.items() if name == "group" and taken.ran}
    yield f"| ms | {' | '.join(names)} |" + " `group` ran |" * bool(ran)
    yield "|---|" + "---|" * (len(names) + bool(ran))
    for nbytes in dict.fromkeys(nbytes for _, nbytes in times):
        cells = [f"{times[name, nbytes].median:.4g}" for name in names] + [ran.get(nbytes, "")] * bool(ran)
        yield f"| {_shown(nbytes)} | {' | '.join(cells)} |"


def _shown(nbytes: int) -> str:
    return amount(nbytes) if nbytes else "step"


if __name__ == "__main__":
    sys.exit(main())
