"""A collective over a range of message sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compcoll.algorithms.record import Encodings
from compcoll.codecs import Codec
from compcoll.dtypes import DTYPES

from . import contenders, data
from .bounds import bound_of, encodings_of, is_vote, result_bound
from .cases import Case, Ranks
from .contenders import Contender
from .errors import UsageError
from .on_gpu import Buffers
from .report import STATISTICS, Progress, Record, Table
from .timing import Limits, Times, measure
from .verify import typical_error, verify

LARGE = 8192
"""OSU measures longer messages with fewer iterations."""

ITERATIONS, WARMUP = (1000, 100), (100, 10)
"""OSU's numbers of iterations and of rounds before them, for small and for large messages."""

TIME_CAP = 1.0


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement: what to measure, and how.

    Attributes
    ----------
    sizes : sequence of int
        Bytes, as `Case.size_is` says.
    contenders : sequence of str
        Names, the first being what others are compared with.
    codec : Codec or None
        What they compress with.
    dtype, op, data, seed
        Element type, ``"sum"`` or ``"mean"``, kind of values and what they depend on.
    warmup, iterations : int or None
        Rounds; OSU's numbers by default.
    time_cap : float or None
        Seconds for one contender at one size; `TIME_CAP` by default, unless `iterations` is given. 0: no limit.
    statistic : str
        One of `report.STATISTICS`.
    device : str
        Where buffers are: ``"host"`` or ``"cuda"``.
    """

    sizes: Sequence[int]
    contenders: Sequence[str]
    codec: Codec | None
    dtype: str
    op: str
    data: str
    seed: int
    warmup: int | None
    iterations: int | None
    time_cap: float | None
    statistic: str
    device: str = "host"

    def limits(self, size: int) -> Limits:
        """Tell how long to measure messages of that size."""
        large = int(size > LARGE)
        cap = self.time_cap
        if cap is None:
            cap = TIME_CAP if self.iterations is None else 0.0
        return Limits(
            WARMUP[large] if self.warmup is None else self.warmup,
            ITERATIONS[large] if self.iterations is None else self.iterations,
            cap or float("inf"),
        )


def head(case: Case, settings: Settings, ranks: Ranks, run: dict[str, Any]) -> list[str]:
    """The lines above the table."""
    codec = "no codec" if settings.codec is None else settings.codec.label
    op = f", {settings.op}" if case.reduces else ""
    nodes = f"{ranks.nodes} node" + "s" * (ranks.nodes > 1)
    return [
        f"# OSU-style {case.title} Latency Test, compcoll {run['compcoll']}",
        f"# {ranks.comm.size} ranks on {nodes}, {run['mpi']}, {run['cpu']} ({run['instruction_set']})",
        f"# {codec}, {settings.dtype}{op}, data {settings.data}, buffers on {settings.device}; "
        f"size in bytes: {case.size_is}",
    ]


def run(case: Case, settings: Settings, ranks: Ranks, table: Table, progress: Progress) -> list[Record]:
    """Measure and verify all contenders at all sizes.

    Parameters
    ----------
    case : Case
        The collective.
    settings : Settings
        What to measure.
    ranks : Ranks
        Who takes part.
    table : Table
        Forms the lines that are printed.
    progress : Progress
        Prints them.
    """
    size = ranks.comm.size
    dtype = DTYPES[settings.dtype].numpy
    lengths = [length for s in settings.sizes if (length := case.length(s, dtype.itemsize, size))]
    if not lengths:
        smallest = case.size(1, dtype.itemsize, size)
        raise UsageError(f"{case.name} on {size} ranks needs sizes of at least {smallest} bytes of {settings.dtype}")
    # Smaller messages are the beginning of the largest.
    shapes = case.shapes(lengths[-1], size)
    x = data.make(settings.data, shapes[0][0] * lengths[-1], settings.dtype, (settings.seed, ranks.comm.rank))
    out = np.empty(shapes[1][0] * lengths[-1], dtype)
    records: list[Record] = []
    for length in dict.fromkeys(lengths):
        nbytes = case.size(length, dtype.itemsize, size)
        progress.step(f"{nbytes} bytes")
        sent, got = (
            whole[: shape[0] * shape[1]].reshape(shape)
            for whole, shape in zip((x, out), case.shapes(length, size), strict=True)
        )
        case.prepare(sent, got, ranks.comm.rank)
        there = Buffers(sent, got) if settings.device == "cuda" else None
        runners = [
            contenders.make(name, case, ranks, sent, got, codec=settings.codec, mean=settings.op == "mean", there=there)
            for name in settings.contenders
        ]
        times = measure(
            [runner.run for runner in runners],
            settings.limits(nbytes),
            barrier=ranks.comm.Barrier,
            slowest=ranks.largest,
        )
        rows = [
            _record(case, settings, ranks, runner, sent, got, taken, times[0], there)
            for runner, taken in zip(runners, times, strict=True)
        ]
        progress.print(*table.rows(rows))
        records += rows
    return records


def _record(
    case: Case,
    settings: Settings,
    ranks: Ranks,
    contender: Contender,
    x: Any,
    out: Any,
    times: Times,
    first: Times,
    there: Buffers | None,
) -> Record:
    """Run a contender once more, verify what it does, and write all down."""
    comm = ranks.comm
    mean = case.reduces and settings.op == "mean"
    case.prepare(x, out, comm.rank)
    if there is not None:
        there.upload()
    contender.run()
    ran = contender.ran()
    if there is not None:
        there.download()
        ran.seconds["device"] = there.seconds
    codec = (ran.codec or settings.codec) if ran.compressed else None
    terms = comm.size if case.reduces else 1
    additive = codec is not None and codec.additive
    # Numbers are added as they are, whatever the algorithm.
    path = Encodings(1, 1) if additive else encodings_of(case.name, ran.algorithm, comm.size, ranks.nodes)
    allowed = result_bound(bound_of(codec, settings.dtype, comm.size), path, settings.dtype, terms + mean)
    verdict = verify(
        case,
        comm,
        x,
        out,
        allowed,
        typical=typical_error(codec, x, path.levels, terms),
        scale=1.0 / comm.size if mean else 1.0,
        votes=is_vote(codec),
    )
    total = max(x.nbytes, out.nbytes)
    algbw = total / times.mean / 1e9
    field = settings.statistic
    return Record(
        collective=case.name,
        size=case.size(x.shape[1], x.itemsize, comm.size),
        total_bytes=total,
        dtype=settings.dtype,
        op=settings.op if case.reduces else "",
        data=settings.data,
        ranks=comm.size,
        nodes=ranks.nodes,
        contender=contender.name,
        algorithm=ran.algorithm,
        codec=None if codec is None else repr(codec),
        **{STATISTICS[name][1]: getattr(times, name) * 1e6 for name in STATISTICS},
        max_us=times.max * 1e6,
        median_low_us=times.low * 1e6,
        median_high_us=times.high * 1e6,
        iterations=times.iterations,
        algbw=algbw,
        busbw=algbw * case.busbw(comm.size),
        speedup=getattr(first, field) / getattr(times, field),
        ratio=ran.ratio,
        error=verdict.error,
        error_max=verdict.error_max,
        wrong=verdict.outside + (verdict.different if contender.same_bits else 0),
        different=verdict.different,
        seconds=ran.seconds,
    )


def complaints(records: Sequence[Record]) -> list[str]:
    """A line for each record with wrong elements."""
    return [
        f"{record.contender} at {record.size} bytes: {record.wrong} wrong elements "
        f"({record.different} differ between ranks), relative error {record.error:.2e}"
        for record in records
        if record.wrong
    ]
