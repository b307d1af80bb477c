"""Sums, means and a QR decomposition of arrays that HeAT has split over the ranks. Rank 0 prints a line of JSON.

launch/mpirun -n 4 python tests/mpi/programs/heat_program.py
"""

from __future__ import annotations

import json

import heat as ht


def norm(x: ht.DNDarray) -> float:
    return float(ht.linalg.norm(x))


ht.random.seed(1)
values = ht.random.randn(40, 200_000, split=0)  # 8e6 of float32
assert values.dtype == ht.float32
rows, columns = ht.sum(values, axis=1), ht.sum(values, axis=0)
across = ht.mean(values, axis=0)
other = ht.resplit(values, 1)
there = ht.sum(other, axis=0)  # the same sums as `columns`, of columns that are whole on one rank

tall = ht.random.randn(200_000, 20, split=0)
q, r = ht.linalg.qr(tall)
gram = ht.matmul(ht.transpose(q), q)

results = {
    "total": float(ht.sum(values)),
    "rows": norm(rows),
    "columns": norm(columns),
    "mean_of_columns": norm(across),
    "mean": float(ht.mean(values)),
    "split_either_way": norm(ht.resplit(columns, 0) - there) / norm(there),
    "qr": norm(ht.matmul(q, r) - tall) / norm(tall),
    "orthogonality": norm(gram - ht.eye(20)),
    "r": norm(r),
}
if ht.MPI_WORLD.rank == 0:
    print(json.dumps(results))
