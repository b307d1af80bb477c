"""Facts about the machine, the launcher and the MPI library, found without communication."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from .. import config
from ..gpu.awareness import mapped_files

# Names of the distributions that install a package, if they differ.
_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x")}

PACKAGES = ("compcoll", "numpy", "ml_dtypes", "zfpy", "mpi4py", "cupy", "torch", "tqdm", "matplotlib")

_FEATURES = ("sse4_2", "avx", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vbmi", "gfni", "asimd")

_NETWORKS = {
    "ucp": "UCX",
    "fabric": "libfabric",
    "psm2": "PSM2",
    "ibverbs": "verbs",
    "portals": "Portals",
}

_OTHERS = ("COMPCOLL_LAUNCH_", "COMPCOLL_NETLAB", "COMPCOLL_TEST_")

_SETTINGS = ("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "MPIR_CVAR_", "UCX_", "FI_", "PSM2_", "MPI4PY_")


class Launcher(NamedTuple):
    """The program that started this process.

    Attributes
    ----------
    name : str
        The program.
    ranks : int
        Number of ranks that it started; 1 without a launcher.
    rank : int
        The rank of this process.
    """

    name: str
    ranks: int = 1
    rank: int = 0


_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("MPICH's mpiexec or another with PMI", "PMI_SIZE", "PMI_RANK"),
    ("PALS", "PALS_SIZE", "PALS_RANKID"),
    ("Intel MPI or MVAPICH", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)


def launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Return the launcher of this process, found in the environment.

    Parameters
    ----------
    environment : mapping, optional
        Environment variables; by default those of this process.
    """
    for name, size, rank in _LAUNCHERS:
        if environment.get(size, "").isdigit() and environment.get(rank, "").isdigit():
            return Launcher(name, int(environment[size]), int(environment[rank]))
    return Launcher("none")


def versions() -> dict[str, str | None]:
    """Return the versions of `PACKAGES`; None for a package that is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        found[name] = "unknown version" if util.find_spec(name) is not None else None
        for distribution in (name, *_DISTRIBUTIONS.get(name, ())):
            with suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(distribution)
    return found


def cpu() -> tuple[str, list[str]]:
    """Return the CPU's name, and those of its features that matter for kernels."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    fields = dict(line.split(":", 1) for line in reversed(text.splitlines()) if ":" in line)
    fields = {name.strip().lower(): value.strip() for name, value in fields.items()}
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = (fields.get("flags") or fields.get("features") or "").split()
    return name, [feature for feature in _FEATURES if feature in flags]


def loaded_networks() -> list[str]:
    """Return the communication libraries loaded in this process. MPI does not necessarily use them."""
    paths = mapped_files()
    return [name for key, name in _NETWORKS.items() if any(f"lib{key}" in Path(path).name for path in paths)]


def settings(environment: Mapping[str, str] = os.environ) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Return compcoll's settings in the environment, the unknown ones among them, and MPI's transport settings."""
    known = {value for value in vars(config).values() if isinstance(value, str) and value.startswith("COMPCOLL_")}
    ours = {name: value for name, value in sorted(environment.items()) if name.startswith("COMPCOLL_")}
    mpis = {name: value for name, value in sorted(environment.items()) if name.startswith(_SETTINGS)}
    return ours, [name for name in ours if name not in known and not name.startswith(_OTHERS)], mpis


def binding(cores: Sequence[Sequence[int]], present: int) -> str:
    """Describe how the ranks of a node are bound to its cores.

    Parameters
    ----------
    cores : sequence
        For each rank of the node, the cores that it may run on.
    present : int
        Cores of the node.
    """
    if len(cores) > 1 and sum(map(len, cores)) == len({core for each in cores for core in each}):
        return "each rank bound to cores of its own"
    if all(len(each) == present for each in cores):
        return "not bound"
    return "bound to part of the cores" if len({tuple(each) for each in cores}) == 1 else "bound to shared cores"
