"""Faults of mutation testing: their places, what a file is with one, and how it is put into code that was imported."""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.util
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/measurements/mutants.md"
CO_OPTIMIZED = 1  # the flag of code that belongs to a function


class Place(NamedTuple):
    """One fault: a cosmic-ray operator at one place of a file."""

    path: Path
    operator: str
    occurrence: int
    line: int


class Fault(NamedTuple):
    """A fault as people read it."""

    place: Place
    before: str
    after: str
    code: str

    @property
    def key(self) -> tuple[str, str, str]:
        """A key that is equal while the file changes elsewhere."""
        return str(self.place.path.relative_to(ROOT)), self.before, self.after

    def __str__(self) -> str:
        return "`{}`: `{}` → `{}`".format(*self.key)


def meant_for_readers(tree: ast.AST) -> Iterator[ast.AST]:
    """Parts of a module that decide nothing: annotations, errors, assertions, zip's strict=, slots=, lru_cache."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from (each for each in node.decorator_list if ast.unparse(each).startswith("lru_cache"))
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns
        if (
            isinstance(node, ast.Raise | ast.Assert)
            or (isinstance(node, ast.keyword) and node.arg in ("strict", "slots"))
            or (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
        ):
            yield node


def unread(source: str) -> Callable[[int, int], bool]:
    """Return the test whether a line and column of a source is in such a part."""
    spans = [
        ((node.lineno, node.col_offset - 1), (node.end_lineno, node.end_col_offset))
        for node in meant_for_readers(ast.parse(source))
    ]
    return lambda line, column: any(begin <= (line, column) < end for begin, end in spans)


_SAME_FOR_MOST = re.compile("_(Is_Eq|Eq_Is|IsNot_NotEq|NotEq_IsNot)$")


def places(path: Path, rng: random.Random) -> list[Place]:
    """Find the places of faults in a file: one of each kind of fault at each place."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = path.read_text()
    skipped, tree = unread(source), get_ast(source)
    found: dict[tuple[str, tuple[int, int]], list[Place]] = defaultdict(list)
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments() or name.endswith("NoOp"):
            continue
        positions = (span for node in ast_nodes(tree) for span in kind().mutation_positions(node))
        for occurrence, (begin, _) in enumerate(positions):
            if not skipped(*begin) and not _SAME_FOR_MOST.search(name):
                found[name.partition("_")[0], begin].append(Place(path, name, occurrence, begin[0]))
    return [rng.choice(alike) for alike in found.values()]


def fault(place: Place) -> Fault | None:
    """Put a fault in; None if nothing changes, or what comes out is no Python."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = place.path.read_text()
    code = mutate_code(source, get_operator(place.operator)(), place.occurrence)
    if code is None or code == source:
        return None
    try:
        if ast.dump(ast.parse(code)) == ast.dump(ast.parse(source)):
            return None
    except SyntaxError:
        return None
    old, new = source.splitlines(), code.splitlines()
    if alike(source, code):
        return None
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)) - 1)
    return Fault(place, old[at].strip(), new[at].strip(), code)


def alike(source: str, code: str) -> bool:
    """Tell whether all that differs is a speed, in bytes a second, by a single byte."""
    numbers = [[n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)] for text in (source, code)]
    return any(
        isinstance(a, float) and isinstance(b, float) and a != b and math.isclose(a, b, rel_tol=1e-6)
        for a, b in zip(*numbers, strict=False)
    )


class Faulty(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from other source."""

    def __init__(self, path: Path, code: str) -> None:
        self._name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        self._path, self._code = path, code

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self._path))

    def get_source(self, fullname: str) -> str:
        return self._code

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._code, str(self._path), "exec", dont_inherit=True)


def function_of(place: Place) -> list[int]:
    """The first lines of the functions around a place, the innermost first; none for a module's own lines."""
    around = [
        node
        for node in ast.walk(ast.parse(place.path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and node.lineno <= place.line <= (node.end_lineno or node.lineno)
    ]
    # A function's code begins at its first decorator.
    firsts = [min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) for node in around]
    return sorted(firsts, reverse=True)


def functions_of(code: CodeType) -> Iterator[CodeType]:
    """The functions of a module, but for those inside of others."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            if part.co_flags & CO_OPTIMIZED:
                yield part
            else:
                yield from functions_of(part)


def own_lines(code: CodeType) -> tuple[Any, ...]:
    """What a module, or a class, does beside its functions."""
    parts = [part for part in code.co_consts if not isinstance(part, CodeType)]
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    inside = [part.co_name if part.co_flags & CO_OPTIMIZED else own_lines(part) for part in inner]
    return code.co_name, code.co_code, code.co_names, repr(parts), tuple(inside)


def changed(path: Path, code: str) -> dict[CodeType, CodeType] | None:
    """The functions of a file that a fault changes, and what it makes of them; None if it changes more than those."""
    before, after = (compile(text, str(path), "exec", dont_inherit=True) for text in (path.read_text(), code))
    if own_lines(before) != own_lines(after):
        return None
    pairs = zip(functions_of(before), functions_of(after), strict=True)
    return {old: new for old, new in pairs if old != new}


def put_in(path: Path, faulty: dict[CodeType, CodeType]) -> bool:
    """Put a fault into the functions that are there; tell whether all were found."""
    found = set()
    for function in [each for each in gc.get_objects() if isinstance(each, FunctionType)]:
        code = function.__code__
        if code.co_filename == str(path) and code in faulty:
            found.add(code)
            function.__code__ = faulty[code]
    return len(found) == len(faulty)


def harmless() -> set[tuple[str, str, str]]:
    """Faults of which the page says why no test can see them."""
    return set(re.findall("^- `(.+?)`: `(.+?)` → `(.+?)`", PAGE.read_text(), re.MULTILINE))
