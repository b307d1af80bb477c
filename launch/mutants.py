#!/usr/bin/env python3
"""Mutation testing: cosmic-ray puts a fault into a module, and the tests that reach the place have to see it.

Nothing on disk is changed: a child process has the fault. It runs only those tests without ranks that call the faulty
function, which one run of all of them finds out first. A fault that no test sees is printed, unless
docs/measurements/mutants.md says why it is harmless.

All tests are collected once; where a fault is inside a function, a fork of that process gets the faulty code, which
takes as long as the tests do. Where it is in a module's own lines, a child imports all anew.

    make mutants MUTANTS_SECONDS=900
    make mutants MUTANTS='--only compcoll/collectives/plan.py,compcoll/algorithms/'
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from mutants_faults import ROOT, Fault, Faulty, Place, changed, fault, function_of, harmless, places, put_in

ROOMS = {
    "codecs": ("compcoll/codecs/*.py",),
    "algorithms": ("compcoll/algorithms/*.py",),
    "sparse": ("compcoll/codecs/sparse/*.py",),
    "collectives": ("compcoll/collectives/*.py",),
    "torch": tuple(
        f"compcoll/torch/{name}.py"
        for name in ("policy", "states", "account", "gradients/bucket", "low_rank/fusion", "low_rank/factors")
    ),
}
# What only ranks or a GPU reach: tests/mpi and tests/devices have it.
ELSEWHERE = {"native.py", "device.py", "device_memory.py", "together.py", "__init__.py"}
TESTS = (
    *("tests/algorithms", "tests/codecs", "tests/collectives", "tests/sparse", "tests/model", "tests/torch"),
    *("tests/reliability/test_states.py", "tests/simulation/test_simulation.py"),
    *("tests/test_errors.py", "tests/test_layout.py"),
)
LEAST_SECONDS = 60  # that a fault's tests may last: a machine may be busy
LEAST_CPU_SECONDS = 20
TIMES_LONGER = 10
MOST_CASES = 8  # of a test with many
MOST_TESTS = 200  # for one fault, until some sees it
FEW_TESTS = 80  # of which there may be more if they are quick
MOST_TEST_SECONDS = 15
SECONDS_OF_ALL = 300  # for all tests, if those did not see it
MOST_SECONDS_OF_A_TEST = 10  # and ten times what it takes without faults; what hangs has seen the fault
MEMORY = 16 << 30  # for one fault's tests


class Recorder:
    """A pytest plugin that notes which functions of compcoll each test calls, and how long it lasts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.calls: dict[str, list[str]] = defaultdict(list)
        self.seconds: dict[str, float] = {}
        self._now: set[CodeType] = set()
        self._prefix = str(ROOT / "compcoll")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep some cases of each test."""
        cases: dict[str, list[Any]] = defaultdict(list)
        for item in items:
            cases[item.nodeid.partition("[")[0]].append(item)
        kept = {item for alike in cases.values() for item in self._rng.sample(alike, min(len(alike), MOST_CASES))}
        items[:] = [item for item in items if item in kept]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._now.add(frame.f_code)

    def pytest_runtest_logstart(self) -> None:
        self._now.clear()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        for code in tuple(self._now):
            if code.co_filename.startswith(self._prefix):
                self.calls[f"{code.co_filename}:{code.co_firstlineno}"].append(nodeid)


def run_tests(tests: Sequence[str], plugins: Sequence[Any] = (), *more: str) -> int:
    """Run tests without ranks in this process."""
    import pytest

    words = ["-q", "-m", "not mpi and not slow and not gpu", "-p", "no:cacheprovider", "--hypothesis-profile", "once"]
    return int(pytest.main([*words, *more, *tests], plugins=list(plugins)))


def in_child(
    work: Callable[[], int], seconds: float, output: str = os.devnull, cpu_seconds: float = math.inf
) -> int | None:
    """Run something in a child of this process, and return its status; None if it did not end in time.

    What goes around in circles ends after so many seconds of a core, which a busy machine does not prolong.
    """
    pid = os.fork()
    if not pid:
        status = 70
        with contextlib.suppress(BaseException):
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            if cpu_seconds < math.inf:
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_seconds), math.ceil(cpu_seconds)))
            told = os.open(output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(told, descriptor)
            status = work()
        os._exit(status)
    with contextlib.suppress(OSError):  # whoever is first, parent or child
        os.setpgid(pid, pid)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def recorded(folder: Path, rng: random.Random, kept: bool) -> tuple[dict[str, list[str]], dict[str, float]]:
    """The tests that call each function, and how long they last: what a run of all of them tells."""
    file, told = folder / "calls.json", folder / "tests.txt"

    def record() -> int:
        recorder = Recorder(rng)
        status = run_tests(TESTS, [recorder])
        file.write_text(json.dumps([recorder.calls, recorder.seconds]))
        return status

    if not (kept and file.exists()):
        status = in_child(record, 3600, str(told))
        if status not in (0, 1):
            raise SystemExit(f"the tests did not end well: see {told}")
        if status == 1:
            print(f"some tests fail without any fault, and are not used: see {told}", flush=True)
    calls, seconds = json.loads(file.read_text())
    return calls, seconds


@lru_cache(maxsize=1024)
def names(file: str, module: str) -> bool:
    """Tell whether a file of tests has the name of a module in it."""
    return re.search(rf"\b{module}\b", (ROOT / file).read_text()) is not None


def reaching(place: Place, calls: dict[str, list[str]], seconds: dict[str, float]) -> list[str]:
    """Find the tests that call the function at a place; of a module's own lines, any function. Those come first that
    are likely to see a fault.
    """
    firsts = function_of(place)
    if firsts:
        reached = calls.get(f"{place.path}:{firsts[0]}", [])
    else:
        reached = [test for key, tests in calls.items() if key.startswith(f"{place.path}:") for test in tests]
    breadth = Counter(test for tests in calls.values() for test in tests)
    turns: list[list[str]] = []
    elsewhere = {test: not names(test.partition("::")[0], place.path.stem) for test in reached}
    orders: tuple[Callable[[str], Any], ...] = (
        lambda test: seconds[test],
        lambda test: breadth[test],
        lambda test: (elsewhere[test], breadth[test]),
    )
    for order in orders:
        by_function: dict[str, list[str]] = defaultdict(list)
        for test in sorted({test for test in reached if test in seconds}, key=lambda test: (order(test), test)):
            by_function[test.partition("[")[0]].append(test)
        # One of each test's cases first, then the others.
        turns.append([cases[i] for i in range(MOST_CASES) for cases in by_function.values() if i < len(cases)])
    # In turns the quick ones, those that call little else, and those of files that name the module.
    return list(dict.fromkeys(test for three in zip(*turns, strict=True) for test in three))


def first(tests: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """Take the first of these tests, and more of them if they are quick."""
    total, taken = 0.0, []
    for test in tests[:MOST_TESTS]:
        total += seconds[test]
        if len(taken) >= FEW_TESTS and total > MOST_TEST_SECONDS:
            break
        taken.append(test)
    return taken


NOT_THERE = 90


class Limits(NamedTuple):
    """Seconds for the tests of a fault: for all, all of a core's, for one; and after which no further one begins."""

    seconds: float
    cpu_seconds: float
    of_a_test: float
    enough: float


