"""Which pages of docs/measurements/ are older than the code that they time, and how to make one anew.

python launch/figures.py                 # all pages: `make figures`; exit status 1 if some are older
python launch/figures.py --make busy     # measure that page: `make measurements PAGE=busy`

A page's records say the commit that they were measured at. A page is older if code that it times is another since, or
if no commit was noted, or one with changes that no commit has. Comments, docstrings, layout and stubs are no code.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = Path("docs/measurements")
_COMMIT = re.compile(r"`([0-9a-f]{7,40})(-dirty)?`")
_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""", re.DOTALL)
_STUBS = ":!*.pyi"
_NAMED = 3
"""So many changed files are told by name."""
UP_TO_DATE = "up to date"
UNKNOWN = "?"
"""Stands for the files that have changed since a commit that git does not know."""
_WITH_OTHERS = (".run.json", "-profile.json")
"""Ends of names of files that were written with a record, and note no commit of their own."""
_BY_HAND = "its tables are set by hand, from the commands that stand on it"


@dataclass(frozen=True)
class Page:
    """A page, or a group of records that stand in other pages.

    Attributes
    ----------
    records : str
        A pattern of files in docs/measurements/, JSON or pages that name commits.
    command : str
        Words after ``python`` that make it; empty where that is done by hand.
    times : tuple of str
        Paths of the code whose figures it has; ``:!`` before those that are not meant, as git writes it.
    """

    records: str
    command: str
    times: tuple[str, ...] = ("compcoll",)


_ON_GPUS = tuple(
    f":!compcoll/{path}"
    for path in (
        "devices/cu*",
        "devices/streams.py",
        "devices/watched.py",
        "kernels/device*",
        "model/gpu.py",
        "transports/device.py",
        "transports/gpu_aware.py",
        "transports/ipc.py",
        "transports/streamed.py",
        "collectives/device*",
        "collectives/together.py",
    )
)
"""What no figure of a page measured on CPUs depends on."""
_ASKED = (
    ":!compcoll/__init__.py",
    ":!compcoll/tools/[!imt]*",
    ":!compcoll/__main__.py",
    ":!compcoll/simulation/plot.py",
    ":!compcoll/torch/gradients/advice.py",
)
"""Names and the version, warnings, and commands for people: all tools but ``machine`` and ``tune``."""
_UNTUNED = (":!compcoll/tools/tune.py",)
"""What nothing depends on that runs under the default profile, or another that is stored."""
_SUMS_IN_MEMORY = tuple(
    f":!compcoll/kernels/{name}" for name in ("shared_sum.cpp", "copies.h", "apart.h", "two_ways.h")
)
"""What no figure between nodes depends on."""
_TRAINING = (":!compcoll/torch/optimizers", ":!compcoll/torch/low_rank")
_OVER_GROUPS = (":!compcoll/torch/groups/[!m]*", ":!compcoll/torch/groups/member.py")
"""What only collectives over process groups run."""
_ON_CPUS = ("compcoll", *_ON_GPUS, *_ASKED)
_UNDER_MPI = (*_ON_CPUS, *_UNTUNED, *_OVER_GROUPS, ":!compcoll/simulation")
_WITHOUT_TORCH = (*_ON_CPUS, *_UNTUNED, ":!compcoll/torch")
_CALLS = (*_WITHOUT_TORCH, ":!compcoll/simulation", ":!compcoll/tools")
_SIMULATED = ("compcoll/algorithms", "compcoll/layout.py", "compcoll/simulation", "compcoll/torch/low_rank", *_ASKED)
_WHO_SENDS = tuple(
    f":!compcoll/kernels/{name}"
    for name in (
        *("apart.h", "body.*", "copies.h", "exchange.*", "executor.*", "futex.h", "gathered.*", "known_calls.*"),
        *("message.h", "mpi_*", "patience.h", "program.*", "python_calls.h", "shared_*", "stopwatch.h", "team.*"),
        "two_ways.h",
    )
)
"""Kernels that call, wait and send, but lose nothing."""
_LEARNT = ("compcoll/codecs", "compcoll/kernels", "compcoll/feedback.py", *_ON_GPUS, *_WHO_SENDS)
"""What accuracy depends on: not who sends, but what is lost."""
_GRADIENTS = (*_LEARNT, "compcoll/torch/gradients", "compcoll/torch/low_rank", *_ASKED)
_ONE_MACHINE = "launch/one_machine.py --only"
_STEPS = "launch/training_steps.py --only"

PAGES: Mapping[str, Page] = {
    "networks": Page("networks/[!m]*.json", "launch/measurements", (*_WITHOUT_TORCH, *_SUMS_IN_MEMORY)),
    "networks-in-memory": Page("networks/memory-*.json", "launch/measurements --only memory-*", _WITHOUT_TORCH),
    "networks-tuned": Page(
        "networks/*-[ap][ur]*.json",
        "launch/measurements --only *-profile,*-auto,simulated-*",
        ("compcoll/tools/tune.py",),
    ),
    "busy": Page("busy/*.json", "launch/busy", (*_UNDER_MPI, *_TRAINING)),
    "peers": Page("peers/*.json", "launch/peers", (*_ON_CPUS, ":!compcoll/torch/optimizers", ":!compcoll/simulation")),
    "reliability": Page("reliability.md", "launch/reliability.py", _CALLS),
    "study": Page("study/*.json", "launch/study.py", _GRADIENTS),
    "study-text": Page("study-text/*.json", "launch/study.py --task text", (*_GRADIENTS, "compcoll/torch/optimizers")),
    "scaling": Page("scaling.json", "launch/scaling.py", _SIMULATED),
    "one-machine": Page("one-machine/*.json", f"{_ONE_MACHINE} codecs,4-ranks,2-ranks", _CALLS),
    "selection": Page(
        "selection/*.json",
        f"{_ONE_MACHINE} normal,laplace,gradients",
        (
            "compcoll/codecs/sparse",
            "compcoll/kernels/sparse*",
            "compcoll/kernels/threshold_search.h",
            "compcoll/kernels/laplacian.h",
        ),
    ),
    "groups": Page("groups/*.json", "launch/process_groups.py", (*_ON_CPUS, *_TRAINING, ":!compcoll/simulation")),
    "ddp": Page("ddp/*.json", f"{_STEPS} ddp/*", (*_UNDER_MPI, *_TRAINING)),
    "local-steps": Page("local-steps/*.json", f"{_STEPS} local-steps/*", (*_UNDER_MPI, ":!compcoll/torch/low_rank")),
    "low-rank": Page("low-rank/*.json", f"{_STEPS} low-rank/*", (*_UNDER_MPI, ":!compcoll/torch/optimizers")),
}

