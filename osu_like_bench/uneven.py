"""allgatherv: contributions of unlike lengths, compcoll's and MPI's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from compcoll.collectives import choose
from compcoll.dtypes import DTYPES

from . import data
from .cases import Ranks
from .errors import UsageError
from .report import STATISTICS, Progress, Record, Table
from .sweep import Settings
from .timing import Times, measure

SPREADS: Mapping[str, Callable[[int, int], list[int]]] = {
    "equal": lambda length, p: [length] * p,
    "linear": lambda length, p: [2 * length * (rank + 1) // (p + 1) for rank in range(p)],
    "one": lambda length, p: [length * p] + [0] * (p - 1),
}
"""Elements of each rank for a mean length: all alike; growing with the rank; rank 0 has all."""


def head(settings: Settings, spread: str, ranks: Ranks, run: dict[str, Any]) -> list[str]:
    """The lines above the table."""
    return [
        f"# OSU-style Allgatherv Latency Test, compcoll {run['compcoll']}",
        f"# {ranks.comm.size} ranks on {ranks.nodes} node{'s' * (ranks.nodes > 1)}, {run['mpi']}, {run['cpu']}",
        f"# no codec, {settings.dtype}, contributions {spread}; size in bytes: mean over the ranks",
    ]


def run(settings: Settings, spread: str, ranks: Ranks, table: Table, progress: Progress) -> list[Record]:
    """Measure all contenders at all sizes, and compare every result with MPI's, bit by bit.

    Parameters
    ----------
    settings : Settings
        What to measure; sizes are means over the ranks.
    spread : str
        One of `SPREADS`.
    ranks, table, progress
        As of `sweep.run`.
    """
    if settings.codec is not None:
        raise UsageError("allgatherv is measured without a codec: contributions are sparse wires as a rule")
    comm, dtype = ranks.comm, DTYPES[settings.dtype].numpy
    records: list[Record] = []
    for size in settings.sizes:
        counts = SPREADS[spread](size // dtype.itemsize, comm.size)
        x = data.make(settings.data, counts[comm.rank], settings.dtype, (settings.seed, comm.rank))
        expected = np.empty(sum(counts), dtype)
        as_bytes = [count * dtype.itemsize for count in counts]

        def native(x: Any = x, expected: Any = expected, as_bytes: Any = as_bytes) -> Any:
            comm.Allgatherv(x.view(np.uint8), [expected.view(np.uint8), as_bytes])
            return expected

        def own(name: str, x: Any = x) -> Callable[[], Any]:
            return lambda: ranks.compcoll.allgatherv(x, codec=None, algorithm=name)

        runners = [native if name == choose.NATIVE else own(name) for name in settings.contenders]
        progress.step(f"{size} bytes")
        times = measure(runners, settings.limits(size), barrier=comm.Barrier, slowest=ranks.largest)
        native()
        rows = []
        for name, runner, taken in zip(settings.contenders, runners, times, strict=True):
            wrong = int(np.count_nonzero(runner().view(np.uint8) != expected.view(np.uint8)))
            rows.append(_record(settings, ranks, name, size, expected.nbytes, comm.allreduce(wrong), taken, times[0]))
        progress.print(*table.rows(rows))
        records += rows
    return records


def _record(
    settings: Settings, ranks: Ranks, name: str, size: int, total: int, wrong: int, taken: Times, first: Times
) -> Record:
    p, algbw = ranks.comm.size, total / taken.mean / 1e9
    stats = None if name == choose.NATIVE else ranks.compcoll.stats
    return Record(
        collective="allgatherv",
        size=size,
        total_bytes=total,
        dtype=settings.dtype,
        op="",
        data=settings.data,
        ranks=p,
        nodes=ranks.nodes,
        contender=name,
        algorithm=name if stats is None else stats.algorithm,
        codec=None,
        **{STATISTICS[each][1]: getattr(taken, each) * 1e6 for each in STATISTICS},
        max_us=taken.max * 1e6,
        median_low_us=taken.low * 1e6,
        median_high_us=taken.high * 1e6,
        iterations=taken.iterations,
        algbw=algbw,
        busbw=algbw * (p - 1) / p,
        speedup=getattr(first, settings.statistic) / getattr(taken, settings.statistic),
        ratio=1.0,
        error=0.0,
        error_max=0.0,
        wrong=wrong,
        different=0,
        seconds={},
    )


def contenders(text: str) -> Sequence[str]:
    """Names of contenders, separated by commas."""
    known = (choose.AUTO, *choose.NAMES["allgatherv"])
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in known:
            raise UsageError(f"allgatherv has no contender {name!r}: there are {', '.join(known)}")
    return chosen
