#!/usr/bin/env python3
"""Train with each compression method and several seeds; write accuracy against what is sent, as a table and a plot.

    python launch/study.py                                  # the digits, all methods, seeds 0 to 2
    python launch/study.py --task text                      # a small GPT: its loss, not its accuracy
    python launch/study.py --only 'topk*,onebit' --seeds 0  # some of them
    python launch/study.py --task text --only '*adamw*' --minutes 40  # in pieces: the most important methods first
    python launch/study.py --report                         # table and plot again, from the records that are there

Each training is launch/train_ddp.py's, under launch/mpirun. Its record goes to FOLDER/METHOD-SEED.json as soon as it
ends, so that a study that was interrupted goes on where it was; then what has a record of an older code is run again.
One that takes too long is ended, and the others go on.
The page and the plot are FOLDER.md and FOLDER.png.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import figures
from study_methods import STUDIES, Method, Study
from study_page import report

from osu_like_bench import machine
from osu_like_bench.errors import UsageError
from osu_like_bench.report import Progress

LAUNCH = Path(__file__).resolve().parent


def parser() -> argparse.ArgumentParser:
    """The command line."""
    text, _, rest = (__doc__ or "").partition("\n\n")
    top = argparse.ArgumentParser(
        "study.py", description=text, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--task", choices=list(STUDIES), default="digits", help="what to learn (default: %(default)s)")
    top.add_argument("--only", default="*", metavar="NAMES", help="methods, by names or patterns, with commas")
    top.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    top.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    top.add_argument("--epochs", type=int, help="passes over the data (default: the task's)")
    top.add_argument(
        "--timeout", type=float, default=900, help="seconds that a training may take (default: %(default)s)"
    )
    top.add_argument("--minutes", type=float, default=math.inf, help="end after so many; the same again goes on")
    top.add_argument("--records", type=Path, metavar="FOLDER", help="(default: docs/measurements/study, or study-text)")
    top.add_argument("--report", action="store_true", help="train nothing")
    top.add_argument("--list", action="store_true", help="name the methods")
    return top


def chosen(study: Study, patterns: str) -> list[Method]:
    """A study's methods whose names fit.

    Raises
    ------
    UsageError
        If a pattern fits none.
    """
    for pattern in patterns.split(","):
        if not any(fnmatch.fnmatchcase(method.name, pattern) for method in study.methods):
            raise UsageError(f"--only {pattern}: none of {', '.join(method.name for method in study.methods)}")
    return [each for each in study.methods if any(fnmatch.fnmatchcase(each.name, p) for p in patterns.split(","))]


def in_turn(study: Study, methods: Sequence[Method], seeds: Sequence[int]) -> list[str]:
    """Names of trainings, seed by seed: those of the most important methods, then the others'."""
    first = sorted((m for m in methods if m.name in study.first), key=lambda m: study.first.index(m.name))
    others = [m for m in methods if m.name not in study.first]
    return [f"{method.name}-{seed}" for part in (first, others) for seed in seeds for method in part]


def of_this_code(study: Study, record: Path) -> bool:
    """Tell whether a record was made with code that loses the same as today's."""
    if figures.commits(record) == {machine.commit()} - {""}:
        return True
    return figures.why_older([record], figures.PAGES[study.records.name].times) == figures.UP_TO_DATE


def run(arguments: argparse.Namespace, records: Path) -> int:
    """Run what has no record, or one of an older code, until the time is up; return how many trainings failed."""
    study = STUDIES[arguments.task]
    names = in_turn(study, chosen(study, arguments.only), arguments.seeds)
    missing = [name for name in names if not (records / f"{name}.json").exists()]
    older = [name for name in names if name not in missing and not of_this_code(study, records / f"{name}.json")]
    todo = missing + older
    if not todo:
        return 0
    records.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(LAUNCH / "mpirun"), "-n", str(arguments.ranks), "python"]
    command += [str(LAUNCH / "study_runs.py"), "--task", arguments.task, "--records", str(records)]
    command += [] if arguments.epochs is None else ["--epochs", str(arguments.epochs)]
    deadline = time.monotonic() + 60 * arguments.minutes
    progress, failed = Progress(len(todo)), 0
    try:
        while todo and time.monotonic() < deadline:
            ended = _run_some([*command, *todo], arguments.timeout, deadline, progress)
            del todo[:ended]
            if todo and time.monotonic() < deadline:
                failed += 1
                progress.print(f"{todo.pop(0)} did not end within {arguments.timeout:.0f} s, or failed")
    finally:
        progress.close()
    if todo:
        print(f"study: {len(todo)} trainings are still to be done: the same command goes on", file=sys.stderr)
    return failed


def _run_some(command: Sequence[str], seconds: float, deadline: float, progress: Progress) -> int:
    """Run trainings on the same ranks until one fails or takes too long, or the time is up; return how many ended."""
    ended = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            watch = _watch(process, seconds, deadline)
            for line in process.stdout:
                watch.cancel()
                watch = _watch(process, seconds, deadline)
                progress.print(line.rstrip())
                progress.step(line.split()[0])
                ended += 1
            watch.cancel()
        except BaseException:
            process.terminate()
            raise
    return ended


def _watch(process: subprocess.Popen[str], seconds: float, deadline: float) -> threading.Timer:
    """End the ranks after some time, and at the deadline, unless cancelled."""
    left = min(seconds, deadline - time.monotonic(), threading.TIMEOUT_MAX)
    timer = threading.Timer(max(left, 0), process.terminate)
    timer.daemon = True
    timer.start()
    return timer


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a run failed, 2 if the arguments were wrong."""
    top = parser()
    arguments = top.parse_args(words)
    study = STUDIES[arguments.task]
    records = arguments.records or study.records
    try:
        if arguments.list:
            print("\n".join(f"{method.name:28} {method.options}" for method in chosen(study, arguments.only)))
            return 0
        failed = 0 if arguments.report else run(arguments, records)
        if arguments.report or any(records.glob("*.json")):
            report(study, records)
    except UsageError as error:
        top.error(str(error))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
