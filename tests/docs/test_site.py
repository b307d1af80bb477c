"""The site: every public name has its place, what is broken in built pages is found, and the build has no warnings."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import compcoll
from compcoll.algorithms import ALGORITHMS
from compcoll.codecs import ALL, registry
from osu_like_bench import data

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def check_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_pages", DOCS / "site" / "check_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("module", ["compcoll", "compcoll.codecs", "compcoll.sparse", "compcoll.torch"])
def test_every_public_name_is_in_the_reference(module: str) -> None:
    if module == "compcoll.torch":
        pytest.importorskip("torch")
    pages = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    there = {name.rsplit(".", 1)[1] for name in re.findall(r"\.\. auto\w+:: (\S+)", pages) if "." in name}
    there |= {cls.__name__ for cls in ALL}  # by docs/conf.py
    errors = importlib.import_module("compcoll.errors")  # all of them, by automodule
    public = set(importlib.import_module(module).__all__)
    assert public - {name for name in public if hasattr(errors, name)} <= there


def test_every_codec_has_its_row() -> None:
    names = {cls.name for cls in registry.codec_classes().values() if registry.is_own(cls)}
    for page in (DOCS / "codecs.md", DOCS.parent / "README.md"):
        rows = "\n".join(line for line in page.read_text().splitlines() if line.startswith("|"))
        assert names - set(re.findall(r'`"(\w+)"`', rows)) == set(), f"{page.name} has no row of these codecs"


def test_every_codec_has_its_options_and_errors() -> None:
    """In the first table of docs/codecs.md, whose cells are not empty."""
    section = (DOCS / "codecs.md").read_text().split("\n## ")[1]
    heads, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"
    )
    for cls in ALL:
        own = [row for row in rows if row[0] == f'`"{cls.name}"`']
        assert own, f"codecs.md has no row of {cls.name}"
        assert all(len(row) == len(heads) and all(row) for row in own), f"codecs.md has an empty cell of {cls.name}"
        named = set(re.findall(r"`(\w+)=", " ".join(row[1] for row in own)))
        assert {one.name for one in fields(cls)} <= named, f"codecs.md lacks options of {cls.name}"


def test_errors_of_normal_values_and_waves_are_true() -> None:
    n = 4_000_000
    values = [np.random.default_rng(0).standard_normal(n, dtype=np.float32)]
    values += [np.sin(np.linspace(0, 2 * np.pi * periods, n)).astype(np.float32) for periods in (100, 10_000)]
    rows = rows_of("codecs.md", "codec").values()
    assert len(rows) > 5
    for row in rows:
        codec, ratio, *expected = (cell.strip(" `") for cell in row.split("|")[1:-1])
        wires = [compcoll.encode(x, codec) for x in values]
        results = [compcoll.decode(wire, n, np.float32, codec) for wire in wires]
        found = [np.linalg.norm(y - x) / np.linalg.norm(x) for x, y in zip(values, results, strict=True)]
        assert [f"{error:.1e}" for error in found] == expected, row
        assert f"{4 * n / wires[0].nbytes:.2f}" == ratio, row


def test_ratios_within_a_tolerance_are_true() -> None:
    rows = rows_of("codecs.md", "values")
    assert len(rows) == 4
    for row in rows.values():
        kind, *cells = (cell.strip(" `") for cell in row.split("|")[1:-1])
        x = data.make(kind, 4_000_000, "float32", (0,))
        tolerances = [part * float(np.abs(x).max()) for part in (1e-2, 1e-3, 1e-5)]
        wires = [compcoll.encode(x, name, tolerance=each) for each in tolerances for name in ("szp", "zfp")]
        assert [f"{x.nbytes / wire.nbytes:.2f}" for wire in wires] == cells, row


def rows_of(page: str, heading: str) -> dict[str, str]:
    """The rows of the table whose first head this is, by their first cells."""
    lines = (DOCS / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    table = lines[start + 2 :]
    end = next((number for number, line in enumerate(table) if not line.startswith("|")), len(table))
    return {line.split(" | ")[0].lstrip("| "): line for line in table[:end]}


def named_in(cells: Iterable[str]) -> set[str]:
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


def test_every_algorithm_has_its_row() -> None:
    rows = {next(iter(named_in([name])), ""): row for name, row in rows_of("algorithms.md", "`algorithm=`").items()}
    assert set(rows) == set(ALGORITHMS), "the first table of algorithms.md needs a row of each algorithm, and no other"
    for name, record in ALGORITHMS.items():
        _, _, collectives, _, _, _, seconds, *_ = rows[name].split("|")
        assert named_in([collectives]) == set(record.collectives), f"algorithms.md: collectives of {name}"
        assert seconds.strip(), f"algorithms.md: seconds of {name}"


def test_every_page_is_in_a_table_of_contents() -> None:
    """Sphinx says so, too, but is not everywhere."""
    pages = {path.relative_to(DOCS) for path in DOCS.rglob("*.md") if path.parent != DOCS / "site"}
    listed = {Path("index.md")}
    for page in pages:
        for table in re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S):
            for name in (line for line in table.split() if not line.startswith(":")):
                listed |= {path.relative_to(DOCS) for path in (DOCS / page).parent.glob(f"{name}.md")}
    assert pages == listed


def test_what_is_broken_is_found(check_pages: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<h1 id="top">x</h1><a href="#top">x</a><img src="a.png" alt="a plot">')
    (tmp_path / "a.png").write_bytes(b"")
    assert list(check_pages.faults(tmp_path)) == []
    (tmp_path / "bad.html").write_text(
        '<a href="good.html#nowhere">x</a><a href="gone.html">x</a><a href="https://example.org">x</a>'
        '<img src="a.png"><img src="b.png" alt="b"><script src="https://example.org/x.js"></script>'
    )
    assert [fault.removeprefix("bad.html: ") for fault in check_pages.faults(tmp_path)] == [
        "the image a.png has no text",
        "https://example.org/x.js is loaded from elsewhere",
        "good.html#nowhere: there is no such place",
        "gone.html leads nowhere",
        "b.png leads nowhere",
    ]


def test_a_folder_without_pages_is_no_site(check_pages: ModuleType, tmp_path: Path) -> None:
    assert list(check_pages.faults(tmp_path)) == [f"{tmp_path}: no pages"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_site_builds_without_warnings(check_pages: ModuleType, built_site: Path) -> None:
    assert built_site.with_name("site.log").read_text() == ""
    assert list(check_pages.faults(built_site)) == []
