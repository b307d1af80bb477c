"""A collective over a range of message sizes: measured, verified, and written down."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compcoll.algorithms.record import Encodings
from compcoll.codecs import Codec
from compcoll.dtypes import DTYPES
from compcoll.host.device import HostDevice
from compcoll.plan import choose
from compcoll.tools.arguments import chosen_codec

from . import contenders, data, load, on_gpu, peers
from .bounds import Verdict, bound_of, encodings_of, is_vote, result_bound, typical_error, verify, verify_moved
from .cases import CASES, Case, Ranks
from .contenders import Contender
from .errors import UsageError
from .machine import describe, describe_mpi
from .parser import sweeps
from .report import Progress, Record, SweepTable
from .timing import Limits, Times, measure
from .verdict import verdict

LARGE = 8192
"""OSU measures longer messages with fewer iterations."""

ITERATIONS, WARMUP = (1000, 100), (100, 10)
"""OSU's numbers of iterations and of rounds before them, for small and for large messages."""

TIME_CAP = 1.0


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """Run the command of a collective: measure and verify all contenders at all sizes.

    Returns
    -------
    tuple
        The run's description, and records.
    """
    case = CASES[arguments.command]
    if case.spread:
        case = replace(case, spread=arguments.spread)
    codec = chosen_codec(arguments)
    sizes = sweeps(arguments.message_size, DTYPES[arguments.dtype].itemsize)
    asked_load = load.from_arguments(arguments)
    asked = arguments.compare or arguments.algorithm or choose.AUTO
    names = contenders.parse(asked, case.name, codec)
    if arguments.device == "cuda":
        on_gpu.check(case.name, asked)
    if codec is not None:
        _check_dtype(codec, arguments.dtype, case.name)
    ranks = Ranks()
    about = describe() | {"mpi": describe_mpi(), "ranks": ranks.comm.size, "nodes": ranks.nodes}
    about |= {"load": str(asked_load)} | ({"spread": case.spread} if case.spread else {})
    table = SweepTable(names, arguments.statistic, arguments.full, arguments.show)
    with Progress(len(sizes), quiet=ranks.comm.rank != 0) as progress:
        progress.print(*_head(case, codec, arguments, about), table.head)
        with load.under(asked_load, first_on_node=ranks.first_on_node, barrier=ranks.comm.Barrier):
            records = _sweep(case, sizes, names, codec, arguments, ranks, table, progress)
        if len(names) > 1:
            progress.print(verdict(records, arguments.statistic))
    peers.leave_groups()
    return about, records


def _check_dtype(codec: Codec, dtype: str, collective: str) -> None:
    """Let the codec refuse an element type or a collective before anything runs."""
    if codec.additive and collective == "allreduce":
        codec.quantizer(HostDevice(), dtype, 2)
    else:
        codec.coder(HostDevice(), dtype)


def _head(case: Case, codec: Codec | None, arguments: argparse.Namespace, about: Mapping[str, Any]) -> list[str]:
    """Return the lines above the table."""
    nodes = f"{about['nodes']} node" + "s" * (about["nodes"] > 1)
    op = f", {arguments.op}" if case.reduces else ""
    spread = f", contributions {case.spread}" if case.spread else ""
    return [
        f"# OSU-style {case.title} Latency Test, compcoll {about['compcoll']}",
        f"# {about['ranks']} ranks on {nodes}, {about['mpi']}, {about['cpu']} ({about['instruction_set']})",
        f"# {'no codec' if codec is None else codec.label}, {arguments.dtype}{op}, data {arguments.data}{spread}, "
        f"buffers on {arguments.device}; size in bytes: {case.size_is}",
        *([f"# beside {about['load']}"] if about["load"] else []),
    ]


