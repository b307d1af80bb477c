"""Find out whether MPI accepts device memory, for `compcoll.transports.library.gpu_awareness`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_OWN_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPIR_", "MPI_LOCAL", "SLURM_")
_LIBRARIES = ("libmpi.so", "libmpich.so", "libmpi_")  # libmpi_abi, HPE's libmpi_gnu_123, IBM's libmpi_ibm …
_SELF_TEST_SECONDS = 60.0

_SELF_TEST = """
import cupy, mpi4py.MPI as MPI
sent, received = cupy.arange(300000, dtype="f4"), cupy.zeros(300000, "f4")
cupy.cuda.Stream.null.synchronize()
MPI.COMM_SELF.Sendrecv(sent, 0, recvbuf=received)
assert (sent == received).all()
"""


class Awareness(NamedTuple):
    """Whether MPI accepts device memory.

    Attributes
    ----------
    aware : bool
        Whether MPI accepts device memory.
    how : str
        The source of this answer.
    """

    aware: bool
    how: str


def ask_library() -> Awareness | None:
    """Call the query function of Open MPI or MPICH; return None if the loaded MPI library has neither."""
    for path in mapped_files():
        if not Path(path).name.startswith(_LIBRARIES):
            continue
        handle = ctypes.CDLL(path)
        if hasattr(handle, "MPIX_Query_cuda_support"):
            return Awareness(bool(handle.MPIX_Query_cuda_support()), "MPIX_Query_cuda_support")
        if hasattr(handle, "MPIX_GPU_query_support"):
            supported = ctypes.c_int(0)
            handle.MPIX_GPU_query_support(0, ctypes.byref(supported))  # 0: MPIX_GPU_SUPPORT_CUDA
            return Awareness(bool(supported.value), "MPIX_GPU_query_support")
    return None


def mapped_files() -> list[str]:
    """Return the paths of the libraries that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/" in line and ".so" in line})


def self_test() -> Awareness:
    """Test whether a process can send device memory to itself. A child process runs the test, since it may crash."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _SELF_TEST], env=environment, capture_output=True, timeout=_SELF_TEST_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Awareness(False, f"a self-test did not end: {type(error).__name__}")
    return Awareness(ended.returncode == 0, "a self-test in a child process")
