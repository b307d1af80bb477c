"""The site: every public name has its place, what is broken in built pages is found, and the build has no warnings."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import compcoll
from compcoll import Communicator
from compcoll.algorithms import ALGORITHMS
from compcoll.codecs import ALL, registry
from compcoll.transports.loopback import Loopback
from osu_like_bench import data

DOCS = Path(__file__).parents[2] / "docs"


def of_the_site(name: str) -> ModuleType:
    """A module of docs/site."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def check_pages() -> ModuleType:
    return of_the_site("check_pages")


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
    rows = "\n".join(line for line in (DOCS / "codecs.md").read_text().splitlines() if line.startswith("|"))
    assert names - set(re.findall(r'`"(\w+)"`', rows)) == set(), "codecs.md has no row of these codecs"


def test_every_codec_has_its_options_and_errors() -> None:
    """In the table of docs/codecs.md below "Dense", whose cells are not empty."""
    section = (DOCS / "codecs.md").read_text().partition("\n## Dense\n")[2].partition("\n## ")[0]
    heads, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"
    )
    for cls in ALL:
        own = [row for row in rows if row[0] == f'`"{cls.name}"`']
        assert own, f"codecs.md has no row of {cls.name}"
        assert all(len(row) == len(heads) and all(row) for row in own), f"codecs.md has an empty cell of {cls.name}"
        named = set(re.findall(r"`(\w+)=", " ".join(row[1] for row in own)))
        assert {one.name for one in fields(cls)} <= named, f"codecs.md lacks options of {cls.name}"


def test_recommended_codecs_are_there() -> None:
    specs = re.findall(r'`"([^"]+)"', " ".join(rows_of("codecs.md", "data").values()))
    assert len(specs) > 8
    for spec in specs:
        assert compcoll.get_codec(spec), spec


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


@pytest.mark.slow
def test_losses_in_the_readme_are_true() -> None:
    """Bytes, and errors of an allreduce by ring and direct on 4, 16 and 64 ranks."""
    rows = rows_of("../README.md", "`codec=`")
    assert len(rows) >= 5
    for row in rows.values():
        codec, ratio, *errors = (cell.strip(" `") for cell in row.split("|")[1:-1])
        codec = codec.strip('"')
        x = np.random.default_rng(0).standard_normal(1 << 15, dtype=np.float32)
        assert float(ratio.removeprefix("1 / ")) == pytest.approx(x.nbytes / compcoll.encode(x, codec).nbytes, 0.02)
        for ranks, told in zip((4, 16, 64), errors, strict=True):
            rng = np.random.default_rng(ranks)
            inputs = [rng.standard_normal(x.size, dtype=np.float32) for _ in range(ranks)]
            exact = np.sum(inputs, axis=0, dtype=np.float64)
            for algorithm, error in zip(("ring", "direct"), told.split(" / "), strict=True):
                loopback = Loopback(ranks)
                result = loopback.run(
                    Communicator(transport).iallreduce(part, codec=codec, algorithm=algorithm)
                    for transport, part in zip(loopback.transports, inputs, strict=True)
                )[0]
                found = np.linalg.norm(result - exact) / np.linalg.norm(exact)
                assert float(error) == pytest.approx(found, rel=0.05), (codec, ranks, algorithm)


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
    for page in ("algorithms.md", "internals/algorithms.md"):
        rows = {next(iter(named_in([name])), ""): row for name, row in rows_of(page, "`algorithm=`").items()}
        assert set(rows) == set(ALGORITHMS), f"{page}: the table of all algorithms needs a row of each, and no other"
        for name, record in ALGORITHMS.items():
            _, _, cell, *_ = rows[name].split("|")  # collectives, or predicted seconds
            assert cell.strip(), f"{page}: {name}"
            if page == "algorithms.md":
                assert named_in([cell]) == set(record.collectives), f"{page}: collectives of {name}"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_tests_that_pages_name_are_there(page: Path) -> None:
    """Files of tests, and in a table's row the functions, in the files that the row names."""
    for line in page.read_text().splitlines():
        files = [DOCS.parent / name for name in re.findall(r"\btests/[\w/]+\.(?:py|cpp)\b", line)]
        assert [file for file in files if not file.exists()] == []
        names = re.findall(r"`(test_\w+)`", line) if line.startswith("|") and files else []
        code = "\n".join(file.read_text() for file in files)
        assert [name for name in names if f"def {name}(" not in code] == []


def test_every_page_is_in_a_table_of_contents() -> None:
    """Sphinx says so, too, but is not everywhere."""
    pages = {path.relative_to(DOCS) for path in DOCS.rglob("*.md") if path.parent != DOCS / "site"}
    listed = {Path("index.md")}
    for page in pages:
        for table in re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S):
            for name in (line for line in table.split() if not line.startswith(":")):
                listed |= {path.relative_to(DOCS) for path in (DOCS / page).parent.glob(f"{name}.md")}
    assert pages == listed


TASKS = {
    "install without MPI": "start/torch.md",
    "see whether it compresses": "working.md",
    "AdamW": "training.md",
    "what it loses": "working.md",
    "why auto did not compress": "troubleshooting.md#nothing-was-compressed",
    "two machines": "start/mpi.md#two-machines",
    "eight nodes": "launching/torchrun.md",
    "Slurm": "launching/slurm.md",
    "Docker": "launching/docker.md",
    "Trainer": "frameworks.md",
    "JAX": "jax.md",
    "resume": "howto.md#checkpoints",
    "a codec of your own": "own-codec.md",
    "a hang": "troubleshooting.md#it-hangs",
}
"""What a newcomer does first, and where it is described."""


def links_of(page: Path) -> set[str]:
    """Return the links of a page to pages, each with and without its place, relative to the folder of pages."""
    found = re.findall(r"\]\(([\w./-]*\.md)?(#[\w-]+)?\)", page.read_text()) if page.exists() else []
    paths = [(path and os.path.normpath(page.parent / path)) or str(page) for path, _ in found]
    links = {(os.path.relpath(path, DOCS), place) for path, (_, place) in zip(paths, found, strict=True)}
    return {path + place for path, place in links} | {path for path, _ in links}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_two_clicks_away(task: str) -> None:
    once = links_of(DOCS / "index.md")
    twice = {link for page in once for link in links_of(DOCS / page.partition("#")[0])}
    assert TASKS[task] in once | twice


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


def test_pages_are_mended_once() -> None:
    mended = of_the_site("accessible").mended
    page = (
        '<p class="caption" role="heading"></p><aside class="sidebar-drawer"></aside><aside class="toc-drawer no-toc">'
        '</aside><th class="head"><p></p></th><th class="head"><p>bytes</p></th>\n<div id="search-results"></div>'
    )
    assert mended(page) == (
        '<p class="caption" role="heading" aria-level="2"></p><aside class="sidebar-drawer" aria-label="Pages"></aside>'
        '<aside class="toc-drawer no-toc" aria-label="Sections of this page"></aside><td class="head corner"></td>'
        '<th class="head"><p>bytes</p></th>\n<h1>Search</h1>\n<div id="search-results"></div>'
    )
    assert mended(mended(page)) == mended(page)


def test_a_folder_without_pages_is_no_site(check_pages: ModuleType, tmp_path: Path) -> None:
    assert list(check_pages.faults(tmp_path)) == [f"{tmp_path}: no pages"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_site_builds_without_warnings(check_pages: ModuleType, built_site: Path) -> None:
    assert built_site.with_name("site.log").read_text() == ""
    assert list(check_pages.faults(built_site)) == []
