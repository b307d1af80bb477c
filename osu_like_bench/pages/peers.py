"""compcoll beside Open MPI, MPICH, Intel MPI, gloo and PyTorch's hooks: peers.md."""

from __future__ import annotations

from collections.abc import Iterator

from .documents import DISTURBED, MIB, Page, machine, table
from .records import Case, Record, Row
from .stale import TRAINING

NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI", "gloo": "gloo"}
"""By the end of a case's name."""
WHO = {
    "native": "{mpi}",
    "auto_uncompressed": "compcoll on {mpi}, uncompressed",
    "auto": "compcoll on {mpi}, `auto` with ZFP at rate 8",
    "gloo": "gloo",
    "group": "compcoll over gloo, `auto` with ZFP at rate 8",
    "fp16": "gloo, sums of halves, as PyTorch's hook",
}
OURS = ("auto_uncompressed", "auto")


def _machine(record: Record) -> Iterator[str]:
    measured = record.measured().values()
    with_most_cores = {(case.run["cpu"], case.run["instruction_set"]): case for case in sorted(measured, key=_cores)}
    machines = "; ".join(map(machine, with_most_cores.values()))
    commits = ", ".join(dict.fromkeys(f"`{case.run['commit']}`" for case in measured if case.run.get("commit")))
    yield f"Machine: {machines or 'none yet'}. Commit {commits or 'none yet'}."


def _cores(case: Case) -> int:
    return int(case.run["cores"])


def _allreduces(record: Record, where: str) -> Iterator[str]:
    """Milliseconds of each contender at each size, and times the library's own."""
    cases = {mpi: record.cases[f"{where}-{end}"] for end, mpi in NAMES.items()}
    sizes = sorted({size for case in cases.values() for size in case.sizes})
    lines: list[list[str]] = []
    for mpi, case in cases.items():
        if not case.results:
            lines.append([mpi, f"not measured: {case.missing or 'never run'}", *[""] * (len(sizes) - 1)])
        for name in case.contenders:
            cells = (_cell(case.row(name, size), case.row(case.contenders[0], size)) for size in sizes)
            lines.append([WHO[name].format(mpi=mpi), *cells])
    yield from table(("", *(f"{n // MIB} MiB" if n >= MIB else f"{n // 1024} KiB" for n in sizes)), lines)


def _cell(row: Row | None, own: Row | None) -> str:
    """Milliseconds, times the library's own (or gloo's), and the ratio of bytes where values were compressed."""
    if row is None or own is None:
        return "not measured"
    ratio = row.get("ratio", 1.0)
    fewer = f", {ratio:.1f} × fewer bytes" if row["contender"] in OURS and ratio > 1.01 else ""
    return f"{row['median_us'] / 1e3:.3g} ({row['median_us'] / own['median_us']:.2f}){fewer}"


def _steps(record: Record, name: str) -> Iterator[str]:
    """A training step of each way to average gradients."""
    case = record.cases[name]
    if not case.results:
        yield f"Not measured: {case.missing or 'never run'}."
        return
    lines = (
        (
            f"`{each['contender']}`",
            f"{each['median_ms']:.1f}",
            f"{each['exposed_ms']:.1f}",
            f"{each['sent_megabytes']:.1f}" if "sent_megabytes" in each else "",
            f"{each['speedup']:.2f}",
            f"{each['error']:.1e}",
        )
        for each in case.results
    )
    head = ("step", "of it, communication that shows", "MB sent", "gloo / this", "error of the gradients")
    yield from table(("", *head), lines)


def _runs(record: Record) -> Iterator[str]:
    lines = (
        (name, *(_run(case) if case.results else ("", "", "", "", f"not measured: {case.missing or 'never run'}")))
        for name, case in record.cases.items()
    )
    yield from table(("record", "MPI", "date", "commit", "load of others", "command"), lines)


def _run(case: Case) -> tuple[str, ...]:
    run, others = case.run, case.others_percent or 0.0
    load = f"{others:.0f} %" + ": hints" * (others > DISTURBED)
    software = run.get("mpi") or f"gloo of PyTorch {run['torch']}"
    return software, run["date"][:10], f"`{run['commit']}`", load, f"`{case.command}`"


PAGES = (
    Page(
        "peers",
        {"machine": _machine, "allreduces": _allreduces, "steps": _steps, "runs": _runs},
        (*TRAINING, ":!compcoll/torch/optimizers"),
        (
            *("contender", "size", "median_us", "ratio"),
            *("median_ms", "exposed_ms", "sent_megabytes", "speedup", "error"),
        ),
    ),
)
