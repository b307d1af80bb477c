"""The page docs/measurements/peers.md from the records: what each can do, and what it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labs import DISTURBED
from peers_cases import CASES, Case, started

PAGE = "peers.md"
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI", "none": "gloo"}
WHO = {
    "native": "{mpi}",
    "auto_uncompressed": "compcoll on {mpi}, uncompressed",
    "auto": "compcoll on {mpi}, `auto` with ZFP at rate 8",
    "gloo": "gloo",
    "group": "compcoll over gloo, `auto` with ZFP at rate 8",
    "fp16": "gloo, sums of halves, as PyTorch's hook",
}
OURS = ("auto_uncompressed", "auto")
OWN = ("native", "gloo")
"""The contenders that others of a run are compared with."""
ABILITIES = """\
| | compresses | all ranks get the same bits | keeps what is lost for the next step | where it adds up |
|---|---|---|---|---|
| compcoll | codecs and sparsifiers, inside the collective | always | yes | NumPy, PyTorch, CuPy; over MPI, gloo, NCCL |
| Open MPI, MPICH, Intel MPI | no | not promised | – | memory that MPI knows; not halves of NumPy |
| gloo | no | not promised | – | PyTorch's tensors, CPUs |
| PyTorch's `fp16`, `bf16` hooks | halves, which are added up as such | as the collective | no | gradients of DDP |
| PyTorch's `powersgd` hook | two factors of low rank | as the collective | yes | gradients of DDP |
| NCCL | no | not promised | – | GPUs: not measured, it needs one |
| another | by an [entry point](../benchmark.md#others-contenders) of ten lines | | | |"""
MIB = 1 << 20


class Records:
    """Everything that was measured."""

    def __init__(self, folder: Path) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        for case in CASES:
            path = folder / f"{case.name}.json"
            self._known[case.name] = json.loads(path.read_text()) if path.exists() else {"not_measured": "never run"}

    def missing(self, case: Case) -> str:
        """Why a case was not measured; empty if it was."""
        return str(self._known[case.name].get("not_measured", ""))

    def run(self, case: Case) -> dict[str, Any]:
        """What is known of a case's run."""
        return dict(self._known[case.name].get("run", {}))

    def others(self, case: Case) -> str:
        """What others used of the machine meanwhile."""
        percent = self._known[case.name]["others_percent"]
        return f"{percent:.0f} %: hints" if percent > DISTURBED else f"{percent:.0f} %"

    def results(self, case: Case) -> list[dict[str, Any]]:
        """The results of a case."""
        return list(self._known[case.name].get("results", []))


def write(folder: Path) -> None:
    """Write the page beside the folder of records."""
    records = Records(folder)
    lines = [*_head(records), "", "## What each can do", "", ABILITIES]
    for hosts, where in ((0, "Two ranks, one machine"), (4, "Four hosts, links of 1 Gb/s")):
        cases = [case for case in CASES if case.hosts == hosts]
        lines += ["", f"## {where}", "", "### Allreduce", "", *_allreduces(records, cases)]
        lines += ["", "### A step of DDP", "", *_steps(records, next(c for c in cases if c.name.startswith("ddp")))]
    lines += ["", "## Records", "", *_runs(records)]
    (folder.parent / PAGE).write_text("\n".join(lines) + "\n")


def _head(records: Records) -> list[str]:
    runs = [run for case in CASES if (run := records.run(case))]
    kinds = dict.fromkeys((run["cpu"], run["instruction_set"]) for run in runs)
    cores = {kind: max(run["cores"] for run in runs if (run["cpu"], run["instruction_set"]) == kind) for kind in kinds}
    machines = [f"{cpu}, {cores[cpu, instructions]} cores, {instructions}" for cpu, instructions in kinds]
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(str(run.get("commit", "")) for run in runs) if commit)
    return [
        "# Peers",
        "",
        "Made by `python launch/peers`. What runs on one MPI library takes turns in one run; libraries, and gloo",
        "without MPI, run one after the other. Hosts are [netlab](../launching/netlab.md)'s and share this machine's",
        "cores; MPI's TCP is tuned to full duplex. Where others used the machine meanwhile, times are hints, as the",
        f"records say. Machine: {'; '.join(machines) or 'none yet'}. Commit {commits or 'none yet'}.",
    ]


