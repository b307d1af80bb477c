"""A least-squares problem with 2**20 unknowns that PyLops-MPI's CGLS solves. Rank 0 prints a line of JSON.

    launch/mpirun -n 4 python tests/mpi/programs/pylops_program.py

Each rank has seen the same model through a weighted smoothing filter of its own. The gradient is the sum of all ranks'
parts: a sum of 2**20 values in each iteration.
"""

from __future__ import annotations

import json

import numpy as np
import pylops
import pylops_mpi
from mpi4py import MPI

N = 2**20
ITERATIONS = 10
comm = MPI.COMM_WORLD

position = np.linspace(0.0, 1.0, N)
model = sum(np.sin(2 * np.pi * k * position) / k for k in (1, 3, 17, 301))
weights = np.random.default_rng(comm.rank).uniform(0.5, 1.5, N)
smooth = pylops.Smoothing1D(2 * comm.rank + 3, N)
system = pylops_mpi.MPIVStack([pylops.Diagonal(weights) @ smooth])


def broadcast(values: np.ndarray) -> pylops_mpi.DistributedArray:
    """An array that every rank has all of."""
    array = pylops_mpi.DistributedArray(N, partition=pylops_mpi.Partition.BROADCAST)
    array[:] = values
    return array


data = system @ broadcast(model)
found, _, iterations, _, _, cost = pylops_mpi.cgls(system, data, x0=broadcast(np.zeros(N)), niter=ITERATIONS, tol=1e-12)
residual = (system @ found - data).norm() / data.norm()
error = np.linalg.norm(found.local_array - model) / np.linalg.norm(model)
if comm.rank == 0:
    results = {
        "iterations": int(iterations),
        "first_cost": float(cost[0]),
        "residual": float(residual),
        "error": float(error),
        "norm": float(np.linalg.norm(found.local_array)),
    }
    print(json.dumps(results))
