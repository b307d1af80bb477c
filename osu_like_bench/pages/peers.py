"""The page peers.md: compcoll compared with Open MPI, MPICH, Intel MPI, gloo and PyTorch's hooks."""

from __future__ import annotations

from collections.abc import Iterator

from compcoll.tools.arguments import amount

from .documents import Page, machines, runs, table
from .records import TRAINING, Record, Row

NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI", "gloo": "gloo"}
"""Names of the libraries, by the end of a case's name."""
WHO = {
    "native": "{mpi}",
    "auto_uncompressed": "compcoll on {mpi}, uncompressed",
    "auto": "compcoll on {mpi}, `auto` with ZFP at rate 8",
    "gloo": "gloo",
    "group": "compcoll over gloo, `auto` with ZFP at rate 8",
    "fp16": "gloo, sums of halves, as PyTorch's hook",
}
OURS = ("auto_uncompressed", "auto")


def _allreduces(record: Record, where: str) -> Iterator[str]:
    """Yield a table of each contender's milliseconds at each size, and their ratio to the library's own."""
    cases = {mpi: record.cases[f"{where}-{end}"] for end, mpi in NAMES.items()}
    sizes = sorted({size for case in cases.values() for size in case.sizes})
    lines: list[list[str]] = []
    for mpi, case in cases.items():
        if not case.results:
            lines.append([mpi, f"not measured: {case.missing or 'never run'}", *[""] * (len(sizes) - 1)])
        for name in case.contenders:
            cells = (_cell(case.row(name, size), case.row(case.contenders[0], size)) for size in sizes)
            lines.append([WHO[name].format(mpi=mpi), *cells])
    yield from table(("", *map(amount, sizes)), lines)


def _cell(row: Row | None, own: Row | None) -> str:
    """Return a cell: milliseconds, their ratio to the library's own (or gloo's), and a compression ratio."""
    if row is None or own is None:
        return "not measured"
    ratio = row.get("ratio", 1.0)
    fewer = f", {ratio:.1f} × fewer bytes" if row["contender"] in OURS and ratio > 1.01 else ""
    return f"{row['median_us'] / 1e3:.3g} ({row['median_us'] / own['median_us']:.2f}){fewer}"


def _steps(record: Record, name: str) -> Iterator[str]:
    """Yield a table of training steps, one row for each way to average gradients."""
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


PAGES = (
    Page(
        "peers",
        {"machine": machines, "allreduces": _allreduces, "steps": _steps, "runs": runs},
        (*TRAINING, ":!compcoll/torch/optimizers"),
        (
            *("contender", "size", "median_us", "ratio"),
            *("median_ms", "exposed_ms", "sent_megabytes", "speedup", "error"),
        ),
        study=True,
    ),
)
