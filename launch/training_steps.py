#!/usr/bin/env python3
"""Training steps over slow links, and the backend's calls: docs/measurements/ddp.md, low-rank.md, and their records.

sudo .venv/bin/python launch/training_steps.py                       # everything, in some fifteen minutes
sudo .venv/bin/python launch/training_steps.py --only 'low-rank/*'   # these records again: the others stay
.venv/bin/python launch/training_steps.py --report                   # the pages again, from the records that are there

Labs of netlab need root; what runs on one machine (`ddp/*-memory`, `ddp/*-tcp`, `low-rank/work-*`) does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from labs import DISTURBED, LAUNCH, lab, measure, netlab

PAGES = Path("docs/measurements")
"""The pages' folder from the repository's root, where everything runs."""
LAB = "steps"
LONGEST = 600.0
"""Seconds of a run."""
PERCEPTRON = "ddp --threads 1 --parameters 25e6 --batch 1 --statistic median"
RESNET = "ddp --threads 1 --model resnet50 --statistic median"
ACPSGD, POWERSGD, HOOK = "acpsgd:rank=4", "powersgd:rank=4", "gloo+powersgd:rank=4"
ZFP, MINMAX = "compcoll+zfp:rate=8", "compcoll+minmax:bits=8"
BLOCKING, ASYNCHRONOUS, MPI = "inline", "async", "mpi4py"
"""Contenders of the benchmark."""

Record = dict[str, Any]
Results = dict[str, Record]
"""Of a record, by contender."""


class Goal(NamedTuple):
    """What is wanted, the figure that tells, its limit, and whether more is better."""

    text: str
    figure: Callable[[Results], float]
    limit: float
    more: bool

    def met(self, results: Results) -> bool:
        """Tell whether it is reached."""
        return self.figure(results) >= self.limit if self.more else self.figure(results) <= self.limit


@dataclass(frozen=True)
class Case:
    """A command that is measured, and its section of a page.

    Attributes
    ----------
    title, text : str
        For people.
    where : str
        What starts the ranks: a launcher's words, or hosts and a rate for netlab.
    words : str
        For osu_like_bench.
    goals : tuple of Goal
        What is expected of the figures.
    """

    title: str
    text: str
    where: str | tuple[int, str]
    words: str
    goals: tuple[Goal, ...] = ()

    @property
    def program(self) -> list[str]:
        """Words for Python."""
        calls = self.words.startswith("backends")
        return ["-m", *(f"osu_like_bench.{self.words}" if calls else f"osu_like_bench {self.words}").split()]

    @property
    def started(self) -> str:
        """The command, but for Python's words."""
        return self.where if isinstance(self.where, str) else f"launch/netlab run -n {self.where[0]} --"


def _faster(what: str, than: str, times: float) -> Goal:
    text = f"`{what}` ≥ {times:g} × as fast as `{than}`"
    return Goal(text, lambda results: results[than]["median_ms"] / results[what]["median_ms"], times, True)


def _less_work(what: str, than: str, most: float) -> Goal:
    text = f"`{what}` compresses in ≤ {most:g} of what `{than}` takes"

    def share(results: Results) -> float:
        own_copies = results["gloo"]["exposed_ms"] if than.startswith("gloo") else 0.0
        return float(results[what]["exposed_ms"] / (results[than]["exposed_ms"] - own_copies))

    return Goal(text, share, most, False)


def _over(contender: str, most: float) -> Goal:
    text = f"`{contender}` ≤ {most:g} µs over `{MPI}`"
    return Goal(text, lambda results: results[contender]["median_us"] - results[MPI]["median_us"], most, False)


def _at_most(contender: str, than: str, times: float) -> Goal:
    text = f"`{contender}` ≤ {times:g} × `{than}`"
    return Goal(text, lambda results: results[contender]["median_us"] / results[than]["median_us"], times, False)


