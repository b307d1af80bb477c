"""``python -m compcoll``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from .errors import CompcollError, MPIMissing

COMMANDS = {
    "choose": "which codec and algorithm for a buffer, a network and an error, and what they gain",
    "cubins": "compile the CUDA kernels ahead, so that no rank does in its first call (needs no GPU)",
    "doctor": "what compcoll finds here, whether it works, and what to change (also under mpirun)",
    "explain": "what the cost model predicts for every algorithm, and what auto chooses",
    "run": "run a program written for mpi4py with its sums compressed, and print what that saved (under mpirun)",
    "simulate": "how long allreduces would take on a network that is not there, for thousands of ranks",
    "trace": "merge the timelines of a run under COMPCOLL_TRACE, and print where the time went",
    "tune": "measure links, codecs and MPI, and store a profile for algorithm=auto (under mpirun)",
}
"""The help texts of the commands. Each command is a module of `compcoll.tools` that defines ``DESCRIPTION``,
``EXAMPLE``, ``add_arguments`` and ``run``.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status of the process.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command's name and its arguments; by default those of the command line.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m compcoll", description="Compressed MPI collectives: tools.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        command = subparsers.add_parser(name, help=purpose)
        # Import only the requested command, since some commands start MPI.
        if given and given[0] == name:
            try:
                tool = import_module(f".tools.{name}", "compcoll")
            except MPIMissing as error:
                return _failed(name, error)
            command.description, command.epilog = tool.DESCRIPTION, f"example: {tool.EXAMPLE}"
            command.set_defaults(run=tool.run)
            tool.add_arguments(command)
    args = parser.parse_args(given)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except CompcollError as error:
        return _failed(given[0], error)
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _failed(command: str, error: CompcollError) -> int:
    print(f"compcoll {command}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
