"""``python -m compcoll run``, and the table that it prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.environments import MPI, Completed

from compcoll.__main__ import main
from compcoll.mpi.totals import Totals

PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI

def main():
    comm, x, total = MPI.COMM_WORLD.Dup(), np.full(1 << 14, 0.1, np.float32), np.empty(1 << 14, np.float32)
    for _ in range(3):
        comm.Allreduce(x, total)
    comm.Bcast(x)
    comm.Iallreduce(x, total).Wait()
    print(sys.argv[1:], comm.allreduce(1), np.allclose(total, 0.1 * comm.size, rtol=1e-3), bool((x == x[0]).all()))
    if "fail" in sys.argv:
        raise SystemExit(3)

main()
"""
N = 1 << 16  # bytes of the message above


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the table's rows, by method."""
    return {
        line.split()[0]: re.split(r"  +", line)[1:] for line in text.splitlines() if re.match(r"[A-Z]?\w+ +\d", line)
    }


@pytest.mark.every_mpi
@pytest.mark.parametrize(
    ("options", "compressed", "would"),
    [
        (["--codec", "zfp", "--rate", "16", "--min-bytes", "4K"], {"Allreduce": 3, "Iallreduce": 1}, False),
        (
            ["--codec", "zfp:rate=16", "--min-bytes", "4K", "--moved"],
            {"Allreduce": 3, "Iallreduce": 1, "Bcast": 1},
            False,
        ),
        (["--codec", "int8", "--min-bytes", "4K", "--dry-run"], {"Allreduce": 3, "Iallreduce": 1}, True),
        (["--codec", "zfp", "--rate", "16", "--min-bytes", "1M"], {}, False),
        ([], {}, False),
    ],
    ids=["sums", "moved", "dry run", "small", "no codec"],
)
def test_an_unchanged_program(
    mpi: MPI,
    mpirun: Callable[..., Completed],
    program: Path,
    options: list[str],
    compressed: dict[str, int],
    would: bool,
) -> None:
    done = mpirun(2, "compcoll", "run", *options, program, "--its", "arguments")
    assert done.stdout.strip() == "['--its', 'arguments'] 2 True True"
    found = rows(done.stderr)
    assert {name: int(cells[1]) for name, cells in found.items() if name != "all" and int(cells[1])} == compressed
    assert [int(cells[0]) for cells in found.values()] == [3, 1, 1, 5]
    assert ("would save" in done.stderr) == would
    assert "compcoll run" not in done.ranks[1].stderr


@pytest.mark.first_mpi
def test_a_module_and_its_exit_status(mpi: MPI, mpirun: Callable[..., Completed], program: Path) -> None:
    env = {"PYTHONPATH": str(program.parent)}
    done = mpirun(2, "compcoll", "run", "--codec", "zfp:rate=16", "-m", "program", "fail", env=env, check=False)
    assert done.returncode == 3 and "['fail'] 2" in done.stdout and "Allreduce" in done.stderr


def test_a_program_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--codec", "int8"]) == 1
    assert "no program was given" in capsys.readouterr().err
    assert main(["run", "--codec", "no such codec", "program.py"]) == 1


def test_table() -> None:
    totals = Totals()
    totals.left("Bcast", 100, 0.5)
    totals.compressed("Allreduce", 4096, 3072, 1e-3, 2.0, 3.0)
    totals.compressed("Allreduce", 4096, 3072, 2e-3, 1.0, 1.5)
    found = rows(totals.table("heading"))
    assert found == {
        "Allreduce": ["2", "2", "8 KiB", "6 KiB", "2.0e-03", "3.000", "4.500"],
        "Bcast": ["1", "0", "100 B", "0 B", "0", "0.500", "0.500"],
        "all": ["3", "2", "8.098 KiB", "6 KiB", "2.0e-03", "3.500", "5.000"],
    }
    totals.compressed("Reduce", 1, 0, None, 0.0, 0.0)
    assert rows(totals.table(""))["Reduce"][4] == rows(totals.table(""))["all"][4] == "unknown"
