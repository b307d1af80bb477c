"""The harness itself: MPI works, and every rank of the job is here."""

import numpy as np
from mpi4py import MPI


def check_allreduce(comm: MPI.Intracomm) -> None:
    mine = np.full(1000, comm.rank + 1.0)
    total = np.empty_like(mine)
    comm.Allreduce(mine, total)
    assert (total == comm.size * (comm.size + 1) / 2).all()


def check_communicator_is_a_duplicate(comm: MPI.Intracomm) -> None:
    assert MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.CONGRUENT
