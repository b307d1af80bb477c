"""Load the machine during a measurement: processes and threads keep cores busy until it ends."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import UsageError

LOWEST_PRIORITY = 19

# The process ends with its parent, since otherwise it would spoil later measurements.
_BURNER = """
import os
os.nice({nice})
print(flush=True)
while os.getppid() == {parent}:
    for _ in range(100_000):
        pass
"""
_TURNS = 10_000
"""Iterations per turn: some tenths of a millisecond of Python with the GIL, or milliseconds of hashing without it."""


@dataclass(frozen=True)
class Load:
    """The load beside a measurement.

    Attributes
    ----------
    burners, nice : int
        Number of busy processes on each node, and their niceness.
    python_threads, native_threads : int
        Numbers of busy threads in each rank, which compute with the GIL, and without it.
    """

    burners: int = 0
    nice: int = 0
    python_threads: int = 0
    native_threads: int = 0

    def __str__(self) -> str:
        nice = f" at nice {self.nice}" * bool(self.nice)
        parts = [f"{self.burners} busy processes{nice} on each node"] * bool(self.burners)
        parts += [f"{self.python_threads} Python threads that compute in each rank"] * bool(self.python_threads)
        parts += [f"{self.native_threads} busy threads without the GIL in each rank"] * bool(self.native_threads)
        return ", ".join(parts)


def from_arguments(arguments: argparse.Namespace) -> Load:
    """Return the load that the command line describes."""
    if arguments.burner_nice > LOWEST_PRIORITY:
        raise UsageError(f"--burner-nice {arguments.burner_nice}: 0 to {LOWEST_PRIORITY} is needed")
    if arguments.burner_nice and not arguments.burners:
        raise UsageError(f"--burner-nice {arguments.burner_nice} has no effect without burners: also give --burners K")
    return Load(arguments.burners, arguments.burner_nice, arguments.python_threads, arguments.native_threads)


@contextlib.contextmanager
def under(load: Load, *, first_on_node: bool, barrier: Callable[[], object]) -> Iterator[None]:
    """Keep cores busy inside this context. Collective.

    Parameters
    ----------
    load : Load
        The load.
    first_on_node : bool
        Whether this rank starts its node's processes.
    barrier : callable
        Waits for all ranks.
    """
    over = threading.Event()
    works = [_count] * load.python_threads + [_hash] * load.native_threads
    threads = [threading.Thread(target=_busy, args=(over, work), daemon=True) for work in works]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(load.burners if first_on_node else 0):
            program = [sys.executable, "-S", "-c", _BURNER.format(nice=load.nice, parent=os.getpid())]
            processes.append(subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # wait until it runs
        for thread in threads:
            thread.start()
        barrier()
        yield
    finally:
        over.set()
        for process in processes:
            process.kill()
            process.communicate()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _busy(over: threading.Event, work: Callable[[], object]) -> None:
    while not over.is_set():
        work()


def _count() -> None:
    for _ in range(_TURNS):
        pass


def _hash() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", _TURNS)
