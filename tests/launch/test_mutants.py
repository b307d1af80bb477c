"""launch/mutants.py: the parts that need no cosmic-ray, and the page of faults that no test has to see."""

from __future__ import annotations

import ast
import importlib
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "launch"))
import mutants  # noqa: E402
import mutants_faults as faults  # noqa: E402

SOURCE = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import thing
def half(x: int | None = 3) -> int | str:
    y: int | None = 1 + 1
    assert x > 2
    if x < 4:
        raise ValueError(f"{x + 1}")
    return x // next(zip([2], [x < 1], strict=True))[0]
@lru_cache(maxsize=1 << 3)
def third(x):
    return x / 3
"""


def test_what_only_people_read_is_left_alone() -> None:
    unread, skipped = faults.unread(SOURCE), []
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.BinOp | ast.Compare) and unread(node.lineno, node.col_offset):
            skipped.append(ast.unparse(node))
    assert sorted(skipped) == ["1 << 3", "int | None", "int | None", "int | str", "x + 1", "x > 2"]
    at = SOURCE.splitlines().index("@lru_cache(maxsize=1 << 3)") + 1
    assert unread(at, 0) and not unread(at + 2, 13)


def test_the_innermost_function_is_the_one_that_has_to_be_called(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("x = 1\n@decorator\ndef outer():\n    def inner():\n        return 1\n    return inner\n")
    lines = {line: faults.function_of(faults.Place(path, "", 0, line)) for line in (1, 3, 5, 6)}
    assert lines == {1: [], 3: [2], 5: [4, 2], 6: [2]}


def test_a_child_has_the_fault_and_this_process_has_not() -> None:
    path = ROOT / "compcoll" / "layout.py"
    source = path.read_text()
    assert source.count("class World") == 1

    def import_it() -> int:
        for name in [name for name in sys.modules if name.startswith("compcoll.layout")]:
            del sys.modules[name]
        sys.meta_path.insert(0, faults.Faulty(path, source.replace("class World", "class Strange")))
        return 3 if hasattr(importlib.import_module("compcoll.layout"), "Strange") else 4

    assert mutants.in_child(import_it, 60) == 3
    import compcoll.layout

    assert not hasattr(compcoll.layout, "Strange")


def test_a_fault_inside_of_a_function_is_told_from_others(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    source = "x = 1\nclass C:\n    y = 2\n    def f(self, z=3):\n        return [z + 4]\n"
    path.write_text(source)
    inside = faults.changed(path, source.replace("+ 4", "- 4"))
    assert inside is not None and [code.co_name for code in inside] == ["f"]
    for number in ("x = 1", "y = 2", "z=3"):
        assert faults.changed(path, source.replace(number, number[:-1] + "7")) is None
    names: dict[str, object] = {}
    exec(compile(source, str(path), "exec", dont_inherit=True), names)
    made = names["C"]()  # type: ignore[operator]
    assert faults.put_in(path, inside) and made.f() == [-1]
    assert not faults.put_in(path, inside)


def test_a_child_that_hangs_or_fails() -> None:
    assert mutants.in_child(lambda: time.sleep(100) or 0, 0.2) is None
    assert mutants.in_child(lambda: 1 // 0, 60) == 70
    assert mutants.in_child(lambda: 0, 60) == 0


def test_harmless_faults_are_those_of_lines_that_are_there() -> None:
    known = faults.harmless()
    assert known
    for file, before, after in known:
        lines = [line.strip() for line in (ROOT / file).read_text().splitlines()]
        assert before in lines and after not in lines, f"{file} has changed: look at {before!r} again"