def _allreduces(records: Records, cases: list[Case]) -> Iterator[str]:
    """Milliseconds of each contender at each size, and times the library's own."""
    cases = [case for case in cases if not case.name.startswith("ddp")]
    sizes = sorted({result["size"] for case in cases for result in records.results(case)})
    yield "Median, ms (× the same library's own, or gloo's); where `auto` compresses, how many times fewer bytes it"
    yield "sends:"
    yield ""
    yield "| | " + " | ".join(map(_shown, sizes)) + " |"
    yield "|---|" + "---|" * len(sizes)
    for case in cases:
        if why := records.missing(case):
            yield f"| {NAMES[case.mpi]} | " + " | ".join([f"not measured: {why}"] + [""] * (len(sizes) - 1)) + " |"
            continue
        found = {(r["contender"], r["size"]): r for r in records.results(case)}
        names = [name for name in dict.fromkeys(name for name, _ in found) if name in WHO]
        first = next(name for name in names if name in OWN)
        for name in names:
            cells = [
                _cell(found[name, size], found[first, size]) if (name, size) in found else "not measured"
                for size in sizes
            ]
            yield f"| {WHO[name].format(mpi=NAMES[case.mpi])} | " + " | ".join(cells) + " |"


def _cell(result: dict[str, Any], native: dict[str, Any]) -> str:
    """Milliseconds, times the library's own (or gloo's), and the ratio of bytes where values were compressed."""
    ratio = result.get("ratio", 1.0)
    fewer = f", {ratio:.1f} × fewer bytes" if result["contender"] in OURS and ratio > 1.01 else ""
    return f"{result['median_us'] / 1e3:.3g} ({result['median_us'] / native['median_us']:.2f}){fewer}"


def _steps(records: Records, case: Case) -> Iterator[str]:
    """A training step of each way to average gradients."""
    if why := records.missing(case):
        yield f"Not measured: {why}."
        return
    results = records.results(case)
    yield f"A perceptron of {results[0]['parameters'] / 1e6:.3g} million parameters; medians, ms. Errors are the first"
    yield "step's: PowerSGD's first two are exact, and what ACP-SGD and codecs lose goes into the next one. Where that"
    yield "is faster, compcoll sends values as they are."
    yield ""
    yield "| | step | of it, communication that shows | MB sent | gloo / this | error of the gradients |"
    yield "|---|---|---|---|---|---|"
    for each in results:
        sent = "" if each["sent_megabytes"] is None else f"{each['sent_megabytes']:.1f}"
        yield (
            f"| `{each['contender']}` | {each['median_ms']:.1f} | {each['exposed_ms']:.1f} | {sent} | "
            f"{each['speedup']:.2f} | {each['error']:.1e} |"
        )


def _runs(records: Records) -> Iterator[str]:
    yield "| record | MPI | date | commit | load of others | command |"
    yield "|---|---|---|---|---|---|"
    for case in CASES:
        run = records.run(case)
        if not run:
            yield f"| {case.name} | {NAMES[case.mpi]} | | | | not measured: {records.missing(case)} |"
            continue
        by = run.get("mpi") or f"gloo of PyTorch {run['torch']}"
        under_torchrun = case.mpi == "none" and not case.hosts
        words = run["command"].removeprefix("python ") if under_torchrun else run["command"]
        link, commit = f"[{case.name}](peers/{case.name}.json)", f"`{run.get('commit', '')}`"
        yield (
            f"| {link} | {by} | {run['date'][:10]} | {commit} | {records.others(case)} | `{started(case)} {words}` |"
        )


def _shown(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
