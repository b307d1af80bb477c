"""The codec of docs/own-codec.md is known by name once it is installed as the page says, and can be measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.environments import Completed

PAGE = (Path(__file__).parents[2] / "docs" / "own-codec.md").read_text()


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment in which the codec is installed, as by pip."""
    code, project = (re.search(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S) for kind in ("python", "toml"))
    assert code and project
    group = re.search(r'^\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"$', project[1], re.M)
    distribution = re.search(r'^name = "(.*)"\nversion = "(.*)"$', project[1], re.M)
    assert group and distribution and f'py-modules = ["{group[3].partition(":")[0]}"]' in project[1]
    (tmp_path / f"{group[3].partition(':')[0]}.py").write_text(code[1])
    info = tmp_path / f"{distribution[1].replace('-', '_')}-{distribution[2]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution[1]}\nVersion: {distribution[2]}\n")
    (info / "entry_points.txt").write_text(f"[{group[1]}]\n{group[2]} = {group[3]}\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}


(BENCHMARK,) = re.findall(r"^mpirun -n \d python -m osu_like_bench (allreduce .*)$", PAGE, re.M)
(CODEC,) = re.findall(r"--codec (\S+)", BENCHMARK)


def test_commands_know_the_name(installed: dict[str, str]) -> None:
    command = [sys.executable, "-m", "compcoll", "explain", "--bytes", "16M", "--codec", CODEC, "-p", "4"]
    done = subprocess.run(command, env={**os.environ, **installed}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert CODEC.partition(":")[0] in done.stdout


def test_the_benchmark_checks_its_results(installed: dict[str, str], mpirun: Callable[..., Completed]) -> None:
    words = BENCHMARK.replace("16M", "256K").split()
    done = mpirun(2, "osu_like_bench", *words, "-i", "3", "-x", "1", env=installed, timeout=60)
    assert re.search(rf"^# {CODEC.replace(':', ' ')}, float32", done.stdout, re.M)
    assert re.search(r"^262144 +[\d.]+ +[\d.]+ ", done.stdout, re.M)
