"""Measure a page of docs/measurements and write it. Without a page, list all, and whether their timed code has changed.

python -m osu_like_bench.pages                                 # `make figures`; exit status 1 if some are older
python -m osu_like_bench.pages busy                            # measure this page: `make measurements PAGE=busy`
python -m osu_like_bench.pages low-rank --only 'work-*'        # measure some cases; other figures stay
python -m osu_like_bench.pages study-text --minutes 40         # trainings: run it again to measure the remaining ones
python -m osu_like_bench.pages busy --report                   # only write the page again, from its record

Labs of netlab need root. Cases that cannot be measured here (no root, no such MPI) are listed; their earlier figures
stay. The record docs/measurements/PAGE.json holds the commands. To measure something else, add a case there, and a mark
to PAGE.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ..machine import REPOSITORY
from .records import matches

if TYPE_CHECKING:
    from .documents import Page

MODULES = ("networks", "busy", "peers", "one_machine", "groups", "steps", "study", "scaling", "reliability", "errors")


def pages() -> dict[str, Page]:
    """Return all pages by name."""
    return {page.name: page for module in MODULES for page in import_module(f".{module}", __package__).PAGES}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. Return 1 if a page is older than its code, a case failed, or a goal is missed; else 0."""
    known = pages()
    top = argparse.ArgumentParser(
        "python -m osu_like_bench.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("page", nargs="?", choices=list(known), metavar="PAGE", help=f"one of {', '.join(known)}")
    top.add_argument("--only", default="*", metavar="NAMES", help="cases to measure: names or patterns, with commas")
    top.add_argument("--quick", action="store_true", help="one launch of each case, with a fifth of its time")
    top.add_argument("--minutes", type=float, default=float("inf"), help="launch nothing after this time")
    top.add_argument("--report", action="store_true", help="measure nothing, only write the page")
    top.add_argument("--list", action="store_true", help="only print the commands")
    options = top.parse_args(words)
    if options.page is None:
        states = {name: page.state() for name, page in known.items()}
        print("\n".join(f"{name:18} {state}" for name, state in states.items()))
        return int(any(state.startswith("older") for state in states.values()))
    from .run import Measurement

    os.chdir(REPOSITORY)
    page = known[options.page]
    record = page.record()
    patterns = options.only.split(",")
    chosen = list(dict.fromkeys(name for each in patterns for name in record.cases if matches(name, [each])))
    if not chosen:
        top.error(f"--only {options.only} matches no case: there are {'; '.join(record.cases)}")
    if options.list:
        print("\n".join(f"{name:24} {record.cases[name].command}" for name in chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that labs are deleted
    failed: dict[str, str] = {}
    if not options.report:
        end = time.monotonic() + 60 * options.minutes
        failed = Measurement(page, record, options.quick, end).run(chosen)
    missed = page.write(page.record())  # of rounded figures, as `--report` writes it
    for name, why in failed.items():
        print(f"{page.name}: {name} could not be measured: {why}", file=sys.stderr)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.path.append(str(REPOSITORY / "launch"))  # netlab's modules
    sys.exit(main())
