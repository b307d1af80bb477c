"""launch/training_steps.py: its pages, from records that are made up, and commands that osu_like_bench takes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes.records import RUN

from osu_like_bench import backends
from osu_like_bench.parser import build_parser


@pytest.fixture
def steps() -> ModuleType:
    return importlib.import_module("training_steps")


def contenders(case: Any) -> list[str]:
    words = case.words.split()
    given = words[words.index("--compare") + 1] if "--compare" in words else "mpi4py,inline,async,gloo"
    return list(given.split(","))


def keep(steps: ModuleType, folder: Path, *, slow: str = "") -> None:
    """Records in which one contender is slower than gloo, and of all others each faster than the one before."""
    for name, case in steps.CASES.items():
        results = []
        for place, contender in enumerate(contenders(case)):
            ms = 2000.0 if contender == slow else 1000 * 0.15 ** (0 if contender == "gloo" else place)
            results.append(
                {
                    "contender": contender,
                    "median_ms": ms,
                    "median_us": ms / 1e6,
                    "compute_ms": 1.0,
                    "exposed_ms": 0.0 if contender == "gloo" else ms,
                    "communication_ms": None if contender == "gloo" else 3.0,
                    "codec_ms": None,
                    "sent_megabytes": 0.5,
                }
            )
        path = folder / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"run": RUN, "results": results, "others_percent": 30.0}))


def test_commands_are_understood(steps: ModuleType) -> None:
    for case in steps.CASES.values():
        program, _, words = case.words.partition(" ")
        if program == "backends":
            assert backends.build_parser().parse_args(words.split()).compare == ",".join(contenders(case))
        else:
            build_parser().parse_args([program, *words.split()])


def test_pages_tell_commands_figures_and_goals(
    steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "PAGES", tmp_path)
    keep(steps, tmp_path)
    assert [steps._write(page) for page in steps.HEADS] == [0, 0]
    for page in steps.HEADS:
        text = (tmp_path / f"{page}.md").read_text()
        assert "missed" not in text and "commit `abc1234`; others used 30 % of the machine: **hints**" in text
        for name, case in steps.CASES.items():
            assert f"[Figures]({name}.json)" in text or not name.startswith(f"{page}/")
            assert f"## {case.title}\n" in text or not name.startswith(f"{page}/")
    text = (tmp_path / "ddp.md").read_text()
    assert "    --compare gloo,compcoll+zfp:rate=8,compcoll+minmax:bits=8\n" in text
    assert "| `gloo` | 1000 | 1.0 | 0.0 |  |  | 0.5 | 1.00 |\n| `compcoll+zfp:rate=8` | 150 |" in text


def test_a_goal_that_is_missed_is_told(steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PAGES", tmp_path)
    keep(steps, tmp_path, slow=steps.ACPSGD)
    assert steps._write("ddp") == 0
    assert steps._write("low-rank") == 3 + 4  # in labs, and of work, in two tables
    assert "- `acpsgd:rank=4` ≥ 5 × as fast as `gloo`: 0.5, **missed**.\n" in (tmp_path / "low-rank.md").read_text()


def test_a_run_that_fails_leaves_the_record(tmp_path: Path) -> None:
    labs = importlib.import_module("labs")
    path = tmp_path / "a.json"
    path.write_text("before")
    assert labs.measure(["false"], path, 10.0) == 1
    assert path.read_text() == "before"
    assert labs.measure(["sh", "-c", f"echo '{{}}' > {path}"], path, 10.0) == 0
    assert "others_percent" in json.loads(path.read_text())
