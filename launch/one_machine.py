"""What one machine takes: docs/measurements/one-machine.md and selection.md, and their records.

python launch/one_machine.py                               # everything, in some six minutes
python launch/one_machine.py --only codecs,2-ranks         # these records again: the others stay as they are
python launch/one_machine.py --report                      # the pages again, from the records that are there
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from labs import DISTURBED, LAUNCH, finish, measure
from netlab_load import LoadMeter

from compcoll.tools.arguments import amount

PAGES = Path("docs/measurements")
"""The pages' folder from the repository's root, where everything runs: no record names this machine's folders."""
GRADIENTS = Path("build/gradients.npy")
TRAINING = f"launch/train_ddp.py --threads 1 --task text --steps 50 --gradients {GRADIENTS}"
LONGEST = 600.0
"""Seconds of a run."""
_SELECTION = "selection -m 64K:{largest} --data {data} -x 1 --time-cap 0.1"
CASES: dict[str, tuple[int, str]] = {
    "one-machine/codecs": (1, "codecs --size 32M"),
    "one-machine/4-ranks": (
        4,
        "allreduce -m 4:128M --codec zfp --rate 8 --compare native,shared_memory,ring,direct,p2p --time-cap 0.5",
    ),
    "one-machine/2-ranks": (
        2,
        "allreduce -m 4:64M --codec none --compare native,auto,shared_memory -i 2000 --time-cap 0.5",
    ),
    "selection/normal": (1, _SELECTION.format(largest="256M", data="normal")),
    "selection/laplace": (1, _SELECTION.format(largest="256M", data="laplace")),
    "selection/gradients": (1, _SELECTION.format(largest="2M", data=GRADIENTS)),
}
"""Ranks, and words for osu_like_bench, by the record's name."""

KERNELS = {
    "zfp rate=8": "zfp, 8 bits a value",
    "zfp rate=16": "zfp, 16 bits",
    "minmax bits=8": "minmax, 8 bits",
    "cast float16": "cast to float16",
    "cast bfloat16": "cast to bfloat16",
    "fp8": "fp8",
    "qsgd bits=4": "qsgd, 4 bits",
    "onebit": "onebit",
}
RIVALS = ("zfpy", "numpy", "torch")
FOUR_RANKS = {
    "native": "MPI's own",
    "shared_memory": "shared memory",
    "ring": "ring, zfp",
    "direct": "direct, zfp",
    "p2p_ring": "naive ring, zfp",
}
TWO_RANKS = {"native": "MPI's own", "auto": "`auto`, not tuned, and what it ran", "shared_memory": "shared memory"}
METHODS = ("copy", "read", "ldte", "hierarchical", "exact", "trimmed", "bisection", "strom", "randomk")
SELECTORS = METHODS[2:7]
LIBRARIES = {"argpartition": "argpartition", "topk": "torch.topk"}

Record = dict[str, Any]


