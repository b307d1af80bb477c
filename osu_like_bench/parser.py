"""Parse the command line: types of arguments, and the parser of all commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from compcoll.codecs.registry import list_codecs
from compcoll.dtypes import DTYPES
from compcoll.errors import CompcollError
from compcoll.plan.choose import NAMES
from compcoll.tools.arguments import add_codec_options, doubling, parse_bytes

from . import UsageError, data
from .report import COLUMNS, STATISTICS

PROGRAM = "python -m osu_like_bench"

_EXAMPLES = {
    "allreduce": "mpirun -n 4 {program} allreduce -m 4:134217728 --codec zfp --rate 8 --compare native,ring,p2p",
    "allgather": "mpirun -n 4 {program} allgather -m 1K:16M --codec zfp --rate 16 --compare native,ring,direct",
    "reduce_scatter": "mpirun -n 4 {program} reduce_scatter -m 16M --codec minmax --bits 8 --compare native,direct -f",
    "reduce": "mpirun -n 4 {program} reduce -m 1M:64M --codec int8 --compare native,ring,direct",
    "bcast": "mpirun -n 4 {program} bcast -m 1M:64M --codec cast --codec-dtype float16 --compare native,binomial",
    "gather": "mpirun -n 4 {program} gather -m 1M:16M --codec int8 --compare native,linear",
    "scatter": "mpirun -n 4 {program} scatter -m 1M:16M --codec int8 --compare native,linear",
    "alltoall": "mpirun -n 4 {program} alltoall -m 4M --codec zfp --rate 8 --compare native,pairwise --show all",
    "allgatherv": "mpirun -n 4 {program} allgatherv -m 64K:16M --spread one --compare native,ring,direct",
    "alltoallv": "mpirun -n 4 {program} alltoallv -m 64K:16M --spread one --compare native,pairwise",
    "codecs": "{program} codecs --size 32M --instruction-set portable,avx2,avx512 --json codecs.json",
    "selection": "{program} selection -m 64K:256M --density 0.001 --data laplace --json selection.json",
    "ddp": "mpirun -n 4 {program} ddp --parameters 25e6 --compare gloo,gloo+fp16,compcoll+zfp:rate=8",
    "plot": "{program} plot allreduce.json -o allreduce.png",
}

_USUAL_STEPS = (
    "gloo,gloo+fp16,gloo+bf16,gloo+powersgd:rank=2,compcoll,compcoll+zfp:rate=8,compcoll+zfp:rate=16,"
    "compcoll+minmax:bits=8,compcoll+cast:dtype=float16"
)

SMALLEST, LARGEST = 1, 1 << 20
"""OSU's default smallest and largest size, in bytes."""

Range = tuple[int | None, int | None]
"""Smallest and largest size in bytes; None for a default."""


