#!/usr/bin/env python3
"""Training steps over slow links, and the backend's calls: docs/measurements/ddp.md, low-rank.md, local-steps.md.

sudo .venv/bin/python launch/training_steps.py                       # everything, in half an hour
sudo .venv/bin/python launch/training_steps.py --only 'low-rank/*'   # these records again: the others stay
.venv/bin/python launch/training_steps.py --report                   # the pages again, from the records that are there

Labs of netlab need root; what runs on one machine (`ddp/*-memory`, `ddp/*-tcp`, `low-rank/work-*`) does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path

from labs import DISTURBED, LAUNCH, lab, measure, netlab
from training_steps_cases import ALONE, CASES, DDP, DILOCO, HEADS, RATE, SPEED, Case, Record, Results

PAGES = Path("docs/measurements")
"""The pages' folder from the repository's root, where everything runs."""
LAB = "steps"
LONGEST = 600.0
"""Seconds of a run."""


def main(words: Sequence[str]) -> int:
    """The exit status: 1 if something could not be measured, or a goal is missed."""
    parser = argparse.ArgumentParser(
        "training_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PATTERNS", default="*", help="names or patterns of records, with commas")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args(words)
    chosen = [name for name in CASES if any(fnmatchcase(name, each) for each in options.only.split(","))]
    if not chosen:
        parser.error(f"--only {options.only}: there are {', '.join(CASES)}")
    os.chdir(LAUNCH.parent)
    failed = [] if options.report else [name for name in chosen if not _measured(name)]
    pages = {name.split("/")[0] for name in chosen}
    missed = sum(_write(page) for page in HEADS if page in pages)
    for name in failed:
        print(f"training_steps: {name} could not be measured", file=sys.stderr)
    return 1 if failed or missed else 0


def _measured(name: str) -> bool:
    """Measure a case and keep its record; False if it failed."""
    case, path = CASES[name], PAGES / f"{name}.json"
    words = [*case.program, "--json", str(path)]
    print(f"training_steps: {name}", flush=True)
    if isinstance(case.where, str):
        launcher, *given = case.where.split()
        return not measure([sys.executable, launcher, *given, "python", *words], path, LONGEST)
    hosts, rate = case.where
    with lab(LAB, hosts, "--rate", rate) if os.geteuid() == 0 else nullcontext():
        return not measure(netlab("run", "--name", LAB, "-n", str(hosts), "--", "python", *words), path, LONGEST)


def _write(page: str) -> int:
    """Write a page of the records that are there, and return how many goals are missed."""
    lines, missed = [*HEADS[page]], 0
    for name, case in CASES.items():
        path = PAGES / f"{name}.json"
        if name.startswith(f"{page}/") and path.exists():
            record = json.loads(path.read_text())
            lines += _section(name, case, record)
            missed += sum(not goal.met(_results(record)) for goal in case.goals)
    (PAGES / f"{page}.md").write_text("\n".join(lines) + "\n")
    return missed


def _results(record: Record) -> Results:
    return {result["contender"]: result for result in record["results"]}


def _section(name: str, case: Case, record: Record) -> Iterator[str]:
    """A section of a page: the command, the machine, the table, and the goals."""
    run, others, results = record["run"], record["others_percent"], _results(record)
    yield from ("", f"## {case.title}", "")
    if case.text:
        yield from (case.text, "")
    yield "```sh"
    if not isinstance(case.where, str):
        hosts, rate = case.where
        yield f"launch/netlab up --hosts {hosts} --rate {rate}"
    yield f"{case.started} python {' '.join(case.program)}".replace(" --compare", " \\\n    --compare")
    yield from ("```", "")
    yield from _TABLES[case.words.split()[0]](results)
    yield ""
    for goal in case.goals:
        yield f"- {goal.text}: {goal.figure(results):.3g}, {'met' if goal.met(results) else '**missed**'}."
    if case.goals:
        yield ""
    hints = ": **hints**" if others > DISTURBED else ""
    yield (
        f"{run['cpu']}, {run['cores']} cores, {run['instruction_set']}, "
        f"{run.get('mpi') or 'torch ' + run['torch']}, {run['date'][:10]}, "
        f"commit `{run['commit']}`; others used {others:.0f} % of the machine{hints}. [Figures]({name}.json)."
    )


def _steps(results: Results) -> Iterator[str]:
    first = next(iter(results.values()))
    yield f"| | step | compute | exposed | communication | codec | MB sent | `{first['contender']}` / this |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, each in results.items():
        cells = (each[key] for key in ("median_ms", "compute_ms", "exposed_ms", "communication_ms", "codec_ms"))
        sent, times = each["sent_megabytes"], first["median_ms"] / each["median_ms"]
        shown = " | ".join(_ms(cell) for cell in cells)
        yield f"| `{name}` | {shown} | {'' if sent is None else f'{sent:.1f}'} | {times:.2f} |"


def _ms(taken: float | None) -> str:
    return "" if taken is None else f"{taken:.0f}" if taken >= 100 else f"{taken:.1f}"


def _calls(results: Results) -> Iterator[str]:
    yield "| | " + " | ".join(f"`{name}`" for name in results) + " |"
    yield "|---|" + "---|" * len(results)
    yield "| µs | " + " | ".join(f"{each['median_us']:.4g}" for each in results.values()) + " |"


def _rates(results: Results) -> Iterator[str]:
    yield f"| | mean step, ms | examples a second | × `{DDP}` | of `{ALONE}` |"
    yield "|---|---|---|---|---|"
    for name, each in results.items():
        rate = each[RATE]
        times, share = rate / results[DDP][RATE], 100 * rate / results[ALONE][RATE]
        yield f"| `{name}` | {_ms(each['mean_ms'])} | {rate:.3g} | {times:.3g} | {share:.3g} % |"
    median, mean = (results[DILOCO][f"under_way_{how}"] for how in ("median", "mean"))
    yield from ("", f"A step with an average under way takes {median:.3f} × one without (mean {mean:.3f} ×).")


_TABLES: Mapping[str, Callable[[Results], Iterator[str]]] = {
    "ddp": _steps,
    "backends": _calls,
    SPEED: _rates,
}
"""By a case's first word."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
