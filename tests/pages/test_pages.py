"""The pages of docs/measurements: each is what its record gives, small, and made by commands that are understood."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import re
import shlex
import shutil
import sys
import types
from pathlib import Path

import pytest

from osu_like_bench import backends
from osu_like_bench.pages.__main__ import MODULES, main, pages
from osu_like_bench.pages.documents import FOLDER, filled, table
from osu_like_bench.pages.records import Case, Record, means, middle
from osu_like_bench.pages.run import words
from osu_like_bench.parser import build_parser

TOP = Path(__file__).resolve().parents[2]
PAGES = pages()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "networks")) for name in PAGES]
)
def test_page_is_what_its_record_gives(name: str, tmp_path: Path) -> None:
    for suffix in (".md", ".json"):
        shutil.copy(TOP / FOLDER / f"{name}{suffix}", tmp_path)
    page = dataclasses.replace(PAGES[name], plot=None)
    missed = page.write(Record(tmp_path / f"{name}.json"))
    text = (tmp_path / f"{name}.md").read_text()
    assert text == (TOP / FOLDER / f"{name}.md").read_text()
    assert missed == len(re.findall(r"(?:\| |, )\*\*missed\*\*", text))
    used = {mark.split()[0] for mark in re.findall(r"<!-- (?!end )(.*?) -->", text)}
    assert used == set(page.parts)


@pytest.mark.parametrize("name", PAGES)
def test_record_is_small_and_written_as_it_is_read(name: str, tmp_path: Path) -> None:
    path = TOP / FOLDER / f"{name}.json"
    text = path.read_text()
    assert len(text.encode()) <= 64 << 10
    record = Record(path)
    record.path = tmp_path / "again.json"
    record.save()
    assert record.path.read_text() == text


def test_every_document_and_module_is_known() -> None:
    folder = TOP / "osu_like_bench" / "pages"
    assert {module.stem for module in folder.glob("*.py") if "\nPAGES = " in module.read_text()} == set(MODULES)
    assert {path.stem for path in (TOP / FOLDER).glob("*.md")} == {*PAGES, "index"}
    assert {path.stem for path in (TOP / FOLDER).glob("*.json")} == set(PAGES)
    for page in PAGES.values():
        for path in page.times:
            assert path.startswith(":!") or any(TOP.glob(path)), f"{page.name}: {path}"


def test_commands_are_understood() -> None:
    count = 0
    for page in PAGES.values():
        for case in page.record(TOP).cases.values():
            found = re.search(r"-m osu_like_bench(\.backends)? (.*)", case.command)
            if found and found[1]:
                assert backends.build_parser().parse_args(shlex.split(found[2]))
            elif found:
                assert build_parser().parse_args(shlex.split(found[2]))
            count += bool(found)
    assert count > 80


def test_labs_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    loader = importlib.machinery.SourceFileLoader("netlab_command", str(TOP / "launch" / "netlab"))
    netlab = types.ModuleType(loader.name)
    netlab.__file__ = loader.path
    loader.exec_module(netlab)
    labs = [case for page in PAGES.values() for case in page.record(TOP).cases.values() if case.lab]
    assert len(labs) > 50
    for case in labs:
        up = netlab.parser().parse_args(["up", *case.lab.split()])
        run = netlab.parser().parse_args(words(case, tmp_path / "a.json")[2:])
        assert run.name == "pages" and run.program[1] == "python" and (run.ranks or up.hosts) == up.hosts


def test_words_of_a_command_for_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    case = Case("launch/netlab run -n 4 -- python -m osu_like_bench allreduce --time-cap 2", lab="--hosts 4")
    assert words(case, path)[1:6] == ["launch/netlab", "run", "--name", "pages", "-n"]
    assert words(case, path)[-2:] == ["--json", str(path)]
    assert words(case, path, quick=True)[-4:-2] == ["--time-cap", "0.4"]
    assert words(Case("MPI=mpich launch/mpirun -n 2 x"), path)[0].endswith(".venv-mpich/bin/python")
    assert words(Case("python -m compcoll tune --output {json} {launch}"), path, 3)[-2:] == [str(path), "3"]
    assert (case.hosts, case.ranks) == (4, 4)


def test_marks() -> None:
    def draw(*given: str) -> list[str]:
        return list(given)

    text = "a\n<!-- x 'y z' -->\nold\n<!-- end -->\nb <!-- c -->old<!-- end --> d\n<!-- of others -->\n"
    drawn = "a\n<!-- x 'y z' -->\nx\ny z\n<!-- end -->\nb <!-- c -->c<!-- end --> d\n<!-- of others -->\n"
    assert filled(text, draw) == drawn == filled(drawn, draw)
    assert list(table(("", "a"), [("", 1), ("b", 2)])) == ["| | a |", "|---|---|", "|  | 1 |", "| b | 2 |"]


def of(contender: str, size: int, us: float) -> dict[str, object]:
    """A row of figures."""
    return {"contender": contender, "size": size, "median_us": us}


def test_auto_is_compared_with_contenders_of_its_own_launch() -> None:
    launches = [
        [of(*row) for row in zip(("native", "ring", "auto"), (4, 4, 4), us, strict=True)]
        for us in ((90.0, 200.0, 91.0), (70.0, 150.0, 73.0), (80.0, 60.0, 61.8))
    ]
    found = middle(launches, "auto")
    assert [row["median_us"] for row in found] == [80.0, 60.0, 61.8]
    assert found[2]["median_us_of_launches"] == [91.0, 73.0, 61.8]


def test_of_several_launches_each_row_is_the_middle_one() -> None:
    taken = ((1108.0, 41.0), (1380.0, 40.0), (1245.0, 43.0))
    found = middle([[of("native", 64, large), of("native", 2, small)] for large, small in taken], "auto")
    assert [(row["size"], row["median_us"]) for row in found] == [(64, 1245.0), (2, 41.0)]


def test_means_of_launches() -> None:
    first, second = ({"contender": "a", "mean_us": us, "ran": ran} for us, ran in ((1.0, "x"), (4.0, "y")))
    assert means([[first], [second]]) == [{"contender": "a", "mean_us": 2.5, "ran": "x"}]


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--only", "net-g*,memory-gloo", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["net-gloo", "memory-gloo"]
    with pytest.raises(SystemExit):
        main(["peers", "--only", "nobody"])
    assert "--only nobody matches no case: there are memory-openmpi" in capsys.readouterr().err
