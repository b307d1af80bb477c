"""The changelog and the upgrade guide are short, list all former names, and are true of the names that they list."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compcoll

TOP = Path(__file__).parents[2]
PACKAGE = TOP / "compcoll"
LARGEST = 4096
LONGEST = 120
FIRST = "Changed, breaking"


def releases() -> dict[str, str]:
    """The sections of the changelog, by their headings."""
    parts = re.split(r"^## ", (TOP / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    return {part.splitlines()[0]: f"## {part}" for part in parts}


def test_a_section_for_unreleased_changes_stands_above_all() -> None:
    first, newest, *_ = releases()
    assert first == "Unreleased"
    assert re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", newest)


def test_all_files_have_the_version_of_the_newest_release() -> None:
    newest = list(releases())[1].split()[0]
    (project,) = re.findall(r'^version = "(.*)"', (TOP / "pyproject.toml").read_text(), re.M)
    assert newest == compcoll.__version__ == project


@pytest.mark.parametrize("release", releases())
def test_a_release_is_short(release: str) -> None:
    assert len(releases()[release].encode()) <= LARGEST


@pytest.mark.parametrize("release", releases())
def test_an_item_is_one_sentence_on_one_line(release: str) -> None:
    _, *kinds = releases()[release].split("\n### ")
    for _, *lines in map(str.splitlines, kinds):
        for line in filter(None, lines):
            assert line.startswith("- "), f"{release}: this continues an item: {line}"
            assert len(line) <= LONGEST, f"{release}: longer than {LONGEST} columns: {line}"
            prose = re.sub(r"`[^`]*`", "code", line)
            assert prose.endswith((".", ".)")), f"{release}: no end of a sentence: {line}"
            assert not re.search(r"\. [A-Z]", prose), f"{release}: more than one sentence: {line}"


@pytest.mark.parametrize("release", releases())
def test_breaking_changes_come_first(release: str) -> None:
    kinds = re.findall(r"^### (.*)", releases()[release], re.M)
    assert FIRST not in kinds[1:]
    assert set(kinds) <= {FIRST, "Added", "Changed", "Fixed"}


def table(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of the upgrade guide, without its first two lines."""
    section = re.split(r"^#+ ", (TOP / "docs" / "upgrading.md").read_text(), flags=re.M)
    (text,) = (part for part in section if part.startswith(f"{heading}\n"))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]


def text_of(node: ast.expr, module: Any) -> str:
    """A text in the source, with the constants of the module that it is made of; other parts of it become `*`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        value = getattr(module, node.id, None)
        return value if isinstance(value, str) else "*"
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, module) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, module)
    raise AssertionError(f"{ast.unparse(node)} in {module.__name__}: this test cannot read that name")


def deprecated() -> Iterator[tuple[str, str, str]]:
    """All former names in the source: the former name, the new one, and the function or class that has it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if path.name == "deprecated.py" or not re.search(r"\bdeprecated\b", source):
            continue
        name = ".".join(path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__")
        if name.startswith("compcoll.torch"):
            pytest.importorskip("torch")
        module = importlib.import_module(name)
        yield from _in(ast.parse(source), module, "")


def _in(tree: ast.AST, module: Any, owner: str) -> Iterator[tuple[str, str, str]]:
    for node in ast.iter_child_nodes(tree):
        inside = owner
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and not owner):
            inside = node.name
        for decorator in getattr(node, "decorator_list", ()):
            yield from _call(decorator, module, inside)
        yield from _call(node, module, inside)
        yield from _in(node, module, inside)


def _call(node: ast.AST, module: Any, owner: str) -> Iterator[tuple[str, str, str]]:
    if not isinstance(node, ast.Call):
        return
    called = ast.unparse(node.func).rpartition(".")[2]
    if called == "renamed_arguments":
        for word in node.keywords:
            assert word.arg is not None, f"{owner}: write the names as arguments"
            yield f"{word.arg}=", f"{text_of(word.value, module)}=", owner
    elif called == "renamed_attribute":
        old, new = (text_of(each, module) for each in node.args)
        yield f".{old}", f".{new}", owner
    elif called == "warn" and not ast.unparse(node.func).startswith("warnings"):
        old, new = (text_of(each, module) for each in node.args[:2])
        yield old, new, owner


def public_classes() -> dict[str, Any]:
    torch = pytest.importorskip("compcoll.torch")
    names = {name: getattr(compcoll, name) for name in compcoll.__all__}
    return {**names, **{name: getattr(torch, name) for name in torch.__all__}}


def owners_of(owner: str) -> set[str]:
    """The public names behind a function or class of the source: itself, or the classes that inherit from it."""
    public = public_classes()
    found = {
        name
        for name, thing in public.items()
        if inspect.isclass(thing) and owner in {base.__name__ for base in thing.__mro__}
    }
    return found | ({owner} & public.keys())


def code_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_former_name_is_in_the_guide() -> None:
    rows = {code_in(old)[0]: (code_in(new)[0], set(code_in(where))) for old, new, where, _ in table("Former names")}
    found = set(deprecated())
    assert len(found) > 10
    assert {old for old, *_ in found} == set(rows), "rows of the table, and former names in the source"
    for old, new, owner in found:
        told, where = rows[old]
        start = new.partition("*")[0]
        assert told.startswith(start), f"{old}: the new name is {new}"
        assert owners_of(owner) <= where, f"{old}: {owner} has it, too"


def test_the_guide_says_when_former_names_go_away() -> None:
    (release,) = set(re.findall(r"will be removed in compcoll ([\d.]+)", (PACKAGE / "deprecated.py").read_text()))
    assert {last for *_, last in table("Former names")} == {release}


def resolves(path: str) -> bool:
    """Whether a dotted name of a module, or of something in one, is there."""
    words = path.split(".")
    for cut in range(len(words), 0, -1):
        try:
            thing = importlib.import_module(".".join(words[:cut]))
        except ModuleNotFoundError:
            continue
        for word in words[cut:]:
            if not hasattr(thing, word):
                return False
            thing = getattr(thing, word)
        return True
    return False


def test_removed_names_are_gone_and_new_ones_are_there() -> None:
    rows = table("Removed names")
    assert len(rows) > 5
    for old, new in rows:
        for path in code_in(old):
            assert "." not in path or not resolves(path), f"{path} is there"
        for path in code_in(new):
            assert "." not in path or resolves(path), f"{path} is not there"


def test_the_guide_has_the_default_codec_of_pytorch_collectives() -> None:
    torch = pytest.importorskip("compcoll.torch")
    signatures = [inspect.signature(getattr(torch, name)) for name in torch.__all__ if name[0].islower()]
    defaults = {each.parameters["codec"].default for each in signatures if "codec" in each.parameters}
    (row,) = (row for row in table("Defaults and behaviour") if row[0].startswith("`compress(model)` and"))
    assert set(code_in(row[2])) == defaults
