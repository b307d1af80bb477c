"""Collectives of compcoll.torch in compiled functions over the backend "compcoll" on MPI."""

from __future__ import annotations

import sys
from pathlib import Path

from groups import world
from mpi4py import MPI

sys.path.append(str(Path(__file__).parents[1] / "groups"))


def check_compiled_collectives(comm: MPI.Intracomm) -> None:
    from check_compiled import calls_keep_their_number_and_order

    with world():
        calls_keep_their_number_and_order("aot_eager")