_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a parsing function as a type for argparse that shows the messages of its errors."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (UsageError, CompcollError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def at_least(low: float, number: Callable[[str], float]) -> Callable[[str], float]:
    """Return a type for argparse that accepts numbers of type ``number`` (int or float) of at least ``low``."""

    def parse(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = low - 1
        if not value >= low:
            kind = "an integer" if number is int else "a number"
            raise UsageError(f"{text!r}: {kind} of at least {low:g} is needed")
        return value

    return argument(parse)


def known_names(text: str, known: Iterable[str], complaint: str) -> list[str]:
    """Split names at commas, and check that they are known.

    Parameters
    ----------
    text : str
        The argument.
    known : iterable of str
        The names that exist.
    complaint : str
        The error message for an unknown name; may contain ``{name!r}`` and ``{known}``.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(complaint.format(name=name, known=", ".join(known)))
    return names


def parse_ranges(text: str) -> tuple[Range, ...]:
    """Parse ranges and single sizes, separated by commas."""
    return tuple(parse_range(part) for part in text.split(","))


def parse_range(text: str) -> Range:
    """Parse ``MIN:MAX``, ``MIN:``, ``:MAX`` or one size."""
    low, colon, high = text.partition(":")
    first, last = (parse_bytes(part) if part else None for part in (low, high))
    if not colon:
        last = first
    if first is None and last is None:
        raise UsageError(f"{text!r} is not a range of sizes: MIN:MAX, MIN:, :MAX or one size is needed")
    if first is not None and last is not None and first > last:
        raise UsageError(f"{text!r}: the smallest size is larger than the largest")
    return first, last


def sweeps(ranges: Sequence[Range], itemsize: int, smallest: int = SMALLEST, largest: int = LARGEST) -> list[int]:
    """Return the sizes of all ranges. In each range, sizes double from the smallest to the largest.

    Parameters
    ----------
    ranges : sequence of Range
        The ranges.
    itemsize : int
        Bytes of an element. Sizes must be multiples of it.
    smallest, largest : int
        Defaults for ranges without a smallest or largest size.
    """
    sizes: list[int] = []
    for low, high in ranges:
        low = max(smallest, itemsize) if low is None else low
        high = max(largest, low) if high is None else high
        if low % itemsize:
            rounded = -(-low // itemsize) * itemsize
            raise UsageError(f"size {low} is not a multiple of the element's {itemsize} bytes: give {rounded}")
        if low > high:
            raise UsageError(f"no sizes from {low} to {high} bytes: the smallest is one element, {itemsize} bytes")
        sizes += doubling(low, high)
    return sizes


def is_first() -> bool:
    """Return whether this is rank 0, by the launcher's variables, since MPI may not be initialised yet."""
    return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0") == "0"


class _Parser(argparse.ArgumentParser):
    """A parser for all ranks. Only rank 0 prints, and only it exits with an error status.

    If other ranks exited with an error status, the launcher could end the job before rank 0 prints.
    """

    def _print_message(self, message: str, file: Any = None) -> None:
        if is_first():
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status if is_first() else 0, message)


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line."""
    parser = _Parser(
        prog=PROGRAM,
        description="Compressed collectives against MPI's own, in the manner of OSU's benchmarks and nccl-tests.",
        epilog=_examples(*_EXAMPLES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> _Parser:
        about, raw = f"{text[0].upper()}{text[1:]}.", argparse.RawDescriptionHelpFormatter
        made: _Parser = commands.add_parser(
            name, help=text, description=about, epilog=_examples(_EXAMPLES[name]), formatter_class=raw
        )
        return made

    for name in NAMES:
        uneven = name.endswith("v")
        text = f"{name} of parts of different lengths" if uneven else f"{name}, compressed"
        of_collective = command(name, f"{text}, and MPI's own")
        _add_collective(of_collective, reduces="reduce" in name)
        if uneven:
            spread = "lengths of parts: equal, growing with the rank, or only rank 0's (default: %(default)s)"
            of_collective.add_argument("--spread", choices=("equal", "linear", "one"), default="linear", help=spread)
    selection = command("selection", "time to find the largest elements, in one process")
    _add_sizes(selection, "64K to 256M")
    _add_values(selection)
    _add_measuring(selection)
    _add_codecs(command("codecs", "speed of the codecs, in one process without mpirun"))
    _add_ddp(command("ddp", "a training step of PyTorch's DistributedDataParallel"))
    plot = command("plot", "curves of latency and speed-up, or a page, from --json files")
    plot.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="files written by --json")
    to = "the picture, such as plot.png, or a page: plot.html"
    plot.add_argument("-o", "--output", type=Path, required=True, metavar="PICTURE", help=to)
    _add_statistic(plot, "median")
    return parser


def _add_collective(parser: argparse.ArgumentParser, *, reduces: bool) -> None:
    _add_sizes(parser, "one element to 1M")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--algorithm", metavar="NAME", help="the only contender (default: auto)")
    names = (
        "contenders, timed alternately, with ratios to the first: native (mpi4py's call), or an algorithm, which may "
        "end with _uncompressed, _one_thread (for each kernel) or both. For allreduce also: p2p_ring and "
        "p2p_recursive_doubling, which compress inside send and receive, PyTorch's gloo and gloo_fp16, "
        "native_nonblocking, auto_nonblocking, and contenders of other packages"
    )
    which.add_argument("--compare", metavar="NAMES", help=names)
    full = "also show the fastest, median, 99th percentile, slowest and number of iterations"
    parser.add_argument("-f", "--full", action="store_true", help=full)
    columns = f"more columns: all, or some of {','.join(COLUMNS)}"
    parser.add_argument("--show", type=argument(_columns), default=[], metavar="COLUMNS", help=columns)
    if reduces:
        parser.add_argument("--op", choices=("sum", "mean"), default="sum", help="reduction (default: %(default)s)")
    else:
        parser.set_defaults(op="sum")
    _add_statistic(parser, "mean")
    _add_device(parser)
    _add_load(parser)
    _add_values(parser)
    _add_measuring(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Add the options of `load.Load`."""
    add, count = parser.add_argument_group("load").add_argument, at_least(0, int)
    add("--burners", type=count, default=0, metavar="K", help="busy processes on each node (default: 0)")
    add("--burner-nice", type=count, default=0, metavar="N", help="their niceness, 0 to 19 (default: 0)")
    add("--python-threads", type=count, default=0, metavar="T", help="busy threads in each rank, with the GIL")
    add("--native-threads", type=count, default=0, metavar="T", help="busy threads in each rank, without the GIL")


def _columns(text: str) -> list[str]:
    known = "there is no column {name!r}: all, or some of {known}"
    return list(COLUMNS) if text == "all" else known_names(text, COLUMNS, known)


