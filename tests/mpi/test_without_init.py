"""A process in which MPI was not initialized: named errors, and no abort."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_INIT = """
import mpi4py
mpi4py.rc.initialize = False
import compcoll
import numpy as np
from mpi4py import MPI
comm = compcoll.Intracomm(MPI.Intracomm())
try:
    compcoll.Intracomm(comm, codec="int8")
except compcoll.errors.InvalidArgument as error:
    print(error)
try:
    compcoll.allreduce(np.zeros(4))
except compcoll.errors.CommunicatorBroken as error:
    print(error)
"""


def test_mpi_has_to_be_initialized() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_INIT], capture_output=True, text=True, timeout=60)
    first, second = ran.stdout.splitlines() or [ran.stderr, ""]
    assert "sessions are not supported" in first and "not initialized" in second
