"""The command line."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from compcoll.codecs import Codec
from compcoll.collectives import choose
from compcoll.errors import CompcollError
from compcoll.registry import list_codecs
from compcoll.tools.arguments import chosen_codec

from . import codecs, ddp_command, html, load, on_gpu, plot, selection, sizes
from .errors import UsageError
from .machine import describe, describe_mpi
from .parser import build_parser, is_first
from .report import Progress, Table, check_writable, content, write_csv, write_json
from .timing import Limits
from .verdict import verdict


def _run_collective(arguments: argparse.Namespace) -> int:
    # MPI starts here: not for what runs in one process.
    from . import contenders, peers, sweep, uneven
    from .cases import CASES, Ranks

    codec = chosen_codec(arguments)
    case = CASES.get(arguments.command)
    itemsize = sizes_of(arguments.dtype)
    asked_load = load.from_arguments(arguments)
    asked = arguments.compare or arguments.algorithm or choose.AUTO
    settings = sweep.Settings(
        sizes=sizes.sweeps(arguments.message_size, itemsize),
        contenders=uneven.contenders(asked) if case is None else contenders.parse(asked, case.name, codec),
        codec=codec,
        dtype=arguments.dtype,
        op=getattr(arguments, "op", "sum"),
        data=arguments.data,
        seed=arguments.seed,
        warmup=arguments.warmup,
        iterations=arguments.iterations,
        time_cap=arguments.time_cap,
        statistic=arguments.statistic,
        device=arguments.device,
    )
    if arguments.device == "cuda":
        on_gpu.check(arguments.command, asked)
    if codec is not None:
        _check_dtype(codec, arguments.dtype, arguments.command)
    ranks = Ranks()
    first = ranks.comm.rank == 0
    about = describe() | {"mpi": describe_mpi(), "ranks": ranks.comm.size, "nodes": ranks.nodes}
    about["load"] = str(asked_load)
    beside = [f"# beside {asked_load}"] * bool(about["load"])
    table = Table(settings.contenders, settings.statistic, arguments.full, arguments.show)
    progress = Progress(len(settings.sizes), quiet=not first)
    try:
        if case is None:
            about["spread"] = arguments.spread
            progress.print(*uneven.head(settings, arguments.spread, ranks, about), *beside, table.head())
        else:
            progress.print(*sweep.head(case, settings, ranks, about), *beside, table.head())
        with load.under(asked_load, first_on_node=ranks.first_on_node, barrier=ranks.comm.Barrier):
            if case is None:
                records = uneven.run(settings, arguments.spread, ranks, table, progress)
            else:
                records = sweep.run(case, settings, ranks, table, progress)
        if len(settings.contenders) > 1:
            progress.print(verdict(records, settings.statistic))
    finally:
        progress.close()
    peers.leave_groups()
    return _finish(arguments, "collective", about, records, sweep.complaints(records), write=first)


def sizes_of(dtype: str) -> int:
    """Bytes of an element."""
    from compcoll.dtypes import DTYPES

    return int(DTYPES[dtype].itemsize)


def _check_dtype(codec: Codec, dtype: str, collective: str) -> None:
    """Let the codec refuse an element type or a collective before anything runs."""
    from compcoll.devices.host import HostDevice

    if codec.additive and collective == "allreduce":
        codec.summands(HostDevice(), dtype, 2)
    else:
        codec.coder(HostDevice(), dtype)


def _run_codecs(arguments: argparse.Namespace) -> int:
    if arguments.codec == "none":
        raise UsageError(
            f"--codec none has no speed: give {', '.join(list_codecs())}, or none of them for the usual ones"
        )
    codec = chosen_codec(arguments)
    cuda = arguments.device == "cuda"
    about = describe() | ({"gpu": on_gpu.check("codecs")} if cuda else {})
    place = about["gpu"] if cuda else f"{about['cpu']}, {arguments.threads} thread(s)"
    progress = Progress(1 if codec else len(codecs.USUAL))
    progress.print(
        f"# Codecs, compcoll {about['compcoll']}, {place}",
        f"# {arguments.size} bytes of {arguments.dtype}, data {arguments.data}; "
        "GB/s of uncompressed bytes, medians of runs in turns; accumulate: decode and add",
    )
    cap = codecs.TIME_CAP if arguments.iterations is None else 0.0
    cap = cap if arguments.time_cap is None else arguments.time_cap
    more: dict[str, Any] = {
        "size": arguments.size,
        "dtype": arguments.dtype,
        "kind": arguments.data,
        "seed": arguments.seed,
        "limits": Limits(
            codecs.WARMUP if arguments.warmup is None else arguments.warmup,
            arguments.iterations or codecs.ITERATIONS,
            cap or float("inf"),
        ),
        "progress": progress,
    }
    chosen = codecs.USUAL if codec is None else [codec]
    try:
        if cuda:
            records = codecs.run_on_gpu(chosen, **more)
        else:
            sets = codecs.chosen_sets(arguments.instruction_set)
            records = codecs.run(chosen, instruction_sets=sets, threads=arguments.threads, **more)
    finally:
        progress.close()
    return _finish(arguments, "codecs", about, records, codecs.complaints(records))


def _run_selection(arguments: argparse.Namespace) -> int:
    about = describe()
    records = selection.from_arguments(arguments, about, sizes_of(arguments.dtype))
    return _finish(arguments, "selection", about, records, selection.complaints(records))


def _run_ddp(arguments: argparse.Namespace) -> int:
    return _finish(arguments, "ddp", *ddp_command.run(arguments), write=is_first())


def _finish(
    arguments: argparse.Namespace,
    kind: str,
    about: dict[str, Any],
    records: Sequence[Any],
    complaints: Sequence[str],
    *,
    write: bool = True,
) -> int:
    if write:
        written = content(kind, about, records)
        if arguments.json is not None:
            write_json(arguments.json, written)
        if arguments.html is not None:
            html.write(arguments.html, [("", written)], getattr(arguments, "statistic", "median"))
        if arguments.csv is not None:
            write_csv(arguments.csv, about, records)
        for complaint in complaints:
            print(f"WRONG: {complaint}", file=sys.stderr)
    return 1 if complaints and write else 0


def _run_plot(arguments: argparse.Namespace) -> int:
    if arguments.output.suffix.lower() in (".html", ".htm"):
        several = len(arguments.files) > 1
        contents = [(path.stem if several else "", plot.load(path)) for path in arguments.files]
        html.write(arguments.output, contents, arguments.statistic)
    else:
        plot.plot(arguments.files, arguments.output, arguments.statistic)
    return 0


def _abort() -> NoReturn:
    """End all ranks: the others may wait for this one."""
    traceback.print_exc()
    sys.stderr.flush()
    if "RANK" in os.environ:  # torchrun sees to it
        os._exit(1)
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(1)
    raise SystemExit(1)


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; exit status 1 if results were wrong, 2 if the arguments were.

    Parameters
    ----------
    words : sequence of str, optional
        The arguments; those of the process by default.
    """
    parser = build_parser()
    arguments = parser.parse_args(words)
    runs = {"codecs": _run_codecs, "selection": _run_selection, "ddp": _run_ddp, "plot": _run_plot}
    try:
        if is_first():
            check_writable(*(getattr(arguments, name, None) for name in ("json", "csv", "html", "output")))
        status = runs.get(arguments.command, _run_collective)(arguments)
    except (UsageError, CompcollError) as error:
        parser.error(str(error))
    except Exception:
        if arguments.command in ("codecs", "plot"):
            raise
        _abort()
    sys.exit(status)
