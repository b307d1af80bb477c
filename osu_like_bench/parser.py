"""The arguments of the command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

from compcoll.dtypes import DTYPES
from compcoll.registry import list_codecs
from compcoll.tools.arguments import add_codec_options

from . import data, ddp_command, load, sizes
from .arguments import argument, at_least
from .errors import UsageError
from .report import COLUMNS, STATISTICS

PROGRAM = "python -m osu_like_bench"

_COLLECTIVES = {
    "allreduce": "mpirun -n 4 {program} allreduce -m 4:134217728 --codec zfp --rate 8 --compare native,ring,p2p",
    "allgather": "mpirun -n 4 {program} allgather -m 1K:16M --codec zfp --rate 16 --compare native,ring,direct",
    "reduce_scatter": "mpirun -n 4 {program} reduce_scatter -m 16M --codec minmax --bits 8 --compare native,direct -f",
    "bcast": "mpirun -n 4 {program} bcast -m 1M:64M --codec cast --codec-dtype float16 --compare native,binomial",
    "alltoall": "mpirun -n 4 {program} alltoall -m 4M --codec zfp --rate 8 --compare native,pairwise --show all",
}
_CODECS = "{program} codecs --size 32M --instruction-set portable,avx2,avx512 --json codecs.json"
_ALLGATHERV = "mpirun -n 4 {program} allgatherv -m 64K:16M --spread one --compare native,ring,direct"
_SELECTION = "{program} selection -m 64K:256M --density 0.001 --data laplace --json selection.json"
_DDP = "mpirun -n 4 {program} ddp --parameters 25e6 --compare gloo,gloo+fp16,compcoll+zfp:rate=8"
_PLOT = "{program} plot allreduce.json -o allreduce.png"

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")


def is_first() -> bool:
    """Tell whether this is rank 0, as far as the launcher tells before MPI is initialised."""
    return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0") == "0"


class _Parser(argparse.ArgumentParser):
    """A parser that only rank 0 speaks for, and that gives only rank 0 a status: others would end the job before it."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if is_first():
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status if is_first() else 0, message)