def _add_codecs(parser: argparse.ArgumentParser) -> None:
    bytes_of = argument(parse_bytes)
    parser.add_argument("--size", type=bytes_of, default="32M", help="uncompressed bytes (default: %(default)s)")
    sets = "instruction sets: best (default), all, or names separated by commas"
    parser.add_argument("--instruction-set", default="best", metavar="NAMES", help=sets)
    parser.add_argument("--threads", type=at_least(1, int), default=1, help="threads of a kernel (default: 1)")
    _add_device(parser)
    _add_values(parser)
    _add_measuring(parser)


def _add_ddp(parser: argparse.ArgumentParser) -> None:
    add, count, number = parser.add_argument, at_least(1, int), at_least(0, float)
    names = (
        "contenders, timed alternately, with ratios to the first: gloo, gloo+HOOK (PyTorch's fp16, bf16, "
        "powersgd:rank=2, batched_powersgd:rank=2, quantization), backend (DDP on the process group compcoll), "
        "compcoll (exact), compcoll+CODEC such as compcoll+minmax:bits=4, "
        "group and group+CODEC (as compcoll, but over gloo even under mpirun), acpsgd:rank=4, powersgd:rank=4, ssgd "
        "(compcoll's, on gloo; also with :overlap=False, :buffer_mb=0, :ddp=True), "
        "powersgd-late (sends right factors after back-propagation) (default: %(default)s)"
    )
    add("--compare", default=_USUAL_STEPS, metavar="NAMES", help=names)
    models = ("perceptron", "resnet50", "resnet152", "bert-base", "bert-large")
    kind = "a perceptron, or a network's shapes with a back-propagation that only sleeps (default: %(default)s)"
    add("--model", choices=models, default="perceptron", help=kind)
    backward = "time of a network's back-propagation, twice that of its forward pass (default: %(default)g)"
    add("--backward", type=number, default=200.0, metavar="MS", help=backward)
    parameters = "approximate parameters of the perceptron (default: %(default)g)"
    add("--parameters", type=at_least(1, float), default=25e6, help=parameters)
    add("--batch", type=count, default=8, help="examples of a rank (default: 8)")
    add(
        "--bucket", type=number, default=25.0, metavar="MB", help="uncompressed size of a bucket (default: %(default)g)"
    )
    add("--threads", type=count, help="threads of a rank (default: its share of the cores)")
    loaders = "busy processes beside each rank, like a DataLoader's workers (default: 0)"
    add("--loaders", type=at_least(0, int), default=0, metavar="L", help=loaders)
    add("--algorithm", default="auto", help="compcoll's algorithm (default: auto)")
    add("--no-feedback", action="store_true", help="drop the residuals of compression")
    add("--seed", type=at_least(0, int), default=0, help="of model and examples (default: 0)")
    _add_measuring(parser)
    _add_statistic(parser, "median")


def _add_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    sizes = f"from MIN, doubling, to MAX, or one size; or several, with commas; suffixes K, M, G (default: {default})"
    how: dict[str, Any] = {"type": argument(parse_ranges), "default": ((None, None),), "metavar": "MIN:MAX"}
    parser.add_argument("-m", "--message-size", **how, help=f"bytes: {sizes}")


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Add the options for the values to encode or send, and for the codec."""
    values = parser.add_argument_group("values")
    values.add_argument("--dtype", choices=DTYPES, default="float32", help="element type (default: %(default)s)")
    kinds = f"{', '.join(data.KINDS)}, or FILE.npy, for example from train_ddp.py --gradients (default: %(default)s)"
    values.add_argument("--data", type=argument(data.kind_of), default="normal", metavar="KIND", help=kinds)
    values.add_argument("--seed", type=at_least(0, int), default=0, help="of random values (default: 0)")
    add_codec_options(parser.add_argument_group("codec"), f"what to compress with: none, {', '.join(list_codecs())}")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add the options for measuring and for output files."""
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("-x", "--warmup", type=at_least(0, int), help="rounds before the timed ones")
    measuring.add_argument("-i", "--iterations", type=at_least(1, int), help="maximum number of timed rounds")
    cap = "time limit of a measurement in seconds; 0 for no limit, which is the default with -i"
    measuring.add_argument("--time-cap", type=at_least(0, float), metavar="S", help=cap)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all records as JSON")
    output.add_argument("--csv", type=Path, metavar="FILE", help="write all records as CSV")
    output.add_argument("--html", type=Path, metavar="FILE", help="write plots and tables as one page")


def _add_statistic(parser: argparse.ArgumentParser, default: str) -> None:
    shown = "statistic of the iterations to show (default: %(default)s)"
    parser.add_argument("--statistic", choices=list(STATISTICS), default=default, help=shown)


def _add_device(parser: argparse.ArgumentParser) -> None:
    where = "where buffers are (default: %(default)s)"
    parser.add_argument("--device", choices=("host", "cuda"), default="host", help=where)


def _examples(*examples: str) -> str:
    head = "example:" if len(examples) == 1 else "examples:"
    return "\n".join([head, *(f"  {example.format(program=PROGRAM)}" for example in examples)])
