"""The MPI test harness reports failing, hanging and dying ranks, and leaves nothing running."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.checks import CheckJob, Outcome
from mpi.environments import MPI, Completed
from mpi.job import JobError, launcher

CHECKS = """
import os, signal, time, unittest

def check_good(comm):
    assert comm.allreduce(1) == comm.size

def check_one_rank_fails(comm):
    assert comm.rank != 1, "rank one is unhappy"

def check_skipped(comm):
    raise unittest.SkipTest("not for this test")

def check_fails_while_others_wait(comm):
    def wait_for_rank_one():
        comm.recv(source=1)
    assert comm.rank != 1, "rank one left early"
    wait_for_rank_one()

def check_hangs(comm):
    def the_place_it_hangs():
        time.sleep(1000)
    if comm.rank == 1:
        the_place_it_hangs()

def check_dies(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    comm.barrier()

def check_good_again(comm):
    assert comm.allreduce(1) == comm.size
"""


def checks_of(names: list[str], mpi: MPI, folder: Path) -> CheckJob:
    checks = folder / "checks"
    checks.mkdir()
    (checks / "check_scratch.py").write_text(CHECKS)
    return CheckJob(3, [f"check_scratch.{name}" for name in names], folder, mpi.prefix, checks=checks, timeout=6.0)


def test_failures_are_told_apart(mpi: MPI, tmp_path: Path) -> None:
    job = checks_of(["check_good", "check_one_rank_fails", "check_skipped", "check_good_again"], mpi, tmp_path)
    assert job.outcome("check_scratch.check_good").status == "passed"
    failed = job.outcome("check_scratch.check_one_rank_fails")
    assert failed.status == "failed"
    assert "[rank 1] Traceback" in failed.detail and "rank one is unhappy" in failed.detail
    skipped = job.outcome("check_scratch.check_skipped")
    assert (skipped.status, "not for this test" in skipped.detail) == ("skipped", True)
    assert job.outcome("check_scratch.check_good_again") == Outcome("passed")
    assert job.end().status == "passed"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param(
            "check_fails_while_others_wait", ["rank one left early", "wait_for_rank_one"], marks=pytest.mark.slow
        ),
        pytest.param("check_hangs", ["the_place_it_hangs"], marks=pytest.mark.slow),
        ("check_dies", ["rank 1: died of SIGSEGV"]),
    ],
)
def test_a_check_that_ends_its_job_is_reported_and_the_others_still_run(
    mpi: MPI, tmp_path: Path, name: str, said: list[str]
) -> None:
    job = checks_of(["check_good", name, "check_good_again"], mpi, tmp_path)
    assert job.outcome("check_scratch.check_good").status == "passed"
    outcome = job.outcome(f"check_scratch.{name}")
    assert outcome.status == "failed"
    for words in said:
        assert words in outcome.detail
    assert job.outcome("check_scratch.check_good_again") == Outcome("passed")
    assert job.end().status == "passed"


def test_mpirun_hands_back_each_rank(mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom mpi4py import MPI\nprint('rank', MPI.COMM_WORLD.rank, *sys.argv[1:])\n")
    done = mpirun(3, script, "an argument")
    assert [rank.stdout for rank in done.ranks] == [f"rank {r} an argument\n" for r in range(3)]


def test_mpirun_reports_a_failed_rank(mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from mpi4py import MPI\nassert MPI.COMM_WORLD.rank != 1, 'rank one is unhappy'\n")
    with pytest.raises(JobError, match="rank one is unhappy") as error:
        mpirun(3, script)
    assert "rank 1: exit status 1" in str(error.value)


def test_mpirun_kills_a_hanging_job_and_says_where_it_was(mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nfrom mpi4py import MPI\ndef here_it_hangs(): time.sleep(1000)\nhere_it_hangs()\n")
    start = time.monotonic()
    with pytest.raises(JobError, match="took longer than 4 s") as error:
        mpirun(2, script, timeout=4)
    assert "here_it_hangs" in str(error.value)
    assert time.monotonic() - start < 20


def test_launcher_leaves_the_users_placement_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_mpirun", lambda prefix: Path("/bin/mpirun"))
    monkeypatch.setattr(launcher, "flavour", lambda mpirun: "openmpi")
    monkeypatch.setattr(launcher, "cores", lambda: 2)
    added = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]

    def prepared(*arguments: str, **environ: str) -> tuple[list[str], dict[str, str]]:
        command, environment = launcher.prepare(arguments, None, environ)
        return command[1:], environment

    assert prepared("-n", "2", "true")[0] == ["-n", "2", "true"]
    assert prepared("-n", "3", "true")[0] == [*added, "-n", "3", "true"]
    assert prepared("-n", "2", "true", ":", "-n", "1", "true")[0][:4] == added
    assert prepared("-n", "3", "--bind-to", "core", "true")[0][0] == "-n"
    assert prepared("--host", "a:3", "-n", "3", "true")[0][0] == "--host"
    assert prepared("-n", "3", "true", SLURM_JOB_ID="1")[0][0] == "-n"
    assert prepared("-n", "3", "true", OMPI_MCA_mpi_yield_when_idle="0")[1]["OMPI_MCA_mpi_yield_when_idle"] == "0"


def test_launcher_gives_mpich_ranks_a_rest_when_cores_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_mpirun", lambda prefix: Path("/bin/mpirun"))
    monkeypatch.setattr(launcher, "flavour", lambda mpirun: "mpich")
    monkeypatch.setattr(launcher, "cores", lambda: 2)
    assert "MPIR_CVAR_CH4_PROGRESS_THROTTLE" not in launcher.prepare(["-n", "2", "true"], None, {})[1]
    assert launcher.prepare(["-n", "3", "true"], None, {})[1]["MPIR_CVAR_CH4_PROGRESS_THROTTLE"] == "1"


def test_launcher_knows_an_mpirun_that_looks_for_its_own_on_path(tmp_path: Path) -> None:
    for name, text in (("mpirun", "mpiexec.its_own --version"), ("mpiexec.its_own", 'echo "Intel(R) MPI Library"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert launcher.flavour(tmp_path / "mpirun") == "mpich"
