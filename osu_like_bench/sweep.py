"""Measure and verify a collective over a range of message sizes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compcoll.algorithms.record import Encodings
from compcoll.codecs import Codec
from compcoll.dtypes import DTYPES
from compcoll.host.device import HostDevice
from compcoll.plan import choose
from compcoll.tools.arguments import chosen_codec

from . import UsageError, contenders, data, load, on_gpu, peers
from .bounds import Verdict, bound_of, encodings_of, is_vote, result_bound, typical_error, verify, verify_moved
from .cases import CASES, Case, Ranks
from .contenders import Contender
from .machine import describe, describe_mpi
from .parser import sweeps
from .report import Progress, Record, SweepTable, conclusion, fastest
from .timing import Limits, Times, measure

LARGE = 8192
"""Messages longer than this number of bytes have fewer iterations, as in OSU's benchmarks."""

ITERATIONS, WARMUP = (1000, 100), (100, 10)
"""OSU's numbers of iterations and of warm-up rounds, each for small and for large messages."""

TIME_CAP = 1.0


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """Run the command of a collective: measure and verify all contenders at all sizes.

    Returns
    -------
    tuple
        The run's description, and its records.
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
        progress.print(*_head(case, codec, arguments, about), table.head())
        with load.under(asked_load, first_on_node=ranks.first_on_node, barrier=ranks.comm.Barrier):
            records = _Sweep(case, codec, ranks, arguments).records(sizes, names, table, progress)
        if len(names) > 1:
            if len(set(sizes)) > 1:
                progress.print(fastest(records, arguments.statistic))
            progress.print(conclusion(records, arguments.statistic))
    peers.leave_groups()
    return about, records


def _check_dtype(codec: Codec, dtype: str, collective: str) -> None:
    """Raise the codec's error for an unsupported element type before anything is measured."""
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


@dataclass(frozen=True)
class _Sweep:
    """Measures and verifies one collective with the options of the command line."""

    case: Case
    codec: Codec | None
    ranks: Ranks
    arguments: argparse.Namespace

    def records(
        self, sizes: Sequence[int], names: Sequence[str], table: SweepTable, progress: Progress
    ) -> list[Record]:
        """Measure and verify contenders at all sizes."""
        case, arguments, p, rank = self.case, self.arguments, self.ranks.comm.size, self.ranks.comm.rank
        dtype = DTYPES[arguments.dtype].numpy
        lengths = [length for size in sizes if (length := case.length(size, dtype.itemsize, p))]
        if not lengths:
            smallest = case.size(1, dtype.itemsize, p)
            raise UsageError(f"{case.name} on {p} ranks needs sizes of at least {smallest} bytes of {arguments.dtype}")
        # Messages of all sizes use the beginning of the same buffers.
        whole_in, whole_out = (math.prod(shape) for shape in case.shapes(max(lengths), p, rank))
        x = data.make(arguments.data, whole_in, arguments.dtype, (arguments.seed, rank))
        out = np.empty(whole_out, dtype)
        records: list[Record] = []
        for length in dict.fromkeys(lengths):
            size = case.size(length, dtype.itemsize, p)
            progress.step(f"{size} bytes")
            shapes = case.shapes(length, p, rank)
            sent, got = (whole[: math.prod(s)].reshape(s) for whole, s in zip((x, out), shapes, strict=True))
            of_length = replace(self, case=replace(case, mean_length=length))
            rows = of_length._of_size(size, names, sent, got)
            progress.print(*table.rows(rows))
            records += rows
        return records

    def _of_size(self, size: int, names: Sequence[str], x: Any, out: Any) -> list[Record]:
        case, arguments, ranks = self.case, self.arguments, self.ranks
        case.prepare(x, out, ranks.comm.rank)
        there = on_gpu.Buffers(x, out) if arguments.device == "cuda" else None
        how: dict[str, Any] = {"codec": self.codec, "mean": arguments.op == "mean", "there": there}
        runners = [contenders.make(name, case, ranks, x, out, **how) for name in names]
        large = int(size > LARGE)
        limits = Limits.of(arguments, WARMUP[large], ITERATIONS[large], TIME_CAP)
        calls = [runner.run for runner in runners]
        times = measure(calls, limits, barrier=ranks.comm.Barrier, slowest=ranks.largest)
        first = getattr(times[0], arguments.statistic)
        about = {"collective": case.name, "size": size, "dtype": arguments.dtype, "data": arguments.data}
        about |= {"op": arguments.op if case.reduces else "", "ranks": ranks.comm.size, "nodes": ranks.nodes}
        rows = []
        for runner, taken in zip(runners, times, strict=True):
            speed = _speed(case, x, out, ranks.comm.size, taken)
            speed |= {"speedup": first / getattr(taken, arguments.statistic)}
            rows.append(about | speed | self._quality(runner, x, out, there))
        return rows

    def _quality(self, contender: Contender, x: Any, out: Any, there: on_gpu.Buffers | None) -> Record:
        """Run a contender once more, verify the result, and return the fields of a record."""
        self.case.prepare(x, out, self.ranks.comm.rank)
        if there is not None:
            there.upload()
        returned = contender.run()
        ran = contender.ran()
        if there is not None:
            there.download()
            ran.seconds["device"] = there.seconds
        if self.case.spread:
            if contender.name != choose.NATIVE:
                out[0] = returned  # compcoll's method has no out=
            found = verify_moved(self.case, self.ranks.comm, x, out)
        else:
            found = self._verified(ran.algorithm, ran.codec, x, out)
        return {
            "contender": contender.name,
            "algorithm": ran.algorithm,
            "codec": None if ran.codec is None else repr(ran.codec),
            "ratio": self.ranks.comm.allreduce(ran.ratio, max) if self.case.at_root else ran.ratio,
            "error": found.error,
            "error_max": found.error_max,
            "wrong": found.outside + (found.different if contender.same_bits else 0),
            "different": found.different,
            "seconds": ran.seconds,
        }

    def _verified(self, algorithm: str, codec: Codec | None, x: Any, out: Any) -> Verdict:
        """Compare a result with the exact one, by the error bounds of the codec and the algorithm that ran."""
        case, p, dtype = self.case, self.ranks.comm.size, x.dtype.name
        mean, terms = case.reduces and self.arguments.op == "mean", p if case.reduces else 1
        # These add integers, without rounding in any algorithm.
        once = codec is not None and (codec.additive or codec.homomorphic)
        path = Encodings(1, 1) if once else encodings_of(case.name, algorithm, p, self.ranks.nodes)
        allowed = result_bound(bound_of(codec, dtype, p), path, dtype, terms + mean)
        typical, scale = typical_error(codec, x, path.levels, terms), 1.0 / p if mean else 1.0
        return verify(case, self.ranks.comm, x, out, allowed, typical=typical, scale=scale, votes=is_vote(codec))


def _speed(case: Case, x: Any, out: Any, p: int, times: Times) -> Record:
    """Return a record's times, and its bandwidths as nccl-tests defines them."""
    total = max(x.nbytes, out.nbytes)
    algbw = total / times.mean / 1e9
    return {"total_bytes": total, **times.fields(), "algbw": algbw, "busbw": algbw * case.busbw(p)}
