"""One rank's uncaught error ends the job, whatever made its communicator; one that is caught ends nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.environments import Completed

NUMPY = """
import sys, numpy as np, compcoll
from mpi4py import MPI
rank, x = MPI.COMM_WORLD.rank, np.ones(100_000, np.float32)
compcoll.allreduce(x)
def go_on(): compcoll.allreduce(x, codec="zfp", rate=8, algorithm="ring")
"""
TORCH = """
import sys, torch, torch.distributed as dist, compcoll.torch
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group({backend!r}, init_method="mpi://")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 10))
{wrap}
def go_on(): model(torch.ones(5, 100)).sum().backward()
go_on()
"""
WRAPPED = "model = DistributedDataParallel(model)\n"
SGD = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
PROGRAMS = {
    "compress": TORCH.format(
        backend="gloo", wrap=f"{WRAPPED}kept = compcoll.torch.compress(model, 'zfp', rate=8, algorithm='ring')"
    ),
    "DGC": TORCH.format(backend="gloo", wrap=f"{WRAPPED}kept = compcoll.torch.DGC(model, {SGD}, 0.1)"),
    "ACPSGD": TORCH.format(backend="gloo", wrap="kept = compcoll.torch.ACPSGD(model, rank=1)"),
    "ACPSGD with a codec": TORCH.format(
        backend="gloo", wrap="kept = compcoll.torch.ACPSGD(model, rank=1, codec='zfp', rate=8, algorithm='ring')"
    ),
    "backend": TORCH.format(backend="compcoll", wrap=WRAPPED),
}
QUICK = ("compress",)
FAILS = "if rank == 1: raise RuntimeError('as intended')\nfor _ in range(1000): go_on()\n"


def test_the_job_ends(mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    ends(mpirun, tmp_path, NUMPY)


@pytest.mark.with_torch
@pytest.mark.parametrize(
    "program",
    [
        name if name in QUICK else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.first_mpi])
        for name in PROGRAMS
    ],
)
def test_the_job_ends_with_torch(mpirun: Callable[..., Completed], tmp_path: Path, program: str) -> None:
    ends(mpirun, tmp_path, PROGRAMS[program])


def ends(mpirun: Callable[..., Completed], tmp_path: Path, program: str) -> None:
    script = tmp_path / "fails.py"
    script.write_text(program + FAILS)
    started = time.monotonic()
    done = mpirun(2, script, timeout=90, check=False)
    assert done.returncode != 0 and "RuntimeError: as intended" in done.report
    assert time.monotonic() - started < 60


def test_what_is_caught_ends_nothing(mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    script = tmp_path / "caught.py"
    script.write_text(
        NUMPY + "import threading\n"
        "try:\n"
        "    if rank == 1: raise RuntimeError('as intended')\n"
        "except RuntimeError: print('went on')\n"
        "def fail(): raise ValueError('in a thread')\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join()\n"
        "go_on()\n"
    )
    done = mpirun(2, script, timeout=60)
    assert "went on" in done.ranks[1].stdout and all("ValueError: in a thread" in rank.stderr for rank in done.ranks)


def test_output_is_kept_and_the_hook_before_is_called(mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    script = tmp_path / "hook.py"
    script.write_text(
        "import sys\n"
        "sys.excepthook = lambda kind, error, trace: print('the hook before:', error)\n"
        + NUMPY
        + "print('not yet flushed')\n"
        + FAILS
    )
    done = mpirun(2, script, timeout=60, check=False)
    assert done.returncode != 0
    assert "the hook before: as intended" in done.ranks[1].stdout and "not yet flushed" in done.ranks[1].stdout
    assert "rank 1: RuntimeError was not caught: all ranks end" in done.ranks[1].stderr


def test_an_interpreter_that_someone_types_into_goes_on(mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    script = tmp_path / "typed.py"
    script.write_text(
        NUMPY + "import code\n"
        "sys.ps1 = '>>> '\n"
        "code.InteractiveInterpreter().runcode(compile('raise RuntimeError(3)', 'typed', 'exec'))\n"
        "go_on()\n"
        "print('went on')\n"
    )
    done = mpirun(2, script, timeout=60)
    assert all("went on" in rank.stdout and "RuntimeError: 3" in rank.stderr for rank in done.ranks)


@pytest.mark.only_on("openmpi")
def test_others_are_told_where_mpi_goes_on(mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    script = tmp_path / "survives.py"
    script.write_text(
        NUMPY + "from compcoll.errors import PeerFailed\n"
        "comm = compcoll.Communicator()\n"
        "if rank == 1: raise RuntimeError('as intended')\n"
        "try:\n"
        "    for _ in range(1000): comm.allreduce(x, codec='zfp', rate=8, algorithm='ring')\n"
        "except PeerFailed as error: print('told:', error)\n"
        "assert comm.shrink().size == 2\n"
        "print('went on', flush=True)\n"
        "import os; os._exit(0)\n"
    )
    done = mpirun(3, script, timeout=60, check=False, options=("--with-ft", "ulfm"))
    for rank in (done.ranks[0], done.ranks[2]):
        assert "told: rank 1 of 3 has died" in rank.stdout and "went on" in rank.stdout, done.report
    assert "RuntimeError: as intended" in done.ranks[1].stderr
