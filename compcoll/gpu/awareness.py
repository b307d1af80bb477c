"""The test whether MPI accepts device memory. The most reliable source is asked first."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .. import config

_KIND = "cuda"
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
    """Whether MPI accepts device memory, and how that is known.

    Attributes
    ----------
    aware : bool
        Whether it does.
    how : str
        The source of the answer.
    """

    aware: bool
    how: str


@lru_cache(maxsize=1)
def ask(memory_kinds: str | None) -> Awareness:
    """Return whether device memory may be passed to MPI, which must be initialized.

    The sources are, in this order: COMPCOLL_GPU_AWARE; MPI's info key mpi_memory_alloc_kinds (MPI-4.1, section 11.4.3);
    the functions MPIX_Query_cuda_support and MPIX_GPU_query_support; a child process that sends device memory.
    """
    told = config.gpu_aware()
    if told is not None:
        return Awareness(told, f"{config.GPU_AWARE}={int(told)}")
    kinds = memory_kinds or ""
    if any(kind.strip().split(":")[0] == _KIND for kind in kinds.split(",")):
        return Awareness(True, f"MPI's mpi_memory_alloc_kinds has {kinds}")
    return _asked_library() or _self_test()


def _asked_library() -> Awareness | None:
    """Return the answer of Open MPI's or MPICH's extension; None if there is none."""
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


def _self_test() -> Awareness:
    """Return whether a child process, since it may crash, can send device memory to itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _SELF_TEST], env=environment, capture_output=True, timeout=_SELF_TEST_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Awareness(False, f"a self-test did not end: {type(error).__name__}")
    return Awareness(ended.returncode == 0, "a self-test in a child process")
