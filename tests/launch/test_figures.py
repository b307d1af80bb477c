"""launch/figures.py: which pages are older than the code that they time, told by git; and launch/peers' page."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from osu_like_bench import machine

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


@pytest.fixture
def figures() -> ModuleType:
    return importlib.import_module("figures")


@pytest.fixture
def peers_page() -> Iterator[ModuleType]:
    sys.path.insert(0, str(LAUNCH / "peers"))
    try:
        yield importlib.import_module("peers_page")
    finally:
        sys.path.remove(str(LAUNCH / "peers"))


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        (root / "docs/measurements").mkdir(parents=True)

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", str(self.root), *who, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, path: str, text: str = "more\n") -> str:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        with (self.root / path).open("a") as file:
            file.write(text)
        self.git("add", path)
        self.git("commit", "-qm", path)
        return self.git("rev-parse", "--short", "HEAD")

    def record(self, name: str, **content: Any) -> None:
        (self.root / "docs/measurements" / name).write_text(json.dumps(content))


def test_a_page_is_older_if_what_it_times_has_changed_since(figures: ModuleType, tmp_path: Path) -> None:
    there = Repository(tmp_path)
    page = figures.Page("some-*.json", "")
    assert figures.state(page, tmp_path) == "older: never measured"
    first = there.commit("compcoll/a.py")
    there.record("some-1.json", run={"commit": first})
    there.commit("docs/a.md")
    assert figures.state(page, tmp_path) == "up to date"
    there.commit("compcoll/b.py")
    assert figures.state(page, tmp_path) == f"older: 1 file that it times changed since {first} (compcoll/b.py)"
    assert figures.state(figures.Page("some-*.json", "", ("compcoll/a.py",)), tmp_path) == "up to date"
    second = there.commit("compcoll/a.py")
    there.record("some-1.json", run={"commit": f"{second}-dirty"})
    there.record("some-2.json", run={})
    told = figures.state(page, tmp_path)
    assert "1 of its records note no commit" in told and f"no commit has ({second}-dirty)" in told
    there.record("some-1.json", run={"commit": "0123456"})
    assert "0123456 is no commit of this repository" in figures.state(page, tmp_path)


def test_comments_and_other_rooms_make_no_page_older(figures: ModuleType, tmp_path: Path) -> None:
    there = Repository(tmp_path)
    page = figures.Page("one.json", "", ("compcoll", ":!compcoll/torch"))
    there.commit("compcoll/a.py", "def f():\n    return '#'\n")
    first = there.commit("compcoll/a.h", 'int a; // one\nchar b[] = "/* no comment";\n')
    there.record("one.json", run={"commit": first})
    there.commit("compcoll/a.py", "\n\n# at the end\n")
    there.commit("compcoll/a.h", "/* at length,\n   two lines */\n\n")
    there.commit("compcoll/torch/b.py", "x = 1\n")
    there.commit("compcoll/a.pyi", "x: int\n")
    assert figures.state(page, tmp_path) == "up to date"
    there.commit("compcoll/a.h", "int c;\n")
    assert figures.state(page, tmp_path) == f"older: 1 file that it times changed since {first} (compcoll/a.h)"
    second = there.commit("compcoll/a.py", "x = '# two'\n")
    there.record("one.json", run={"commit": second})
    assert figures.state(page, tmp_path) == "up to date"
    there.commit("compcoll/a.py", "y = 3\n")
    there.record("one-more.json", run={"commit": first})
    told = figures.state(figures.Page("one*.json", "", page.times), tmp_path)
    assert told.startswith(
        f"older: 2 files that it times changed since {first} (compcoll/a.h, compcoll/a.py), some since 1"
    )


def test_docstrings_are_no_code(figures: ModuleType, tmp_path: Path) -> None:
    there = Repository(tmp_path)
    there.commit("a.py", 'def f(x: int) -> int:\n    """Tell."""\n    return x\n')
    there.commit("b.py", '"""Another."""\n\n\ndef f(\n    x: int,\n) -> int:\n    return x\n')
    there.commit("c.py", 'def f(x: int) -> int:\n    """Tell."""\n    return -x\n')
    blobs = [there.git("rev-parse", f"HEAD:{name}.py") for name in "abc"]
    first, second, third = (figures._code(tmp_path, blob, ".py") for blob in blobs)
    assert first == second != third


def test_a_record_notes_changes_of_what_is_timed_only(tmp_path: Path) -> None:
    there = Repository(tmp_path)
    assert machine.commit(tmp_path) == ""  # no commit yet
    there.commit("docs/page.md")
    first = there.commit("compcoll/a.py")
    assert machine.commit(tmp_path) == first
    (tmp_path / "docs/page.md").write_text("written meanwhile")
    assert machine.commit(tmp_path) == first
    (tmp_path / "compcoll/a.py").write_text("tried")
    assert machine.commit(tmp_path) == f"{first}-dirty"
    assert machine.commit(tmp_path / "docs") == ""


def test_a_page_that_names_its_commits_is_its_own_record(figures: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "rows.md"
    page.write_text("| 1 | fine | `0123abc`, load 3 |\n| 2 | fine | `0123abd-dirty` | `make test` |\n")
    assert figures.commits(page) == {"0123abc", "0123abd-dirty"}


def test_pages_are_made_by_programs_that_are_there(figures: ModuleType) -> None:
    assert {path.stem for path in (LAUNCH.parent / figures.FOLDER).glob("*.md")} <= set(figures.pages()) | {
        "index",
        "mutants",
    }
    for name, page in figures.PAGES.items():
        program = page.command.split()[0] if page.command else "-m"
        assert program == "-m" or (LAUNCH.parent / program).exists(), name
        for path in page.times:
            assert any(LAUNCH.parent.glob(path.removeprefix(":!"))), f"{name}: {path}"


def test_the_page_of_peers_says_what_was_not_measured(peers_page: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "peers"
    folder.mkdir()
    run = {"cpu": "Some", "cores": 2, "instruction_set": "avx2", "commit": "abc1234", "mpi": "MPI 1", "date": "2026"}
    results = [
        {"contender": name, "size": size, "median_us": us, "ratio": ratio}
        for name, size, us, ratio in (
            ("native", 65536, 100.0, 1.0),
            ("auto", 65536, 50.0, 4.0),
            ("native", 1 << 20, 4000.0, 1.0),
        )
    ]
    content = {"run": run | {"command": "bench"}, "results": results, "others_percent": 3.0}
    (folder / "memory-openmpi.json").write_text(json.dumps(content))
    (folder / "memory-impi.json").write_text(json.dumps({"not_measured": "not installed: make MPI=impi install"}))
    peers_page.write(folder)
    text = (tmp_path / "peers.md").read_text()
    assert "| | 64 KiB | 1 MiB |" in text and "Commit `abc1234`" in text
    assert "| Open MPI | 0.1 (1.00) | 4 (1.00) |" in text
    assert "| compcoll on Open MPI, `auto` with ZFP at rate 8 | 0.05 (0.50), 4.0 × fewer bytes | not measured |" in text
    assert "| Intel MPI | not measured: not installed: make MPI=impi install |" in text
    assert "| MPICH | not measured: never run |" in text and "Not measured: never run." in text
