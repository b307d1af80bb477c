"""docs/errors.md has a section of every error and warning, with the message that a program really gets."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from inspect import isclass
from pathlib import Path

import pytest
from mpi.environments import Completed

from compcoll import errors

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "errors.md").read_text()
CLASSES = {
    name
    for name, thing in vars(errors).items()
    if isclass(thing) and issubclass(thing, errors.CompcollError | Warning) and thing is not errors.CompcollError
}
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S))
WARNING = {("warnings", "warn"), ("warnings", "warn_explicit"), ("_log", "warning")}
GROUPS = {
    "one_process": "InvalidArgument UnknownCodec UnknownAlgorithm InvalidBuffer UnsupportedDType UnsupportedDevice "
    "UnsupportedRecovery CodecError WireCorrupted",
    "damaged_profile": "ProfileError",
    "without_mpi4py": "MPIMissing",
    "child": "NotUnderMPI",
    "pytorch": "ThreadsUnavailable HookTaken GradientsPending",
    "failing_ranks": "AccuracyWarning CollectiveMismatch ReferenceMismatch CollectiveFailed CommunicatorBusy "
    "PeerTimeout CommunicatorBroken PeerFailed",
}
"""The errors that each group of raised.py raises."""


def test_every_class_has_a_section() -> None:
    assert set(SECTIONS) == CLASSES
    for name, section in SECTIONS.items():
        blocks = re.findall(r"^```\n(.*?)^```", section, re.M | re.S)
        assert blocks and all(f"{name}: " in block for block in blocks), f"errors.md: a message of {name}"
        assert "Cause: " in section and "Cure: " in section, f"errors.md: cause and cure of {name}"


def warnings_in(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a module that warn, with the constant parts of what they say."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if (ast.unparse(node.func.value), node.func.attr) not in WARNING:
            continue
        if any(ast.unparse(argument) in CLASSES for argument in node.args):  # has a section
            continue
        texts = [each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)]
        yield node.lineno, [part.strip() for text in texts for part in re.split(r"%\w", str(text))]


def test_every_warning_has_a_row() -> None:
    section = re.sub(r"\s+", " ", PAGE.split("## Warnings and log lines")[1].split("\n## ")[0])
    found = 0
    for path in sorted((HERE.parents[1] / "compcoll").rglob("*.py")):
        for line, parts in warnings_in(path):
            found += 1
            said = [part for part in parts if len(part) > 10]
            assert any(part[:40] in section for part in said), f"{path.name}:{line}: errors.md lacks {parts}"
    assert found > 8


def test_every_class_is_raised_by_a_group() -> None:
    assert sorted(" ".join(GROUPS.values()).split()) == sorted(CLASSES)


def compare(found: dict[str, str], group: str) -> None:
    assert set(found) == set(GROUPS[group].split())
    if find_spec("cupy") is not None:
        found.pop("UnsupportedDevice", None)  # its message says that CuPy is absent
    shown = re.sub(r"\s+", " ", PAGE)
    missing = [message for message in found.values() if re.sub(r"\s+", " ", message) not in shown]
    assert missing == []


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "failing_ranks"])
def test_messages_are_true(group: str, tmp_path: Path) -> None:
    if group == "pytorch" and find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    command = [sys.executable, HERE / "raised.py", group]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    compare({name: text.replace(str(tmp_path / "config"), "~/.config") for name, text in found.items()}, group)


@pytest.mark.only_on("openmpi")
def test_messages_of_failing_ranks_are_true(mpirun: Callable[..., Completed]) -> None:
    done = mpirun(2, HERE / "raised.py", "failing_ranks", timeout=60, check=False, options=("--with-ft", "ulfm"))
    compare(json.loads(done.ranks[0].stdout.splitlines()[-1]), "failing_ranks")
