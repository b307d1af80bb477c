"""Sum an array over all ranks with int8, and print what it took: mpirun -n 2 python first_sum.py."""

import numpy as np

import compcoll

comm = compcoll.get_communicator()
x = np.random.default_rng(comm.rank).standard_normal(4_000_000, np.float32)
total = compcoll.allreduce(x, codec="int8", algorithm="ring")

exact = compcoll.allreduce(x, algorithm="native")
if comm.rank == 0:
    error = np.linalg.norm(total - exact) / np.linalg.norm(exact)
    print(f"{comm.size} ranks, relative error {error:.1e}")
