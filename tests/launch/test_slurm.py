"""launch/slurm.sbatch, as docs/launching/slurm.md shows it, with a stand-in for srun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi.environments import MPI

LAUNCH = Path(__file__).parents[2] / "launch"
PAGE = LAUNCH.parent / "docs" / "launching" / "slurm.md"
PROGRAM = """
import sys
import numpy as np
import compcoll
compcoll.allreduce(np.ones(1 << 20, np.float32), codec="int8", algorithm=sys.argv[1])
"""


def test_the_page_shows_the_file() -> None:
    assert f"```bash\n{(LAUNCH / 'slurm.sbatch').read_text()}```" in PAGE.read_text()


@pytest.mark.only_on("openmpi")
def test_a_program_runs_and_says_whether_it_compresses(mpi: MPI, tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    options = '[ "$1" = --mpi=pmix ] && [ "$2" = --cpu-bind=cores ] && shift 2'
    srun.write_text(f'#!/bin/sh\n{options}\nexec {sys.executable} {LAUNCH / "mpirun"} -n 2 "$@"\n')
    srun.chmod(0o755)
    activate = tmp_path / ".venv-system" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{tmp_path}:{Path(sys.executable).parent}:$PATH"\n')
    (tmp_path / "script.py").write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if not name.startswith("COMPCOLL_")}
    env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "COMPCOLL_PROFILE": "defaults"}
    command = ["bash", LAUNCH / "slurm.sbatch", "script.py", "ring"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "compcoll: allreduce of 4 MiB float32 on 2 ranks: int8 by ring asked for; ring with int8" in done.stderr
