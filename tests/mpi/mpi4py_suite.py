"""Runs mpi4py's own tests, from its source distribution, on all ranks of one MPI job, with its communicators replaced.

    launch/mpirun -n 3 python tests/mpi/mpi4py_suite.py FOLDER                              # compcoll, without a codec
    launch/mpirun -n 3 python tests/mpi/mpi4py_suite.py FOLDER --codec zfp --rate 32 --min-bytes 0 --moved
    launch/mpirun -n 3 python tests/mpi/mpi4py_suite.py FOLDER --plain                      # what mpi4py does with them
    launch/mpirun -n 3 python tests/mpi/mpi4py_suite.py FOLDER --only test_comm test_cco_buf.TestCCOBufWorld.testReduce

FOLDER is `build/mpi4py-VERSION/test`, which `make test-all` fetches. MPI.COMM_WORLD and MPI.COMM_SELF are instances of
compcoll.Intracomm before the first test is imported; nothing else is changed. A test has the worst outcome that it has
on any rank; it is skipped where every rank skips it. A line for each test comes from rank 0.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import json
import sys
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from mpi4py import MPI

import compcoll

LEFT_OUT = {
    "test_dynproc": "starts processes, or connects to them",
    "test_spawn": "starts processes",
    "test_util_pool": "mpi4py.futures: worker processes and threads, and no collectives",
    "test_file": "files",
    "test_io": "files",
    "test_rma*": "windows",
    "test_win": "windows",
    "test_util_sync": "locks and counters made of windows",
    "test_ulfm": "failed ranks, which few MPIs survive",
    "test_datatype": "datatypes without communicators, for a sixth of the time",
    "test_util_dtlib": "datatypes without communicators, for a third of the time",
}
"""Patterns of the names of test files that have nothing to do with collectives of an Intracomm, and why."""

SKIPPED, PASSED, FAILED, ERROR = OUTCOMES = ("skipped", "passed", "failed", "error")
"""From the best to the worst."""


def replace(**options: Any) -> None:
    """Put instances of compcoll.Intracomm with these options in the place of mpi4py's two communicators."""
    MPI.COMM_WORLD, MPI.COMM_SELF = (compcoll.Intracomm(comm, **options) for comm in (MPI.COMM_WORLD, MPI.COMM_SELF))


def count_compressed() -> list[str]:
    """Return a list to which the name of each method is added whose blocking call is compressed."""
    found, run = list[str](), compcoll.Intracomm._run

    def counted(self: compcoll.Intracomm, name: str, call: Any, choice: Any) -> None:
        found.append(name)
        run(self, name, call, choice)

    compcoll.Intracomm._run = counted  # type: ignore[method-assign]
    return found


def load(folder: Path, only: list[str]) -> unittest.TestSuite:
    """The tests of the folder, or those of them that are named."""
    sys.path.insert(0, str(folder.resolve()))
    sys.modules.update({"cupy": None, "numba": None})  # type: ignore[dict-item]  # arrays on GPUs: as its main.py does
    names = sorted(path.stem for path in folder.glob("test_*.py"))
    assert names, f"no tests of mpi4py in {folder}"
    names = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT)]
    return unittest.defaultTestLoader.loadTestsFromNames(only or names)


class Outcomes(unittest.TestResult):
    """What became of each test on all ranks, which begin the next one together."""

    def __init__(self, comm: MPI.Intracomm, seconds: float) -> None:
        super().__init__()
        self.comm = comm
        self.seconds = seconds
        self.of_test: dict[str, tuple[str, str]] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._before = self._found()
        self._started = time.monotonic()
        faulthandler.dump_traceback_later(self.seconds, exit=True)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        new = {status: found[len(self._before[status]) :] for status, found in self._found().items()}
        mine = next(((status, str(found[-1][1])) for status, found in new.items() if found), (PASSED, ""))
        gathered = self.comm.allgather((test.id(), *mine))
        faulthandler.cancel_dump_traceback_later()
        assert len({name for name, _, _ in gathered}) == 1, f"ranks run different tests: {gathered}"
        worst = max((status for _, status, _ in gathered), key=OUTCOMES.index)
        texts = [f"[rank {rank}] {text}" for rank, (_, status, text) in enumerate(gathered) if text and status == worst]
        detail = "\n".join(texts)
        self.of_test[test.id()] = (worst, detail)
        if self.comm.rank == 0:
            print(f"{worst:8}{test.id()}  {time.monotonic() - self._started:.2f} s", flush=True)
            if worst in (FAILED, ERROR):
                print(detail, flush=True)

    def _found(self) -> dict[str, list[tuple[unittest.TestCase, str]]]:
        return {ERROR: [*self.errors], FAILED: [*self.failures], SKIPPED: [*self.skipped]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where mpi4py's tests are")
    parser.add_argument("--plain", action="store_true", help="with mpi4py's own communicators")
    parser.add_argument("--codec", help="compress sums by it")
    parser.add_argument("--rate", type=int, help="bits per value")
    parser.add_argument("--min-bytes", type=int, help="compress no smaller buffers")
    parser.add_argument("--moved", action="store_true", help="compress values that are only moved, too")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a test may take")
    parser.add_argument("--results", type=Path, help="write outcomes there, as JSON")
    parser.add_argument("--only", nargs="+", default=[], help="names of tests, or of modules or classes of them")
    arguments = parser.parse_args()

    own = MPI.COMM_WORLD.Dup()
    if not arguments.plain:
        options = {name: getattr(arguments, name) for name in ("codec", "rate", "min_bytes", "moved")}
        replace(**{name: value for name, value in options.items() if value is not None})
    compressed = count_compressed()
    outcomes = Outcomes(own, arguments.timeout)
    load(arguments.folder, arguments.only).run(outcomes)
    if own.rank == 0:
        counts = Counter(status for status, _ in outcomes.of_test.values())
        print(", ".join(f"{counts[status]} {status}" for status in OUTCOMES), flush=True)
        print("compressed calls:", dict(Counter(compressed)), flush=True)
        if arguments.results is not None:
            arguments.results.write_text(json.dumps(outcomes.of_test, indent=1))


if __name__ == "__main__":
    main()
