"""The code of docs/jax.md runs on two ranks and three, and launch/train_jax.py agrees with NumPy in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.environments import MPI, Completed

LAUNCH = Path(__file__).parents[2] / "launch"

pytestmark = [pytest.mark.slow, pytest.mark.first_mpi]


@pytest.mark.parametrize("ranks", [2, 3])
def test_code_of_the_page_and_training(ranks: int, mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    """Two ranks have one core each, where a callback of JAX's would wait for itself with asynchronous dispatch."""
    if not any(mpi.prefix.glob("lib/python*/site-packages/jax")):
        pytest.skip(f"no JAX beside {mpi.name}: make test-all installs it")
    program = Path(__file__).with_name("jax_ranks.py")
    done = mpirun(
        ranks, program, tmp_path / "parameters.npz", env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(LAUNCH)}, timeout=90
    )
    *losses, last = done.stdout.splitlines()
    assert [float(line.split()[-1]) for line in losses][-1] < 0.36
    assert json.loads(last)["difference"] < 0.05