def _columns(text: str) -> list[str]:
    chosen = list(COLUMNS) if text == "all" else [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in COLUMNS:
            raise UsageError(f"there is no column {name!r}: all, or some of {', '.join(COLUMNS)}")
    return chosen


def _shared() -> _Parser:
    """Options of everything that sends values of our own making."""
    parser = _Parser(add_help=False)
    values = parser.add_argument_group("values")
    values.add_argument("--dtype", choices=DTYPES, default="float32", help="element type (default: %(default)s)")
    values.add_argument(
        "--data",
        type=argument(data.kind_of),
        default="normal",
        metavar="KIND",
        help=f"values: {', '.join(data.KINDS)}, or FILE.npy, such as train_ddp.py --gradients (default: %(default)s)",
    )
    values.add_argument("--seed", type=at_least(0, int), default=0, help="what the values depend on (default: 0)")
    add_codec_options(parser.add_argument_group("codec"), f"what to compress with: none, {', '.join(list_codecs())}")
    return parser


def _measured() -> _Parser:
    """Options of everything that measures."""
    parser = _Parser(add_help=False)
    time = parser.add_argument_group("measuring")
    time.add_argument("-x", "--warmup", type=at_least(0, int), help="rounds before the clock runs")
    time.add_argument("-i", "--iterations", type=at_least(1, int), help="timed rounds at most")
    time.add_argument(
        "--time-cap",
        type=at_least(0, float),
        metavar="S",
        help="seconds for each measurement; 0: no limit, as with -i",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all records as JSON")
    output.add_argument("--csv", type=Path, metavar="FILE", help="write all records as CSV")
    output.add_argument("--html", type=Path, metavar="FILE", help="write plots and tables as one page")
    return parser


def _statistic(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--statistic",
        choices=list(STATISTICS),
        default=default,
        help="of the iterations, to be shown (default: %(default)s)",
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    examples = [*_COLLECTIVES.values(), _ALLGATHERV, _CODECS, _SELECTION, _DDP, _PLOT]
    parser = _Parser(
        prog=PROGRAM,
        description="Compressed collectives against MPI's own, in the manner of OSU's benchmarks and nccl-tests.",
        epilog=_examples(*examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared, measured = _shared(), _measured()

    def command(name: str, text: str, example: str, *parents: _Parser) -> _Parser:
        return commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            parents=parents,
            epilog=_examples(example),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    collective = _collective_options()
    reduction = _Parser(add_help=False)
    reduction.add_argument("--op", choices=("sum", "mean"), default="sum", help="reduction (default: %(default)s)")
    _device(collective)
    for name, example in _COLLECTIVES.items():
        reduces = [reduction] if name in ("allreduce", "reduce_scatter") else []
        command(name, f"{name}, compressed and MPI's own", example, collective, *reduces, shared, measured)

    uneven = command(
        "allgatherv", "allgatherv of unlike contributions, and MPI's own", _ALLGATHERV, collective, shared, measured
    )
    uneven.add_argument(
        "--spread",
        choices=("equal", "linear", "one"),
        default="linear",
        help="contributions: alike, growing with the rank, or all of it rank 0's (default: %(default)s)",
    )

    choosing = command("selection", "time to find the largest elements, in one process", _SELECTION, shared, measured)
    _message_size(choosing, "64K to 256M")

    one_process = command("codecs", "speed of the codecs, in one process without mpirun", _CODECS, shared, measured)
    one_process.add_argument(
        "--size", type=argument(sizes.parse_size), default="32M", help="uncompressed bytes (default: %(default)s)"
    )
    one_process.add_argument(
        "--instruction-set", default="best", metavar="NAMES", help="best (default), all, or names separated by commas"
    )
    _device(one_process)
    one_process.add_argument("--threads", type=at_least(1, int), default=1, help="threads of a kernel (default: 1)")

    training = command("ddp", "a training step of PyTorch's DistributedDataParallel", _DDP, measured)
    ddp_command.add_options(training)
    _statistic(training, "median")

    picture = command("plot", "curves of latency and speed-up, or a page, from --json files", _PLOT)
    picture.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="what --json wrote")
    picture.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PICTURE", help="such as plot.png, or a page: plot.html"
    )
    _statistic(picture, "median")
    return parser


def _device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("host", "cuda"), default="host", help="where buffers are (default: %(default)s)"
    )


def _message_size(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        *("-m", "--message-size"),
        type=argument(sizes.parse_ranges),
        default=((None, None),),
        metavar="MIN:MAX",
        help=f"bytes: from MIN, doubling, to MAX, or one size; several with commas; suffixes K, M, G "
        f"(default: {default})",
    )


def _collective_options() -> _Parser:
    parser = _Parser(add_help=False)
    _message_size(parser, "one element to 1M")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--algorithm", metavar="NAME", help="the one contender (default: auto)")
    which.add_argument(
        "--compare",
        metavar="NAMES",
        help="contenders in turns, ratios to the first: native (mpi4py's call), an algorithm, an algorithm with "
        "_uncompressed, _one_thread (of each kernel) or both, or (allreduce) p2p_ring, p2p_recursive_doubling, which "
        "compress inside send and receive, gloo, gloo_fp16 (of PyTorch), native_nonblocking, auto_nonblocking or what "
        "other packages register",
    )
    parser.add_argument(
        "-f",
        "--full",
        action="store_true",
        help="show the fastest, median, 99th percentile, slowest and number of iterations, too",
    )
    parser.add_argument(
        "--show", type=argument(_columns), default=[], metavar="COLUMNS", help=f"all, or some of {','.join(COLUMNS)}"
    )
    _statistic(parser, "mean")
    load.add_options(parser)
    return parser


def _examples(*examples: str) -> str:
    return "\n".join(
        ["example:" if len(examples) == 1 else "examples:", *(f"  {e.format(program=PROGRAM)}" for e in examples)]
    )
