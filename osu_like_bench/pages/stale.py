"""Which pages are older than the code that they time, by the commits in their records and git.

A page is older if code that it times is another since, or if no commit was noted, or one with changes that no commit
has. Comments, docstrings, layout and stubs are no code.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..machine import REPOSITORY
from .records import Case

UP_TO_DATE = "up to date"
_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""", re.DOTALL)
_STUBS = ":!*.pyi"
_NAMED = 3
"""So many changed files are named."""
_UNKNOWN = "?"
"""Stands for the files that have changed since a commit that git does not know."""

GPU = (":!compcoll/gpu", ":!compcoll/execute/gpu*", ":!compcoll/kernels/device*")
"""What no figure of CPUs depends on."""
CALLS = ("compcoll", ":!compcoll/torch", ":!compcoll/simulation", ":!compcoll/tools", *GPU)
"""What collectives of MPI run; ``:!`` stands before paths that are not meant, as git writes it."""
TRAINING = ("compcoll", ":!compcoll/simulation", ":!compcoll/tools", *GPU)
"""What training steps run."""


def why_older(cases: Iterable[Case], times: Sequence[str], repository: Path = REPOSITORY) -> str:
    """Say whether cases are up to date with the code at these paths, and if not, why."""
    noted = [case.commits() for case in cases if not case.missing]
    if not noted:
        return "older: never measured"
    found = set().union(*noted)
    why = []
    if missing := sum(not commits for commits in noted):
        why.append(f"{missing} of its records note no commit")
    if dirty := sorted(commit for commit in found if commit.endswith("-dirty")):
        why.append(f"measured with changes that no commit has ({', '.join(dirty)})")
    later = {commit: files for commit in sorted(found - set(dirty)) if (files := _later(commit, times, repository))}
    if later:
        worst = max(later, key=lambda commit: len(later[commit]))
        why.append(_shown(later[worst], worst, len(later) - 1))
    return f"older: {'; '.join(why)}" if why else UP_TO_DATE


def _later(commit: str, paths: Sequence[str], repository: Path) -> list[str]:
    """Name the files among these paths whose code is another than that commit's."""
    raw = ["diff", "--raw", "-z", "--no-renames", "--abbrev=40", commit, "HEAD", "--", *paths, _STUBS]
    try:
        listed = _git(repository, *raw).split("\0")
    except subprocess.CalledProcessError:
        return [_UNKNOWN]
    changed = []
    for about, name in zip(listed[::2], listed[1::2], strict=False):
        before, after = about.split()[2:4]
        if _code(repository, before, Path(name).suffix) != _code(repository, after, Path(name).suffix):
            changed.append(name)
    return changed


def _shown(files: Sequence[str], commit: str, others: int) -> str:
    """Say which files have changed since that commit, and since how many others of the page's some have."""
    more = f", some since {others} other commit{'s' * (others > 1)}" if others else ""
    if files == [_UNKNOWN]:
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
    """Return whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _git(repository: Path, *words: str) -> str:
    asked = ["git", "-C", str(repository), *words]
    return subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout
