"""launch/training_steps.py: its pages, from records that are made up, and commands that osu_like_bench takes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes.records import RUN
from mpi.environments import Completed

from osu_like_bench import backends
from osu_like_bench.parser import build_parser

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
MPIRun = Callable[..., Completed]
ACPSGD = "acpsgd:rank=4"
LOCAL_STEPS = "launch/optimizer_speed.py"
RATES = {"ddp": 10.0, "onebit-adam": 150.0, "alone": 1000.0, "unfused": 500.0, "diloco": 980.0}


@pytest.fixture
def steps() -> ModuleType:
    return importlib.import_module("training_steps")


@pytest.fixture
def optimizer_speed() -> ModuleType:
    return importlib.import_module("optimizer_speed")


def contenders(case: Any) -> list[str]:
    words = case.words.split()
    given = words[words.index("--compare") + 1] if "--compare" in words else "mpi4py,inline,async,gloo"
    return list(given.split(","))


def times(case: Any, slow: str) -> list[dict[str, Any]]:
    """Of all contenders but gloo and the slow one each is faster than the one before."""
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
    return results


def rates() -> list[dict[str, Any]]:
    ratios = {"under_way_median": 1.01, "under_way_mean": 1.02}
    return [
        {"contender": name, "mean_ms": 32e3 / rate, "examples_per_second": rate} | (ratios if name == "diloco" else {})
        for name, rate in RATES.items()
    ]


def keep(steps: ModuleType, folder: Path, *, slow: str = "") -> None:
    """Records of all cases, in which one contender is slower than gloo."""
    for name, case in steps.CASES.items():
        results = rates() if case.words.startswith(LOCAL_STEPS) else times(case, slow)
        path = folder / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"run": RUN, "results": results, "others_percent": 30.0}))


def test_commands_are_understood(steps: ModuleType, optimizer_speed: ModuleType) -> None:
    for case in steps.CASES.values():
        program, _, words = case.words.partition(" ")
        if program == "backends":
            assert backends.build_parser().parse_args(words.split()).compare == ",".join(contenders(case))
        elif program == LOCAL_STEPS:
            assert set(optimizer_speed.parser().parse_args(words.split()).only) == set(RATES)
        else:
            build_parser().parse_args([program, *words.split()])


def test_pages_tell_commands_figures_and_goals(
    steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "PAGES", tmp_path)
    keep(steps, tmp_path)
    assert [steps._write(page) for page in steps.HEADS] == [0, 0, 0]
    for page in steps.HEADS:
        text = (tmp_path / f"{page}.md").read_text()
        assert "missed" not in text and "commit `abc1234`; others used 30 % of the machine: **hints**" in text
        for name, case in steps.CASES.items():
            assert f"[Figures]({name}.json)" in text or not name.startswith(f"{page}/")
            assert f"## {case.title}\n" in text or not name.startswith(f"{page}/")
    text = (tmp_path / "ddp.md").read_text()
    assert "    --compare gloo,compcoll+zfp:rate=8,compcoll+minmax:bits=8\n" in text
    assert "| `gloo` | 1000 | 1.0 | 0.0 |  |  | 0.5 | 1.00 |\n| `compcoll+zfp:rate=8` | 150 |" in text
    text = (tmp_path / "local-steps.md").read_text()
    assert "| `ddp` | 3200 | 10 | 1 | 1 % |\n| `onebit-adam` | 213 | 150 | 15 | 15 % |" in text
    assert "under way takes 1.010 × one without (mean 1.020 ×)." in text
    assert "- `diloco` ≥ 50 × `ddp`: 98, met.\n- `diloco` ≥ 0.95 × `alone`: 0.98, met." in text


def test_a_goal_that_is_missed_is_told(steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PAGES", tmp_path)
    keep(steps, tmp_path, slow=ACPSGD)
    assert steps._write("ddp") == 0
    assert steps._write("low-rank") == 3 + 4  # in labs, and of work, in two tables
    assert "- `acpsgd:rank=4` ≥ 5 × as fast as `gloo`: 0.5, **missed**.\n" in (tmp_path / "low-rank.md").read_text()


def test_steps_with_an_average_under_way(optimizer_speed: ModuleType) -> None:
    arguments = optimizer_speed.parser().parse_args(["--every", "10", "--fragments", "2", "--delay", "2"])
    under_way = (1, 2, 6, 7)  # a fragment leaves at the end of the fifth step, and one of the tenth
    seconds = {step: 3.0 if step % 10 in under_way else 2.0 for step in range(13, 33)}
    assert optimizer_speed.under_way(arguments, seconds) == {"under_way_median": 1.5, "under_way_mean": 1.5}
    arguments = optimizer_speed.parser().parse_args(["--every", "10", "--fragments", "5", "--delay", "2"])
    assert optimizer_speed.under_way(arguments, seconds) == {}


@pytest.mark.with_torch
def test_speed_of_local_steps_is_told_and_recorded(steps: ModuleType, mpirun: MPIRun, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    few = ["--parameters", "20000", "--batch", "2", "--rounds", "1", "--every", "8", "--fragments", "2", "--delay", "1"]
    told = mpirun(2, LAUNCH / "optimizer_speed.py", *few, "--json", path).stdout
    record = json.loads(path.read_text())
    assert [result["contender"] for result in record["results"]] == list(RATES)
    for result in record["results"]:
        assert result["examples_per_second"] == pytest.approx(2 * 2 / (result["mean_ms"] / 1e3))
        assert f"{result['examples_per_second']:10.1f} examples/s" in told
    table = list(steps._rates(steps._results(record)))
    assert len(table) == 2 + len(RATES) + 2 and table[2].startswith("| `ddp` |") and table[2].count(" | 1 | ") == 1


def test_a_run_that_fails_leaves_the_record(tmp_path: Path) -> None:
    labs = importlib.import_module("labs")
    path = tmp_path / "a.json"
    path.write_text("before")
    assert labs.measure(["false"], path, 10.0) == 1
    assert path.read_text() == "before"
    assert labs.measure(["sh", "-c", f"echo '{{}}' > {path}"], path, 10.0) == 0
    assert "others_percent" in json.loads(path.read_text())
