"""What `python -m compcoll doctor` says, and when it says that something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi.environments import Completed

import compcoll
from compcoll.host.device import HostDevice
from compcoll.tools import doctor, selftest
from compcoll.tools import machine as surroundings
from compcoll.tools.machine import Launcher, binding, launcher, settings


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without mpirun."""
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "compcoll", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environ,
    )


@pytest.mark.parametrize("instruction_set", HostDevice.instruction_sets())
def test_digests_are_the_stored_ones(instruction_set: str) -> None:
    assert dict(selftest.digests(HostDevice(2, instruction_set))) == selftest.DIGESTS


def test_codecs_are_as_they_should_be() -> None:
    assert selftest.check_codecs() == []


def test_a_broken_codec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selftest.DIGESTS, "zfp rate=8, float32", "0" * 16)
    wrong = selftest.check_codecs()
    assert len(wrong) == len(HostDevice.instruction_sets()) and all("expected 0000" in text for text in wrong)
    report = doctor.Report()
    doctor._codecs(report)
    assert not report.healthy and "something is wrong" in doctor.to_text(report)[-1]


def test_a_codec_that_forgets_nan_is_found() -> None:
    class Forgets:
        def __init__(self, coder: Any) -> None:
            self.wire_nbytes, self.encode = coder.wire_nbytes, coder.encode
            self._coder = coder

        def decode(self, n: int, add: Any, wires: Any, out: Any, *, scale: float = 1.0) -> None:
            self._coder.decode(n, add, wires, out, scale=scale)
            np.nan_to_num(out, copy=False)

    class Forgetful(compcoll.Codec):
        name = "mine"

        def coder(self, device: Any, dtype: str) -> Any:
            return Forgets(selftest.CODECS["zfp rate=16"].coder(device, dtype))

    assert selftest._check_values("mine", Forgetful()) == ["mine: NaN became 0.0"]


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Launcher("none")),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, Launcher("Open MPI's mpirun", 4, 3)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, Launcher("MPICH's mpiexec or another with PMI", 2, 0)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "7"}, Launcher("Slurm's srun", 8, 7)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, Launcher("none")),
    ],
)
def test_launchers(environment: dict[str, str], found: Launcher) -> None:
    assert launcher(environment) == found


def test_settings() -> None:
    environment = {
        "COMPCOLL_THREADS": "2",
        "COMPCOLL_TIMEOUTS": "3",
        "COMPCOLL_NETLAB": "x",
        "UCX_TLS": "tcp",
        "A": "b",
    }
    ours, unknown, mpis = settings(environment)
    assert unknown == ["COMPCOLL_TIMEOUTS"] and mpis == {"UCX_TLS": "tcp"} and len(ours) == 3


def test_bindings() -> None:
    assert binding([[0], [1]], 4) == "each rank bound to cores of its own"
    assert binding([[0, 1], [0, 1]], 2) == "not bound"
    assert binding([[0], [0]], 2) == "bound to part of the cores"
    assert binding([[0, 1], [1, 2]], 4) == "bound to shared cores"


def test_alone() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("compcoll", "numpy", "CPU", "kernels", "MPI", "launcher", "GPU", "compcoll works here"):
        assert word in done.stdout
    assert "memory: wires go through pinned host memory (" in done.stdout


def test_json() -> None:
    done = run("--json", COMPCOLL_INSTRUCTION_SET="portable", COMPCOLL_SEGMNT="4096", COMPCOLL_GPU_AWARE="1")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"]
    assert report["instruction_set"] == "portable" and report["ranks"] == 1
    assert report["gpu_aware"] is True and report["gpu_aware_by"] == "COMPCOLL_GPU_AWARE=1"
    told = [finding["text"] for finding in report["findings"]]
    assert any("COMPCOLL_SEGMNT" in text for text in told)
    assert (len(report["instruction_sets"]) == 1) or any("but this CPU can run" in text for text in told)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"COMPCOLL_TIMEOUT": "soon"}, "COMPCOLL_TIMEOUT='soon'"),
        ({"COMPCOLL_INSTRUCTION_SET": "mmx"}, "COMPCOLL_INSTRUCTION_SET='mmx'"),
        ({"COMPCOLL_PROFILE": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "started 2 ranks, but MPI sees 1"),
        ({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "mpi4py finds no MPI library"),
        ({"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "COMPCOLL_INSTRUCTION_SET": "mmx"}, "COMPCOLL_INSTRUCTION_SET='mmx'"),
    ],
)
def test_what_is_wrong_is_told(environment: dict[str, str], said: str) -> None:
    done = run(**environment)
    assert done.returncode == 1 and said in done.stdout, done.stdout + done.stderr
    assert "something is wrong" in done.stdout and "Traceback" not in done.stderr


def test_only_one_of_many_singletons_speaks() -> None:
    done = run(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")
    assert done.returncode == 1 and not done.stdout


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_under_mpirun(mpirun: Callable[..., Completed], ranks: int) -> None:
    done = mpirun(ranks, "compcoll", "doctor", "--json", timeout=100)
    report = json.loads(done.stdout)
    assert report["ok"] and report["ranks"] == ranks and report["launcher"]["ranks"] == ranks
    assert report["codecs_wrong"] == report["sums_wrong"] == []
    assert all(not rank.stdout for rank in done.ranks[1:])
    if ranks > 1:
        assert report["inside_a_node"]["bytes_per_second"] > 0
    if ranks > len({core for cores in report["cores"] for core in cores}):
        assert any("share" in finding["text"] for finding in report["findings"])


def test_every_rank_says_by_its_status_what_one_found(mpirun: Callable[..., Completed]) -> None:
    done = mpirun(2, "compcoll", "doctor", check=False, env={"COMPCOLL_THREADS": "none"})
    assert done.returncode != 0 and "COMPCOLL_THREADS='none'" in done.stdout


def test_cupy_is_known_by_its_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "cupy-cuda13x":
            return "14.2.0"
        raise surroundings.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(surroundings.metadata, "version", version)
    assert surroundings.versions()["cupy"] == "14.2.0"
