"""``python -m compcoll run``: run a program written for mpi4py, unchanged, with its collectives compressed."""

from __future__ import annotations

import argparse
import sys

from ..errors import InvalidArgument
from ..execute.compiled_plan import named_codec
from ..mpi.intracomm import Intracomm
from ..mpi.settings import Settings
from ..mpi.totals import Totals
from ..transports.job_end import end_job_with_uncaught_errors
from ..transports.library import MPI
from .arguments import add_codec_options, codec_text, parse_bytes

DESCRIPTION = (
    "Runs a program written for mpi4py with MPI.COMM_WORLD replaced by a compcoll.Intracomm, which compresses large "
    "sums of floating-point values. At the end rank 0 prints to stderr what its collectives took, and what was saved."
)

EXAMPLE = "mpirun -n 4 python -m compcoll run --codec zfp:rate=16 program.py its arguments"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_codec_options(parser, "the codec, such as zfp or int8; without it nothing is compressed, only counted")
    add = parser.add_argument
    add("--min-bytes", metavar="SIZE", help="compress messages from this size on; default: if the model says it pays")
    add("--moved", action="store_true", help="also compress values that are only moved, as by Bcast and Allgather")
    add("--dry-run", action="store_true", help="compress nothing, and print what would have been saved")
    add(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, with the rest as arguments"
    )
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="the program and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the program."""
    from mpi4py.run import run_command_line  # not before compcoll has looked for mpi4py

    program = ["-m", *args.module] if args.module else args.program
    if not program:
        raise InvalidArgument(f"no program was given: {EXAMPLE}")
    codec = codec_text(args)
    named_codec(codec, {})
    totals, world = Totals(args.dry_run), MPI.COMM_WORLD
    least = None if args.min_bytes is None else 0 if args.min_bytes == "0" else parse_bytes(args.min_bytes)
    settings = Settings(codec, {}, least, args.moved, args.dry_run, totals)
    rank, heading = world.rank, f"compcoll run, {codec or 'no codec'}: collectives of rank 0 of {world.size}"
    end_job_with_uncaught_errors()
    MPI.COMM_WORLD = Intracomm._with(world, settings)  # type: ignore[misc]
    try:
        run_command_line(program)
    finally:
        if rank == 0:
            sys.stdout.flush()
            print(totals.table(heading), file=sys.stderr, flush=True)
    return 0