_FOUR, _TWO = (4, "1gbit"), (2, "10gbit")
_MPIRUN = "launch/mpirun -n 2"
_TCP = f"{_MPIRUN} --mca pml ob1 --mca btl tcp,self"
CASES: dict[str, Case] = {
    "ddp/1g-4hosts": Case(
        "4 hosts, 1 Gb/s",
        "",
        _FOUR,
        f"{PERCEPTRON} -x 1 -i 6 --compare gloo,{ZFP},{MINMAX}",
        (_faster(ZFP, "gloo", 2.5),),
    ),
    "ddp/1g-4hosts-no-feedback": Case(
        "The same without feedback",
        "",
        _FOUR,
        f"{PERCEPTRON} -x 1 -i 6 --no-feedback --compare gloo,{ZFP},{MINMAX}",
    ),
    "ddp/10g-2hosts": Case(
        "2 hosts, 10 Gb/s",
        "`compcoll` without a codec is exact.",
        _TWO,
        f"{PERCEPTRON} -x 1 -i 6 --compare gloo,gloo+fp16,compcoll,{ZFP},{MINMAX}",
        tuple(_faster(name, "gloo", 1) for name in ("compcoll", ZFP, MINMAX)),
    ),
    "ddp/latency-memory": Case(
        "Calls of the backend: 4 bytes, one node",
        "`inline` is a blocking `dist.all_reduce`, `async` one that is waited for afterwards.",
        _MPIRUN,
        "backends -m 4:4 -x 500 -i 6000 --time-cap 2 --compare mpi4py,inline,async",
        (_over(BLOCKING, 10), _over(ASYNCHRONOUS, 30)),
    ),
    "ddp/large-memory": Case(
        "25 MiB, one node",
        "",
        _MPIRUN,
        "backends -m 25M -x 3 -i 40 --time-cap 3 --compare mpi4py,inline,async",
        (_at_most(BLOCKING, MPI, 1.05), _at_most(ASYNCHRONOUS, MPI, 1.05)),
    ),
    "ddp/latency-tcp": Case(
        "4 bytes, MPI over TCP",
        "",
        _TCP,
        "backends -m 4:4 -x 100 -i 2000 --time-cap 2",
        (_over(BLOCKING, 10), _over(ASYNCHRONOUS, 30), _at_most(ASYNCHRONOUS, "gloo", 1)),
    ),
    "ddp/large-tcp": Case(
        "25 MiB, MPI over TCP",
        "These do not take TCP: inside a node exact sums go through shared memory, whatever MPI does.",
        _TCP,
        "backends -m 25M -x 2 -i 20 --time-cap 2",
        (_at_most(ASYNCHRONOUS, "gloo", 1),),
    ),
    "low-rank/1g-4hosts": Case(
        "4 hosts, 1 Gb/s, 25 million parameters",
        "One example a rank, so that communication dominates.",
        _FOUR,
        f"{PERCEPTRON} -x 1 -i 6 --compare gloo,{HOOK},{ACPSGD}",
        (_faster(ACPSGD, "gloo", 5), _faster(ACPSGD, HOOK, 1.4)),
    ),
    "low-rank/1g-ablation": Case(
        "What overlap and fusion do",
        "`overlap=False` sends after back-propagation, `buffer_mb=0` every tensor on its own; `ddp=True` is a hook of "
        "DistributedDataParallel, which copies every gradient into its buckets.",
        _FOUR,
        f"{PERCEPTRON} -x 1 -i 8 --compare "
        f"{ACPSGD},{ACPSGD}:overlap=False,{ACPSGD}:buffer_mb=0,{ACPSGD}:ddp=True,{POWERSGD}",
    ),
    "low-rank/1g-resnet50": Case(
        "ResNet-50's shapes",
        "161 tensors; back-propagation sleeps for 200 ms and the forward pass for 100.",
        _FOUR,
        f"{RESNET} --backward 200 -x 0 -i 4 --compare gloo,{ACPSGD},{ACPSGD}:overlap=False,{ACPSGD}:buffer_mb=0",
    ),
    "low-rank/1g-buffers": Case(
        "The same by the size of fusion buffers",
        "In MiB of uncompressed gradients, which are 98 MiB in all: the last three are one buffer.",
        _FOUR,
        f"{RESNET} --backward 200 -x 0 -i 4 --compare "
        + ",".join(f"{ACPSGD}:buffer_mb={size}" for size in (0, 1, 5, 25, 100, 500, 1500)),
    ),
    "low-rank/1g-ranks": Case(
        "And by rank",
        "",
        _FOUR,
        f"{RESNET} --backward 200 -x 0 -i 4 --compare "
        + ",".join(["gloo", *(f"acpsgd:rank={rank}" for rank in (1, 2, 4, 8, 16, 32)), POWERSGD, "powersgd:rank=32"]),
    ),
    "low-rank/1g-right-factors": Case(
        "Right factors at once",
        "`PowerSGD` sends each buffer's right factors as soon as the mean of the left ones has come; `powersgd-late` "
        "is the same but for all right factors leaving when back-propagation has ended.",
        _FOUR,
        f"{RESNET} --backward 200 -x 1 -i 8 --compare "
        "powersgd-late:rank=4,powersgd:rank=4,powersgd-late:rank=32,powersgd:rank=32",
    ),
    "low-rank/10g-2hosts": Case(
        "2 hosts, 10 Gb/s",
        "`ssgd` is exact gradients by compcoll's hooks.",
        _TWO,
        f"{PERCEPTRON} -x 1 -i 8 --compare gloo,ssgd,{HOOK},{POWERSGD},{ACPSGD}",
        (_faster(ACPSGD, "gloo", 1), _faster(POWERSGD, "gloo", 1)),
    ),
    "low-rank/work-perceptron": Case(
        "Work: 25 million parameters",
        "One rank: nothing is sent, so that *exposed* is compression, and with gloo DistributedDataParallel's own "
        "copies.",
        "launch/mpirun -n 1",
        f"{PERCEPTRON} -x 0 -i 10 --compare gloo,{HOOK},{POWERSGD},{ACPSGD}",
        (_less_work(ACPSGD, HOOK, 0.5), _less_work(ACPSGD, POWERSGD, 0.5)),
    ),
    "low-rank/work-resnet50": Case(
        "Work: ResNet-50's shapes",
        "",
        "launch/mpirun -n 1",
        f"{RESNET} --backward 0 -x 0 -i 10 --compare gloo,{HOOK},{POWERSGD},{ACPSGD}",
        (_less_work(ACPSGD, HOOK, 0.5), _less_work(ACPSGD, POWERSGD, 0.5)),
    ),
}
"""By the record's name, whose folder is the page."""