def _sweep(
    case: Case,
    sizes: Sequence[int],
    names: Sequence[str],
    codec: Codec | None,
    arguments: argparse.Namespace,
    ranks: Ranks,
    table: SweepTable,
    progress: Progress,
) -> list[Record]:
    p, rank = ranks.comm.size, ranks.comm.rank
    dtype = DTYPES[arguments.dtype].numpy
    lengths = [length for size in sizes if (length := case.length(size, dtype.itemsize, p))]
    if not lengths:
        smallest = case.size(1, dtype.itemsize, p)
        raise UsageError(f"{case.name} on {p} ranks needs sizes of at least {smallest} bytes of {arguments.dtype}")
    # Smaller messages are the beginning of the largest.
    (parts_in, longest_in), (parts_out, longest_out) = case.shapes(max(lengths), p, rank)
    x = data.make(arguments.data, parts_in * longest_in, arguments.dtype, (arguments.seed, rank))
    out = np.empty(parts_out * longest_out, dtype)
    records: list[Record] = []
    for length in dict.fromkeys(lengths):
        size = case.size(length, dtype.itemsize, p)
        progress.step(f"{size} bytes")
        sent, got = (
            whole[: shape[0] * shape[1]].reshape(shape)
            for whole, shape in zip((x, out), case.shapes(length, p, rank), strict=True)
        )
        case.prepare(sent, got, rank)
        there = on_gpu.Buffers(sent, got) if arguments.device == "cuda" else None
        mean = arguments.op == "mean"
        runners = [contenders.make(name, case, ranks, sent, got, codec=codec, mean=mean, there=there) for name in names]
        large = int(size > LARGE)
        times = measure(
            [runner.run for runner in runners],
            Limits.of(arguments, WARMUP[large], ITERATIONS[large], TIME_CAP),
            barrier=ranks.comm.Barrier,
            slowest=ranks.largest,
        )
        first = getattr(times[0], arguments.statistic)
        rows = []
        for runner, taken in zip(runners, times, strict=True):
            speed = _speed(case, sent, got, p, taken) | {"speedup": first / getattr(taken, arguments.statistic)}
            about = {"collective": case.name, "size": size, "dtype": arguments.dtype, "data": arguments.data}
            about |= {"op": arguments.op if case.reduces else "", "ranks": p, "nodes": ranks.nodes}
            rows.append(about | speed | _quality(case, runner, sent, got, codec, mean, ranks, there))
        progress.print(*table.rows(rows))
        records += rows
    return records


def _speed(case: Case, x: Any, out: Any, p: int, times: Times) -> Record:
    """Return times, and bandwidths as nccl-tests defines them."""
    total = max(x.nbytes, out.nbytes)
    algbw = total / times.mean / 1e9
    return {"total_bytes": total, **times.fields(), "algbw": algbw, "busbw": algbw * case.busbw(p)}


def _quality(
    case: Case,
    contender: Contender,
    x: Any,
    out: Any,
    codec: Codec | None,
    mean: bool,
    ranks: Ranks,
    there: on_gpu.Buffers | None,
) -> Record:
    """Run a contender once more, and return what it did and how exact the result is."""
    case.prepare(x, out, ranks.comm.rank)
    if there is not None:
        there.upload()
    returned = contender.run()
    ran = contender.ran()
    if there is not None:
        there.download()
        ran.seconds["device"] = there.seconds
    used = (ran.codec or codec) if ran.compressed else None
    if case.spread:
        if contender.name != choose.NATIVE:
            out[0] = returned  # the only collective without out=
        found = verify_moved(case, ranks.comm, x, out)
    else:
        found = _verified(case, ran.algorithm, used, x, out, mean and case.reduces, ranks)
    return {
        "contender": contender.name,
        "algorithm": ran.algorithm,
        "codec": None if used is None else repr(used),
        "ratio": ran.ratio,
        "error": found.error,
        "error_max": found.error_max,
        "wrong": found.outside + (found.different if contender.same_bits else 0),
        "different": found.different,
        "seconds": ran.seconds,
    }


def _verified(case: Case, algorithm: str, codec: Codec | None, x: Any, out: Any, mean: bool, ranks: Ranks) -> Verdict:
    """Compare a result with the exact one, within the bounds of the codec and the algorithm that ran."""
    p, dtype = ranks.comm.size, x.dtype.name
    terms = p if case.reduces else 1
    # Integers are added without rounding, whatever the algorithm.
    additive = codec is not None and codec.additive
    path = Encodings(1, 1) if additive else encodings_of(case.name, algorithm, p, ranks.nodes)
    return verify(
        case,
        ranks.comm,
        x,
        out,
        result_bound(bound_of(codec, dtype, p), path, dtype, terms + mean),
        typical=typical_error(codec, x, path.levels, terms),
        scale=1.0 / p if mean else 1.0,
        votes=is_vote(codec),
    )
