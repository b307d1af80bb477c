"""``python -m compcoll choose`` tells what calls do, and from what it knows it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compcoll.__main__ import main
from compcoll.layout import World
from compcoll.plan.cost import DEFAULTS, Link, Profile, Timing
from compcoll.tools.choose import EXAMPLE, chosen, gain

GBIT = 1e9 / 8


def at(gbit: float) -> Profile:
    return replace(DEFAULTS, between=Link(DEFAULTS.between.latency, 1 / (gbit * GBIT)))


def test_example_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(EXAMPLE)[3:], "--profile", "defaults"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("allreduce of 104857600 bytes of float32 on 16 ranks, 16 nodes of 1; error up to 0.01")
    assert sum(line.endswith("<- auto") for line in lines) == 1
    assert any(re.search(r"^native +- .* 1\.00×", line) for line in lines)
    assert any("nothing was measured here" in line for line in lines)


def test_help_has_the_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        main(["choose", "--help"])
    assert EXAMPLE in capsys.readouterr().out


@pytest.mark.parametrize("nbytes", ["4K", "1M", "64M"])
@pytest.mark.parametrize("error", ["1e-1", "1e-2", "1e-3"])
def test_choice_is_that_of_auto(nbytes: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--bytes", nbytes, "-p", "8", "--profile", "defaults"]
    assert main(["choose", *common, "--error", error]) == 0
    *explained, call = capsys.readouterr().out.splitlines()
    assert main(["explain", *common, "--codec", "auto", "--tolerance", error]) == 0
    assert capsys.readouterr().out.splitlines() == explained
    compresses = any(" with " in line for line in explained if line.startswith("choice: "))
    codec = f', codec="auto", tolerance={float(error):g}' if compresses else ""
    assert call == f"in a program: compcoll.allreduce(x{codec})"


@pytest.mark.parametrize("error", [1e-1, 1e-2, 1e-3, 1e-5])
def test_errors_stay_inside_and_slow_links_gain(error: float) -> None:
    gains = []
    for gbit in (1000, 10, 1):
        plan = chosen(at(gbit), World(16), 1 << 26, error)
        (row,) = (line for line in str(plan).splitlines() if line.endswith("  <- auto"))
        assert float(row.split()[-3]) <= error and f" {gain(plan):.2f}× " in row
        gains.append(gain(plan))
    assert 1 == gains[0] < gains[2]


def test_link_that_is_given_drops_timings_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: Callable[..., Path]
) -> None:
    slow = Timing("native", "none", 32.0, World(16), ((1 << 20, 3600.0),))
    path = stored(replace(DEFAULTS, timings=(slow,), source="measured"))
    arguments = ["choose", "--bytes", "1M", "-p", "16", "--profile", str(path)]
    assert main(arguments) == 0
    assert "3600.000 s" in capsys.readouterr().out
    assert main([*arguments, "--link", "10gbit"]) == 0
    out = capsys.readouterr().out
    assert "3600.000 s" not in out and f"profile: {path}, but for the link" in out


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    from compcoll.plan import profile

    place = profile.Place("MPI 1.0", ("a",), "host portable")
    return lambda known: profile.save(
        profile.Stored(known, place, "2026-01-01T00:00:00+00:00"), tmp_path / "profile.json"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--bytes 1M -p 1", "at least 2 are needed"),
        ("--bytes 1M -p 4 --error -1", "relative error of 0 to below 1"),
        ("--bytes 1M -p 4 --error nan", "relative error of 0 to below 1"),
        ("--bytes 2 -p 4", "at least the 4 bytes of one float32"),
        ("--bytes much -p 4", "'much' is not a size"),
        ("--bytes 1M -p 4 --link 10", "'10' is not a speed"),
        ("--bytes 1M -p 4 --ranks-per-node 5", "5 ranks per node: 1 to 4"),
        ("--bytes 1M -p 4 --profile nowhere.json", "nowhere.json"),
    ],
)
def test_mistakes_are_told(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", *arguments.split()]) == 1
    assert said in capsys.readouterr().err
