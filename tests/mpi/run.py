"""Runs check functions on all ranks of one MPI job.

    launch/mpirun -n 4 python tests/mpi/run.py                              # every check
    launch/mpirun -n 4 python tests/mpi/run.py check_harness                # one module
    launch/mpirun -n 4 python tests/mpi/run.py check_harness.check_bcast    # one check

A check is a function `check_*(comm)` in a file `check_*.py` beside this one; `comm` is a fresh duplicate of COMM_WORLD,
plain asserts on any rank. A function `check_*(comm, algorithm)` is one check `check_*_by_NAME` for each of our own
allreduces. A check that does not apply raises `unittest.SkipTest(reason)` on every rank. A line for each check comes
from rank 0; the exit status is not zero if any failed. A check fails if any rank raises; the tracebacks of all ranks
are gathered. A rank that fails while the others wait for it in MPI makes them say where they wait, and ends the job; so
does a check that takes longer than --timeout.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
GRACE = 5.0  # seconds that a failed rank gives the others to get out of the check


def list_checks(path: Path) -> list[str]:
    """Names of the checks in a file, without importing it (that would start MPI)."""
    names: list[str] = []
    for node in ast.parse(path.read_text(), str(path)).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
            if len(node.args.args) == 1:
                names.append(node.name)
                continue
            from promises import ALGORITHMS

            names += [f"{node.name}_by_{algorithm}" for algorithm in ALGORITHMS]
    return names


def list_modules(folder: Path = HERE) -> list[Path]:
    return sorted(folder.glob("check_*.py"))


def expand(selected: Sequence[str], folder: Path) -> list[str]:
    """`module.check` names for the modules and checks selected (all, where none is)."""
    everything = [f"{path.stem}.{name}" for path in list_modules(folder) for name in list_checks(path)]
    if not selected:
        return everything
    wanted = []
    for name in selected:
        here = [check for check in everything if check == name or check.partition(".")[0] == name]
        if not here:
            sys.exit(f"no check {name!r}; there are {', '.join(everything)}")
        wanted += here
    return wanted


class Runner:
    """Runs checks one after another; rank 0 writes one JSON line per event to `results`."""

    def __init__(self, timeout: float, results: Path | None) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD.Dup()
        self.timeout = timeout
        self.results = results.open("a") if results is not None and self.world.rank == 0 else None
        self.pids = self.world.allgather(os.getpid())
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def run(self, names: Sequence[str]) -> bool:
        good = [self.check(name) for name in names]
        if self.world.rank == 0:
            print(f"{sum(good)} of {len(good)} checks passed or skipped on {self.world.size} ranks", flush=True)
        return all(good)

    def check(self, name: str) -> bool:
        self.note(check=name, status="started")
        start = time.perf_counter()
        with self.watchdog():
            status, detail = self.call(name)
            self.meet(failed=status == "failed", detail=detail)
        outcomes = self.world.allgather((status, detail))
        seconds = time.perf_counter() - start

        statuses = [status for status, _ in outcomes]
        status = next((s for s in ("failed", "skipped") if s in statuses), "passed")
        if status == "skipped" and "passed" in statuses:
            status, outcomes = "failed", [(s, d or "(passed)") for s, d in outcomes]
        details = _per_rank([detail for _, detail in outcomes])
        self.note(check=name, status=status, detail=details, seconds=round(seconds, 4))
        if self.world.rank == 0:
            reason = f" ({outcomes[0][1]})" if status == "skipped" else ""
            print(f"{status:8}{name}  {seconds:.2f} s{reason}", flush=True)
            if status == "failed":
                print(details, flush=True)
        return status != "failed"

    def call(self, name: str) -> tuple[str, str]:
        module, _, function = name.partition(".")
        try:
            imported, (of_each, _, algorithm) = importlib.import_module(module), function.partition("_by_")
            comm = self.world.Dup()
            if hasattr(imported, function):
                getattr(imported, function)(comm)
            else:
                getattr(imported, of_each)(comm, algorithm)
            comm.Free()
        except unittest.SkipTest as skip:
            return "skipped", str(skip)
        except (Exception, SystemExit):
            return "failed", traceback.format_exc()
        return "passed", ""

    def meet(self, *, failed: bool, detail: str) -> None:
        """Wait for all ranks to leave the check; a failed one does not wait for ever."""
        everyone_left = self.world.Ibarrier()
        give_up = time.monotonic() + min(GRACE, self.timeout / 2)
        while not everyone_left.Test():
            time.sleep(0.001)
            if failed and time.monotonic() > give_up:
                sys.stderr.write(f"rank {self.world.rank} failed, others are still in the check:\n{detail}")
                sys.stderr.flush()
                for rank, pid in enumerate(self.pids):
                    if rank != self.world.rank:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGUSR1)
                time.sleep(1.0)
                self.world.Abort(1)

    @contextlib.contextmanager
    def watchdog(self) -> Iterator[None]:
        """Every rank says where it is when time is up, and ends 2 s later, even inside C++ that holds the GIL."""
        faulthandler.dump_traceback_later(self.timeout)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self.timeout + 2.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            faulthandler.cancel_dump_traceback_later()

    def note(self, **event: object) -> None:
        if self.results is not None:
            self.results.write(json.dumps(event) + "\n")
            self.results.flush()


def _per_rank(details: Sequence[str]) -> str:
    """The ranks' reports, equal ones said once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, detail in enumerate(details):
        if detail:
            ranks_of.setdefault(detail.rstrip(), []).append(rank)
    return "\n".join(
        f"[rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}] {detail}" for detail, ranks in ranks_of.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help="module or module.check; default: all")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a check may take")
    parser.add_argument("--results", type=Path, help="append one JSON line per event")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the check_*.py files are")
    arguments = parser.parse_args()

    # The checks' folder, and tests/ for the references that the other tests use, too.
    sys.path[:0] = [str(arguments.folder.resolve()), str(HERE.parent)]
    names = expand(arguments.checks, arguments.folder)
    good = Runner(arguments.timeout, arguments.results).run(names)
    time.sleep(0.02)  # gloo's threads let go of tensors under the GIL, and abort if the interpreter has ended
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
