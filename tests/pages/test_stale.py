"""Which pages are older than the code that they time, told by git."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from osu_like_bench import machine
from osu_like_bench.pages import records
from osu_like_bench.pages.__main__ import pages
from osu_like_bench.pages.documents import FOLDER, Page
from osu_like_bench.pages.records import Case

PAGE = Page("page", {}, ("compcoll",))


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

    def record(self, **commits: str) -> None:
        """A record of cases with figures of these commits."""
        record = PAGE.record(self.root)
        record.cases |= {
            name: Case("run", run={"commit": commit} if commit else {}) for name, commit in commits.items()
        }
        record.save()


def test_a_study_keeps_its_day(tmp_path: Path) -> None:
    there, study = Repository(tmp_path), replace(PAGE, study=True)
    assert study.state(tmp_path) == "study, not yet measured"
    there.record(one=there.commit("compcoll/a.py"))
    record = study.record(tmp_path)
    record.cases["one"].run["date"] = "2026-11-27 10:00"
    record.save()
    there.commit("compcoll/a.py")
    assert study.state(tmp_path) == "study of 2026-11-27"


def test_the_index_has_the_pages_of_a_release_and_the_studies() -> None:
    index = (machine.REPOSITORY / FOLDER / "index.md").read_text().partition("## Studies")
    for part, study in ((index[0], False), (index[2], True)):
        names = {name for name, page in pages().items() if page.study is study}
        assert set(re.findall(r"\]\((.*?)\.md\)", part)) == names


def test_a_page_is_older_if_what_it_times_has_changed_since(tmp_path: Path) -> None:
    there = Repository(tmp_path)
    assert PAGE.state(tmp_path) == "older: never measured"
    first = there.commit("compcoll/a.py")
    there.record(one=first)
    there.commit("docs/a.md")
    assert PAGE.state(tmp_path) == "up to date"
    there.commit("compcoll/b.py")
    assert PAGE.state(tmp_path) == f"older: 1 file that it times changed since {first} (compcoll/b.py)"
    assert replace(PAGE, times=("compcoll/a.py",)).state(tmp_path) == "up to date"
    second = there.commit("compcoll/a.py")
    there.record(one=f"{second}-dirty", two="")
    told = PAGE.state(tmp_path)
    assert "1 of its records note no commit" in told and f"no commit has ({second}-dirty)" in told
    there.record(one="0123456")
    assert "0123456 is no commit of this repository" in PAGE.state(tmp_path)


def test_comments_and_other_rooms_make_no_page_older(tmp_path: Path) -> None:
    there = Repository(tmp_path)
    page = replace(PAGE, times=("compcoll", ":!compcoll/torch"))
    there.commit("compcoll/a.py", "def f():\n    return '#'\n")
    first = there.commit("compcoll/a.h", 'int a; // one\nchar b[] = "/* no comment";\n')
    there.record(one=first)
    there.commit("compcoll/a.py", "\n\n# at the end\n")
    there.commit("compcoll/a.h", "/* at length,\n   two lines */\n\n")
    there.commit("compcoll/torch/b.py", "x = 1\n")
    there.commit("compcoll/a.pyi", "x: int\n")
    assert page.state(tmp_path) == "up to date"
    there.commit("compcoll/a.h", "int c;\n")
    assert page.state(tmp_path) == f"older: 1 file that it times changed since {first} (compcoll/a.h)"
    second = there.commit("compcoll/a.py", "x = '# two'\n")
    there.record(one=second)
    assert page.state(tmp_path) == "up to date"
    there.commit("compcoll/a.py", "y = 3\n")
    there.record(more=first)
    told = page.state(tmp_path)
    assert told.startswith(
        f"older: 2 files that it times changed since {first} (compcoll/a.h, compcoll/a.py), some since 1"
    )


def test_docstrings_are_no_code(tmp_path: Path) -> None:
    there = Repository(tmp_path)
    there.commit("a.py", 'def f(x: int) -> int:\n    """Tell."""\n    return x\n')
    there.commit("b.py", '"""Another."""\n\n\ndef f(\n    x: int,\n) -> int:\n    return x\n')
    there.commit("c.py", 'def f(x: int) -> int:\n    """Tell."""\n    return -x\n')
    blobs = [there.git("rev-parse", f"HEAD:{name}.py") for name in "abc"]
    first, second, third = (records._code(tmp_path, blob, ".py") for blob in blobs)
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


@pytest.mark.parametrize("path", sorted({path for page in pages().values() for path in page.times}))
def test_every_path_of_a_page_names_code(path: str) -> None:
    """A path without files would neither make a page older nor keep it from it."""
    listed = ["git", "-C", str(machine.REPOSITORY), "ls-files", "--", path.removeprefix(":!")]
    assert subprocess.run(listed, check=True, capture_output=True, text=True).stdout


def test_what_no_figure_depends_on_is_in_no_list() -> None:
    """Timed pages leave out what no timed call runs. Only the tests of reliability depend on failures."""
    untimed = ("compcoll/errors.py", "compcoll/mpi/intracomm.py", "compcoll/execute/failures.py")
    shards = "compcoll/torch/gradients/fsdp.py"
    timed = ("networks", "busy", "peers", "one-machine", "groups", "ddp", "low-rank", "local-steps")
    for name, page in pages().items():
        command = ["git", "-C", str(machine.REPOSITORY), "ls-files", "--", *page.times]
        files = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert files and shards not in files, name
        if name != "reliability":
            assert not set(untimed) & set(files), name
        assert ("compcoll/execute/handshake.py" in files) == (name in (*timed, "reliability")), name
        assert ("compcoll/torch/gradients/ddp.py" in files) == (
            name in ("busy", "peers", "groups", "ddp", "low-rank", "local-steps", "study", "study-text", "study-muon")
        ), name
        assert not any("/tools/" in file or "/gpu/" in file or not file.startswith("compcoll/") for file in files)