def main(words: Sequence[str]) -> int:
    """The exit status: 1 if something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {name.partition("/")[2]: name for name in CASES}
    parser.add_argument("--only", default=",".join(names), metavar="NAMES", help="records (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args(words)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    os.chdir(LAUNCH.parent)
    failed = [] if options.report else [name for name in chosen if not _measured(names[name])]
    _write("one-machine", _one_machine)
    _write("selection", _selection)
    for name in failed:
        print(f"one_machine: {name} could not be measured", file=sys.stderr)
    return 1 if failed else 0


def _measured(name: str) -> bool:
    """Measure a case and keep its record; False if it failed."""
    ranks, words = CASES[name]
    if str(GRADIENTS) in words:
        trained = [sys.executable, str(LAUNCH / "mpirun"), "-n", "2", "python", *TRAINING.split()]
        if finish(trained, os.environ, LONGEST, LoadMeter()):
            return False
    path = PAGES / f"{name}.json"
    started = ["python", "-m", "osu_like_bench", *words.split(), "--json", str(path)]
    if ranks > 1:
        started = [str(LAUNCH / "mpirun"), "-n", f"{ranks}", *started, "--statistic", "median"]
    print(f"one_machine: {name}", flush=True)
    if measure([sys.executable, *started[ranks == 1 :]], path, LONGEST):
        return False
    if name == "one-machine/4-ranks":
        drawn = ["-m", "osu_like_bench", "plot", str(path), "-o", str(path.with_suffix(".png"))]
        subprocess.run([sys.executable, *drawn], check=True)
    return True


def _write(page: str, lines: Callable[[dict[str, Record]], Iterator[str]]) -> None:
    """Write a page, if all of its records are there."""
    paths = {name: PAGES / f"{name}.json" for name in CASES if name.startswith(f"{page}/")}
    if all(path.exists() for path in paths.values()):
        records = {name.partition("/")[2]: json.loads(path.read_text()) for name, path in paths.items()}
        (PAGES / f"{page}.md").write_text("\n".join(lines(records)) + "\n")


def _about(name: str, record: Record) -> Iterator[str]:
    """The command, machine, date and commit of a record."""
    run = record["run"]
    ranks = CASES[name][0]
    yield ""
    yield "```sh"
    yield f"launch/mpirun -n {ranks} {run['command']}" if ranks > 1 else str(run["command"])
    yield "```"
    yield ""
    yield (
        f"{run['cpu']}, {run['cores']} cores, {run['instruction_set']}, {run.get('mpi', 'one process')}, "
        f"{run['date'][:10]}, commit `{run['commit']}`; others used {record['others_percent']:.0f} %"
    )
    yield "of the machine: **hints**." if record["others_percent"] > DISTURBED else "of the machine."
    yield f"[All figures]({name}.json)."
    yield ""


def _one_machine(records: dict[str, Record]) -> Iterator[str]:
    yield "# One machine"
    yield ""
    yield "Made by `python launch/one_machine.py`."
    yield ""
    yield "## Codec kernels"
    yield ""
    yield "One thread on 32 MiB of normal values, GB/s of uncompressed bytes; in turns with a copy of as many bytes"
    yield "(memcpy), and with zfpy's, NumPy's or PyTorch's own way, of which the fastest counts."
    yield from _about("one-machine/codecs", records["codecs"])
    yield "| | encode | decode | decode and add | encode × fastest other | decode and add × fastest other |"
    yield "|---|---|---|---|---|---|"
    rows = {(r["codec"], r["operation"]): r for r in records["codecs"]["results"] if r["implementation"] not in RIVALS}
    for codec, shown in KERNELS.items():
        encode, decode, add = (rows[codec, operation] for operation in ("encode", "decode", "accumulate"))
        yield (
            f"| {shown} | {encode['throughput']:.1f} ({encode['versus']['memcpy']:.2f} × memcpy) "
            f"| {decode['throughput']:.1f} | {add['throughput']:.1f} ({add['versus']['memcpy']:.2f} × memcpy) "
            f"| {_against(encode)} | {_against(add)} |"
        )
    yield ""
    yield "PyTorch adds halves by way of a float32 copy; where malloc happens to have kept that copy's memory, it takes"
    yield "a fifth of the time: see [benchmark.md](../benchmark.md#codecs)."
    yield ""
    yield "## Allreduces"
    yield ""
    yield "Four ranks that share two cores and one memory, zfp at 8 bits, median µs. There is no network here: what"
    yield "pays is not to compress, and to go through shared memory. Ring and direct show what compression costs;"
    yield "*naive* compresses inside send and receive."
    yield from _about("one-machine/4-ranks", records["4-ranks"])
    yield from _allreduces(records["4-ranks"], FOUR_RANKS, (16, 20, 22, 24, 26, 27))
    yield ""
    yield "![allreduce on four ranks of one machine: time and gain over size](one-machine/4-ranks.png)"
    yield ""
    yield "Uncompressed on two ranks, median µs. `auto` takes MPI's own in the middle, for some µs more, until `tune`"
    yield "has measured shared memory: which is faster depends on whether the cores have a cache in common."
    yield from _about("one-machine/2-ranks", records["2-ranks"])
    yield from _allreduces(records["2-ranks"], TWO_RANKS, (2, 10, 12, 14, 16, 17, 18, 20, 22, 23, 24, 26))


def _against(row: Record) -> str:
    """Times the throughput of the fastest other implementation."""
    others = {name: times for name, times in row["versus"].items() if name in RIVALS}
    fastest = min(others, key=lambda name: others[name], default="")
    return f"{others[fastest]:.3g} × {fastest}" if fastest else ""


def _allreduces(record: Record, names: dict[str, str], powers: Sequence[int]) -> Iterator[str]:
    """A line for each size; `auto` with what it ran."""
    rows = {(result["contender"], result["size"]): result for result in record["results"]}
    yield f"| | {' | '.join(names.values())} |"
    yield "|---|" + "---|" * len(names)
    for size in (1 << power for power in powers):
        cells = [
            f"{_digits(rows[name, size]['median_us'])}" + f" {rows[name, size]['algorithm']}" * (name == "auto")
            for name in names
        ]
        yield f"| {amount(size)} | {' | '.join(cells)} |"


def _selection(records: dict[str, Record]) -> Iterator[str]:
    yield "# Selecting the largest elements"
    yield ""
    yield "Made by `python launch/one_machine.py --only normal,laplace,gradients`: one thread, float32, density 0.1 %."
    yield "Microseconds: medians of runs in turns, whose order is drawn anew, so that each method finds in the caches"
    yield "what others left there; means over 8 buffers of up to 2 MiB, 4 of 4 and 2 of 8 MiB, since a selector can be"
    yield "lucky with one. `copy`: memory to memory; `read`: one pass that counts; `strom`: a known threshold. Bold:"
    yield "the fastest of the selectors."
    wrong = sum(result["wrong"] for record in records.values() for result in record["results"])
    yield f"Every choice was checked: {wrong or 'none'} {'were' if wrong > 1 else 'was'} wrong."
    titles = {"normal": "Normal values", "laplace": "Laplacian values", "gradients": "Gradients of the small GPT"}
    for name, title in titles.items():
        yield from ("", f"## {title}")
        if name == "gradients":
            yield ""
            yield "The mean gradients of 875264 parameters after 50 steps, stretches of them as far as a size needs, by"
            yield f"`mpirun -n 2 python {TRAINING}`."
        yield from _about(f"selection/{name}", records[name])
        yield from _choices(records[name])
    yield from ("", "## Goals", "")
    yield from _goals(records)


def _times(record: Record) -> dict[tuple[str, int], float]:
    return {(result["method"], result["size"]): result["median_us"] for result in record["results"]}


def _choices(record: Record) -> Iterator[str]:
    times = _times(record)
    names = [f"`{name}`" for name in (*METHODS, *LIBRARIES.values())]
    yield f"| | {' | '.join(names)} | `ldte` × copy | `exact` × argpartition | × torch.topk |"
    yield "|---|" + "---|" * (len(names) + 3)
    for size in dict.fromkeys(size for _, size in times):
        fastest = min(SELECTORS, key=lambda name: times[name, size])
        cells = [
            f"**{_digits(times[name, size])}**" if name == fastest else _digits(times[name, size])
            for name in (*METHODS, *LIBRARIES)
        ]
        ratios = [times["copy", size] / times["ldte", size]]
        ratios += [times[name, size] / times["exact", size] for name in LIBRARIES]
        yield f"| {amount(size)} | {' | '.join(cells)} | {ratios[0]:.2f} | {ratios[1]:.1f} | {ratios[2]:.1f} |"


def _goals(records: dict[str, Record]) -> Iterator[str]:
    size = 32 << 20
    both = [_times(records[name]) for name in ("normal", "laplace")]
    for library, goal in (("argpartition", 10), ("topk", 40)):
        gains = [times[library, size] / times["exact", size] for times in both]
        yield _goal(f"32 MiB, exact against `{LIBRARIES[library]}`, at least {goal} ×", gains, goal)
    gains = [times["copy", size] / times["ldte", size] for times in both]
    yield _goal("32 MiB, `ldte` at least 0.5 of a copy", gains, 0.5)
    slower = [
        f"{amount(size)} of {name}"
        for name, record in records.items()
        for times in [_times(record)]
        for size in dict.fromkeys(size for _, size in times)
        if size > 64 << 10 and times["ldte", size] > min(times[other, size] for other in SELECTORS)
    ]
    told = f"missed at {', '.join(slower)}" if slower else "met"
    yield f"* `ldte` faster than every other selector above 64 KiB: {told}."


def _goal(text: str, gains: Sequence[float], least: float) -> str:
    seen = " and ".join(f"{gain:.3g}" for gain in gains)
    return f"* {text}: {seen} (normal, Laplacian): {'met' if min(gains) >= least else 'missed'}."


def _digits(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}".replace(",", " ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
