"""Programs that know nothing of compcoll give the same results, within an error, where it compresses their sums."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.environments import MPI, Completed

PROGRAMS = Path(__file__).with_name("programs")
RUN = ("compcoll", "run", "--codec", "zfp", "--rate", "16", "--min-bytes", "64K")

TOLERANCE = 1e-3
"""By how large a part a result may differ. Where a ring compressed both programs' sums, with 16 bits for each value,
none differed by more than 1e-4: HeAT's norms of sums of float32 noise, and the residual after ten gradients of float64.
"""
ROUNDING = 1e-5
ZEROS = {"split_either_way": TOLERANCE, "qr": ROUNDING, "orthogonality": ROUNDING}
"""Results that are 0 but for errors, and how large they may become. The first is that of one compressed sum (4e-4); the
sums of the others are smaller than --min-bytes.
"""


@pytest.mark.slow
@pytest.mark.first_mpi
@pytest.mark.parametrize("program", ["heat", "pylops"])
def test_same_results(mpi: MPI, program: str, mpirun: Callable[..., Completed]) -> None:
    installed = mpi.prefix / "programs"
    if not (installed / program).is_dir():
        pytest.skip(f"no {program} beside {mpi.name}: make test-all installs it")
    script = PROGRAMS / f"{program}_program.py"
    env = {"PYTHONPATH": os.pathsep.join(map(str, (PROGRAMS / "stand_ins", installed))), "OMP_NUM_THREADS": "1"}
    plain = json.loads(mpirun(4, script, env=env, timeout=100).stdout)
    done = mpirun(4, *RUN, script, env=env, timeout=100)
    compressed = json.loads(done.stdout)
    assert plain.keys() == compressed.keys()
    for name, value in plain.items():
        if name in ZEROS:
            assert max(abs(value), abs(compressed[name])) <= ZEROS[name], name
        else:
            assert compressed[name] == pytest.approx(value, rel=TOLERANCE), name
    assert any("saved" in line for line in done.stderr.splitlines()), done.report