HEADS = {
    "ddp": (
        "# Training steps of DistributedDataParallel",
        "",
        "Made by `python launch/training_steps.py --only 'ddp/*'`. A perceptron of 25 million parameters, one example",
        "a rank, buckets of 25 MB, medians in milliseconds, contenders in turns",
        "([columns](../benchmark.md#training-steps)). Hosts are [netlab](../launching/netlab.md)'s, which share this",
        "machine's cores, one thread a rank. What codecs cost in accuracy: [digits](study.md), [text](study-text.md).",
    ),
    "low-rank": (
        "# Low rank, measured",
        "",
        "Made by `python launch/training_steps.py --only 'low-rank/*'`. Medians in milliseconds, contenders in turns",
        "([columns](../benchmark.md#training-steps)). Hosts are [netlab](../launching/netlab.md)'s, which share this",
        "machine's cores, one thread a rank. All results agree between ranks bit by bit. PyTorch's `powerSGD_hook`",
        "(`gloo+powersgd`) gets a single bucket, so that nothing of it overlaps: with several it crashes on gloo.",
        "`acpsgd` and `powersgd` are `compcoll.torch.ACPSGD` and `PowerSGD`. [Accuracy](../low-rank.md#what-it-loses).",
        "",
        "Not measured: GPUs and NCCL (ResNets and BERTs on them are [simulated](scaling.md)); PyTorch's batched hook,",
        "which fails on CPUs in torch 2.13; BERT's shapes between processes.",
    ),
}


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
    missed = sum(_write(page) for page in HEADS)
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
    yield from _steps(results) if case.words.startswith("ddp") else _calls(results)
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
        shown = " | ".join("" if cell is None else f"{cell:.0f}" if cell >= 100 else f"{cell:.1f}" for cell in cells)
        yield f"| `{name}` | {shown} | {'' if sent is None else f'{sent:.1f}'} | {times:.2f} |"


def _calls(results: Results) -> Iterator[str]:
    yield "| | " + " | ".join(f"`{name}`" for name in results) + " |"
    yield "|---|" + "---|" * len(results)
    yield "| µs | " + " | ".join(f"{each['median_us']:.4g}" for each in results.values()) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
