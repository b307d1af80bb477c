"""``python -m compcoll``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "choose": ("choose", "which codec and algorithm for a buffer, a network and an error, and what they gain"),
    "cubins": ("cubins", "compile the CUDA kernels ahead, so that no rank does in its first call (needs no GPU)"),
    "doctor": ("doctor", "what compcoll finds here, whether it works, and what to change (also under mpirun)"),
    "explain": ("explain", "what the cost model predicts for every algorithm, and what auto chooses"),
    "simulate": ("simulate", "how long allreduces would take on a network that is not there, for thousands of ranks"),
    "tune": ("tune", "measure links, codecs and MPI, and store a profile for algorithm=auto (under mpirun)"),
}
"""The commands by name: each one's module, which has ``add_parser(subparsers)`` and ``run(args)``, and its purpose."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line's by default.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m compcoll", description="Compressed MPI collectives: tools.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, purpose) in COMMANDS.items():
        # Some commands start MPI: only the one that is asked for is loaded.
        if given and given[0] == name:
            import_module(f".tools.{module}", "compcoll").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=purpose)
    args = parser.parse_args(given)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
