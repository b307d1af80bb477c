"""The pages of training steps, from figures that are made up; and the program that times local steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.records import RUN
from mpi.environments import Completed

from osu_like_bench.pages import steps
from osu_like_bench.pages.records import Case, Record

MPIRun = Callable[..., Completed]
RATES = {"ddp": 10.0, "onebit-adam": 150.0, "alone": 1000.0, "unfused": 500.0, "diloco": 980.0}
RATIOS = {"under_way_median": 1.01, "under_way_mean": 1.02}


@pytest.fixture
def optimizer_speed() -> Any:
    pytest.importorskip("torch")
    from osu_like_bench.pages import optimizer_speed

    return optimizer_speed


def contenders(case: Case) -> list[str]:
    words = case.command.split()
    return words[words.index("--compare") + 1].split(",") if "--compare" in words else ["mpi4py", "inline", "async"]


def times(case: Case, slow: str) -> list[dict[str, Any]]:
    """Of all contenders but gloo and the slow one each is faster than the one before."""
    found = []
    for place, contender in enumerate([*contenders(case), *["gloo"] * ("tcp" in case.command)]):
        ms = 2000.0 if contender == slow else 1000 * 0.15 ** (0 if contender == "gloo" else place)
        row = {"contender": contender}
        if "backends" in case.command:
            row["median_us"] = ms / 1e6
        else:
            row |= {"median_ms": ms, "compute_ms": 1.0, "exposed_ms": 0.0 if contender == "gloo" else ms}
            row |= {"sent_megabytes": 0.5} | ({} if contender == "gloo" else {"communication_ms": 3.0})
        found.append(row)
    return found


def rates() -> list[dict[str, Any]]:
    return [
        {"contender": name, "mean_ms": 32e3 / rate, "examples_per_second": rate} | (RATIOS if name == "diloco" else {})
        for name, rate in RATES.items()
    ]


def pages(slow: str = "") -> dict[str, str]:
    """All sections of all pages, with figures in which one contender is slower than gloo."""
    found = {}
    for page in steps.PAGES:
        record: Record = page.record()
        for case in record.cases.values():
            case.results = rates() if "optimizer_speed" in case.command else times(case, slow)
            case.run, case.others_percent = RUN, 30.0
        found[page.name] = "\n".join("\n".join(steps._case(record, name)) for name in record.cases)
    return found


def test_pages_tell_commands_figures_and_goals() -> None:
    texts = pages()
    for name, text in texts.items():
        assert "missed" not in text and f"others used 30 % of the machine: **hints**. [Figures]({name}.json)" in text
    assert "    --compare gloo,compcoll+zfp:rate=8,compcoll+minmax:bits=8\n" in texts["ddp"]
    assert "launch/netlab up --hosts 4 --rate 1gbit\nlaunch/netlab run -n 4 -- python -m" in texts["ddp"]
    assert "| `gloo` | 1000 | 1.0 | 0.0 |  |  | 0.5 | 1.00 |\n| `compcoll+zfp:rate=8` | 150 |" in texts["ddp"]
    text = texts["local-steps"]
    assert "| `ddp` | 3200 | 10 | 1 | 1 % |\n| `onebit-adam` | 213 | 150 | 15 | 15 % |" in text
    assert "under way takes 1.010 × one without (mean 1.020 ×)." in text
    assert "- `diloco` ≥ 50 × `ddp`: 98, met.\n- `diloco` ≥ 0.95 × `alone`: 0.98, met." in text


def test_a_goal_that_is_missed_is_told() -> None:
    texts = pages(slow=steps.ACPSGD)
    assert texts["ddp"].count("missed") == 0
    assert texts["low-rank"].count(", **missed**") == 3 + 4  # in labs, and of work, in two tables
    assert "- `acpsgd:rank=4` ≥ 5 × as fast as `gloo`: 0.5, **missed**.\n" in texts["low-rank"]


def test_what_was_not_measured() -> None:
    record = Record(Path("ddp.json"))
    record.cases["a"] = Case("bench", missing="netlab needs root")
    assert list(steps._case(record, "a"))[-1] == "netlab needs root [Figures](ddp.json)."


def test_goals_are_of_cases_that_there_are() -> None:
    for page in steps.PAGES:
        assert steps.GOALS[page.name].keys() <= page.record().cases.keys()


def test_steps_with_an_average_under_way(optimizer_speed: Any) -> None:
    arguments = optimizer_speed.parser().parse_args(["--every", "10", "--fragments", "2", "--delay", "2"])
    under_way = (1, 2, 6, 7)  # a fragment leaves at the end of the fifth step, and one of the tenth
    seconds = {step: 3.0 if step % 10 in under_way else 2.0 for step in range(13, 33)}
    assert optimizer_speed.under_way(arguments, seconds) == {"under_way_median": 1.5, "under_way_mean": 1.5}
    arguments = optimizer_speed.parser().parse_args(["--every", "10", "--fragments", "5", "--delay", "2"])
    assert optimizer_speed.under_way(arguments, seconds) == {}


def test_commands_of_local_steps_are_understood(optimizer_speed: Any) -> None:
    (page,) = (page for page in steps.PAGES if page.name == "local-steps")
    for case in page.record().cases.values():
        words = case.command.split("optimizer_speed")[1].split()
        assert set(optimizer_speed.parser().parse_args(words).only) == set(RATES)


@pytest.mark.slow
@pytest.mark.with_torch
def test_speed_of_local_steps_is_told_and_recorded(mpirun: MPIRun, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    few = ["--parameters", "20000", "--batch", "2", "--rounds", "1", "--every", "8", "--fragments", "2", "--delay", "1"]
    told = mpirun(2, "osu_like_bench.pages.optimizer_speed", *few, "--json", path).stdout
    record = json.loads(path.read_text())
    assert [result["contender"] for result in record["results"]] == list(RATES)
    for result in record["results"]:
        assert result["examples_per_second"] == pytest.approx(2 * 2 / (result["mean_ms"] / 1e3))
        assert f"{result['examples_per_second']:10.1f} examples/s" in told
    table = list(steps._rates({row["contender"]: row for row in record["results"]}))
    assert len(table) == 2 + len(RATES) + 2 and table[2].startswith("| `ddp` |") and table[2].count(" | 1 | ") == 1
    assert record["run"]["command"].startswith("python -m osu_like_bench.pages.optimizer_speed --parameters 20000")