class Collected:
    """A process that has collected all tests, and a pytest plugin in it: forks of it try faults."""

    def __init__(self, output: Path, failing: Collection[str]) -> None:
        self._asked, there = multiprocessing.Pipe()
        self.failing = failing
        self._here = there
        self._output = output
        self._pid = os.fork()
        if not self._pid:
            with contextlib.suppress(BaseException):
                self._asked.close()
                told = os.open(output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                for descriptor in (1, 2):
                    os.dup2(told, descriptor)
                run_tests(TESTS, [self])
            os._exit(0)
        there.close()

    def pytest_runtestloop(self, session: Any) -> bool:
        """Try faults until nobody asks any more."""
        items: dict[str, list[Any]] = defaultdict(list)
        for item in [item for item in session.items if item.nodeid not in self.failing]:
            for name in {item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]}:
                items[name].append(item)
        assert "mpi4py.MPI" not in sys.modules, "a child must not inherit MPI"
        with contextlib.suppress(EOFError):
            while True:
                path, code, tests, limits = self._here.recv()
                faulty = changed(path, code)
                if faulty is None or any(test not in items for test in tests):
                    self._here.send(NOT_THERE)
                    continue

                cases = dict.fromkeys(case for test in tests for case in items[test])
                work = partial(self._status, path, faulty, list(cases), limits)
                self._here.send(in_child(work, limits.seconds, cpu_seconds=limits.cpu_seconds))
        return True

    def _status(self, path: Path, faulty: dict[CodeType, CodeType], items: list[Any], limits: Limits) -> int:
        if not put_in(path, faulty):
            return NOT_THERE
        failed: list[str] = []

        class Watch:
            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed:
                    failed.append(report.nodeid)

        nowhere = open(os.devnull, "w")  # noqa: SIM115
        end = time.monotonic() + limits.enough
        for item, following in itertools.zip_longest(items, items[1:]):
            if item is items[0]:
                item.config.pluginmanager.register(Watch())
            faulthandler.dump_traceback_later(limits.of_a_test, exit=True, file=nowhere)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if failed:
                return 1
            if time.monotonic() > end:
                break
        return 0

    def status(self, one: Fault, tests: Sequence[str], limits: Limits) -> int | None:
        """How tests, all cases of tests, or whole files end with a fault, as a process does; `NOT_THERE` if it cannot
        be put into what was imported.
        """
        self._asked.send((one.place.path, one.code, list(tests), limits))
        status: int | None = self._asked.recv()
        return status

    def end(self) -> None:
        """End the process."""
        self._asked.close()
        os.waitpid(self._pid, 0)


def is_seen(one: Fault, tests: Sequence[str], seconds: dict[str, float], collected: Collected) -> bool:
    """Tell whether some test fails with a fault: of those that reach it; then of all their cases, and of all others,
    some cases of which may reach it, too.
    """
    few = first(tests, seconds)
    expected, longest = sum(seconds[test] for test in few), max((seconds[test] for test in tests), default=1.0)
    of_a_test = MOST_SECONDS_OF_A_TEST + TIMES_LONGER * longest
    some = Limits(
        max(LEAST_SECONDS, TIMES_LONGER * expected), max(LEAST_CPU_SECONDS, 2 * expected), of_a_test, math.inf
    )
    if few and _status(one, few, some, collected) != 0:
        return True
    files = sorted({test.partition("::")[0] for test in seconds})
    whole = [
        *dict.fromkeys(test.partition("[")[0] for test in tests),
        *sorted(files, key=lambda file: not names(file, one.place.path.stem)),
    ]
    every = Limits(SECONDS_OF_ALL + of_a_test, math.inf, of_a_test, SECONDS_OF_ALL)
    return _status(one, whole, every, collected) not in (0, None)


def _status(one: Fault, tests: Sequence[str], limits: Limits, collected: Collected) -> int | None:
    def work() -> int:
        sys.meta_path.insert(0, Faulty(one.place.path, one.code))
        return run_tests(tests, (), "-x", *(f"--deselect={test}" for test in collected.failing))

    status = collected.status(one, tests, limits)
    if status == NOT_THERE:
        status = in_child(work, limits.seconds, cpu_seconds=limits.cpu_seconds)
    return status


def warm_up() -> None:
    """Import what every child needs, but nothing of compcoll, nor MPI, which a child must not inherit."""
    os.environ |= {"COMPCOLL_PROFILE": "defaults", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    sys.path.insert(0, str(ROOT / "tests"))
    for name in ("numpy", "pytest", "hypothesis.extra.numpy", "scipy.stats", "zfpy", "torch", "torch.distributed"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "compcoll" not in sys.modules and "mpi4py.MPI" not in sys.modules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=900, help="after which no further fault is tried")
    parser.add_argument("--seed", type=int, default=0, help="which faults are tried, if not all can be")
    parser.add_argument("--rooms", default=",".join(ROOMS), help=f"of {', '.join(ROOMS)}")
    parser.add_argument("--only", default="compcoll/", help="files or folders of these, with commas between")
    parser.add_argument("--calls", type=Path, default=ROOT / "build/mutants", help="where notes of the first run go")
    parser.add_argument(
        "--kept", action="store_true", help="go by the notes of an earlier run: the sources are the same"
    )
    args = parser.parse_args()
    os.chdir(ROOT)
    args.calls.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    files = {
        room: [path for pattern in ROOMS[room] for path in sorted(ROOT.glob(pattern)) if path.name not in ELSEWHERE]
        for room in args.rooms.split(",")
    }
    todo = [(room, place) for room, paths in files.items() for path in paths for place in places(path, rng)]
    only = tuple(args.only.split(","))
    todo = [(room, place) for room, place in todo if str(place.path.relative_to(ROOT)).startswith(only)]
    rng.shuffle(todo)
    warm_up()
    calls, seconds = recorded(args.calls, rng, args.kept)
    print(f"{len(todo)} faults, {len(seconds)} tests", flush=True)
    failing = {test for tests in calls.values() for test in tests} - seconds.keys()  # without any fault
    collected = Collected(args.calls / "collected.txt", failing)
    known, counts, end = harmless(), Counter[tuple[str, str]](), time.monotonic() + args.seconds
    with contextlib.suppress(KeyboardInterrupt):  # what was found so far is told
        for room, place in todo:
            if time.monotonic() > end:
                break
            one = fault(place)
            if one is None:
                continue
            tests = reaching(place, calls, seconds)
            if one.key in known:
                outcome = "harmless"
            elif is_seen(one, tests, seconds, collected):
                outcome = "seen"
            else:
                outcome = "not seen" if tests else "not reached"
            counts[room, outcome] += 1
            if counts.total() % 10 == 0:
                print(f"{counts.total()} tried", flush=True)
            if outcome in ("not seen", "not reached"):
                print(f"{outcome}, line {place.line}: {one}", flush=True)
    collected.end()
    for room in files:
        told = ", ".join(f"{outcome} {n}" for (of, outcome), n in sorted(counts.items()) if of == room)
        print(f"{room}: {told or 'none tried'}")
    found = Counter(outcome for _, outcome in counts.elements())
    reached = counts.total() - found["not reached"]
    print(f"not seen: {found['not seen']} of {reached} that tests reach ({found['not seen'] / max(reached, 1):.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