_NO_FIGURES = {"index", "mutants"}


def pages() -> dict[str, Page]:
    """All pages by name: those of `PAGES`, and others, which name their commits themselves."""
    others = sorted({path.stem for path in (REPOSITORY / FOLDER).glob("*.md")} - set(PAGES) - _NO_FIGURES)
    return {**PAGES, **{name: Page(f"{name}.md", "") for name in others}}


def main(words: Sequence[str]) -> int:
    """The exit status: 1 if pages are older than the code, or one could not be made."""
    parser = argparse.ArgumentParser("figures", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--make", choices=list(pages()), metavar="PAGE", help=f"one of {', '.join(pages())}")
    options = parser.parse_args(words)
    if options.make:
        return make(options.make)
    older = 0
    for name, page in pages().items():
        told = state(page)
        older += told != UP_TO_DATE
        print(f"{name:18} {told}")
    return 1 if older else 0


def make(name: str) -> int:
    """Measure a page anew: the exit status of its command."""
    command = pages()[name].command
    if not command:
        print(f"figures: {name}: {_BY_HAND}: docs/measurements/{name}.md", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, *command.split()], cwd=REPOSITORY).returncode


def state(page: Page, repository: Path = REPOSITORY) -> str:
    """Tell of a page whether it is up to date, and if not, why."""
    files = sorted((repository / FOLDER).glob(page.records))
    return why_older(files, page.times, repository) if files else "older: never measured"


def why_older(files: Sequence[Path], times: Sequence[str], repository: Path = REPOSITORY) -> str:
    """As `state`, of some records of the code at these paths."""
    found = {commit for file in files for commit in commits(file)}
    why = []
    if missing := sum(not commits(file) for file in files if not file.name.endswith(_WITH_OTHERS)):
        why.append(f"{missing} of its records note no commit")
    if dirty := sorted(commit for commit in found if commit.endswith("-dirty")):
        why.append(f"measured with changes that no commit has ({', '.join(dirty)})")
    later = {commit: told for commit in sorted(found - set(dirty)) if (told := _later(commit, times, repository))}
    if later:
        worst = max(later, key=lambda commit: len(later[commit]))
        why.append(_told(later[worst], worst, len(later) - 1))
    return f"older: {'; '.join(why)}" if why else UP_TO_DATE


def commits(file: Path) -> set[str]:
    """The commits that a record notes; those of a page stand in it as code."""
    if file.suffix != ".json":
        return {"".join(found) for found in _COMMIT.findall(file.read_text())}
    content = json.loads(file.read_text())
    if "not_measured" in content:
        return set()
    noted = content.get("run", {}).get("commit")
    return {str(noted)} if noted else set()


def _later(commit: str, paths: Sequence[str], repository: Path) -> list[str]:
    """Name the files among these paths whose code is another than that commit's."""
    raw = ["diff", "--raw", "-z", "--no-renames", "--abbrev=40", commit, "HEAD", "--", *paths, _STUBS]
    try:
        told = _git(repository, *raw).split("\0")
    except subprocess.CalledProcessError:
        return [UNKNOWN]
    changed = []
    for about, name in zip(told[::2], told[1::2], strict=False):
        before, after = about.split()[2:4]
        if _code(repository, before, Path(name).suffix) != _code(repository, after, Path(name).suffix):
            changed.append(name)
    return changed


def _told(files: Sequence[str], commit: str, others: int) -> str:
    """Say which files have changed since that commit, and since how many others of the page's some have."""
    more = f", some since {others} other commit{'s' * (others > 1)}" if others else ""
    if files == [UNKNOWN]:
        return f"{commit} is no commit of this repository{more}"
    named = ", ".join(files[:_NAMED]) + ", …" * (len(files) > _NAMED)
    return f"{len(files)} file{'s' * (len(files) > 1)} that it times changed since {commit} ({named}){more}"


@functools.cache
def _code(repository: Path, blob: str, suffix: str) -> str:
    """What a stored file does: its text without comments, docstrings and layout; empty for a file that is not there."""
    if not blob.strip("0"):
        return ""
    text = _git(repository, "cat-file", "blob", blob)
    if suffix == ".py":
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
        return ast.dump(tree)
    if suffix in (".h", ".cpp", ".cu"):
        text = _COMMENT.sub(lambda found: found[0] if found[0][0] in "\"'" else " ", text)
    return " ".join(text.split())


def _is_text(node: ast.stmt) -> bool:
    """Tell whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _git(repository: Path, *words: str) -> str:
    asked = ["git", "-C", str(repository), *words]
    return subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
