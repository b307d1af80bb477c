"""Collectives of CuPy arrays over real MPI, all ranks on one GPU: the host's bits, and NumPy's sums in float64."""

from __future__ import annotations

import hashlib
import itertools

import cupy
import numpy as np
from mpi4py import MPI

import compcoll
from compcoll.algorithms import ALGORITHMS
from compcoll.plan.choose import ALLREDUCE

FLAT = [name for name in ALLREDUCE if ALGORITHMS[name].encodings("allreduce", 2, 1).levels]
"""The algorithms that encode inside a node, too."""
BOUNDS = {"zfp": 0.3, "minmax": 0.1, "cast": 0.01, "szp": 1.1e-3, "none": 1e-5}
"""Of the result, relative to the largest magnitude of the sum."""


class Bare:
    """An array on a GPU that tells no more than its memory."""

    def __init__(self, x: cupy.ndarray) -> None:
        self.__cuda_array_interface__ = x.__cuda_array_interface__
        self.x = x


def same_bits(comm: MPI.Intracomm, result: np.ndarray) -> None:
    assert len(set(comm.allgather(hashlib.sha256(result.tobytes()).digest()))) == 1


def main() -> None:
    comm = MPI.COMM_WORLD
    for n, algorithm, codec in itertools.product((5, 4099, 3_000_000), (*FLAT, "auto"), BOUNDS):
        name = None if codec == "none" else codec
        x = np.random.default_rng([n, comm.rank]).standard_normal(n).astype(np.float32)
        exact = np.empty(n)
        comm.Allreduce(x.astype(np.float64), exact)
        host = compcoll.allreduce(x, codec=name, algorithm=algorithm)
        # All on the GPU, whose memory the ranks share; then the odd ranks on the host, by way of pinned memory.
        for mixed in (False, True):
            on_gpu = not (mixed and comm.rank % 2)
            result = compcoll.allreduce(cupy.asarray(x) if on_gpu else x, codec=name, algorithm=algorithm)
            assert isinstance(result, cupy.ndarray) == on_gpu
            got = cupy.asnumpy(result)
            if algorithm != "auto":  # which may choose another algorithm on a GPU
                np.testing.assert_array_equal(got, host, err_msg=f"{(n, algorithm, codec, mixed)}")
                if name is not None:
                    same_bits(comm, got)
            error = np.abs(got - exact).max() / np.abs(exact).max()
            assert error <= BOUNDS[codec], (n, algorithm, codec, mixed, error)

    x = cupy.arange(1000, dtype=cupy.float32) + comm.rank
    for result, expected in (
        (compcoll.allgather(x), np.stack([np.arange(1000.0) + rank for rank in range(comm.size)])),
        (compcoll.bcast(x, root=comm.size - 1), np.arange(1000.0) + comm.size - 1),
        (compcoll.allreduce(x.astype(cupy.int64), op="max"), np.arange(1000) + comm.size - 1),
        (compcoll.allreduce(x.astype(cupy.float16), op="mean"), np.arange(1000) + (comm.size - 1) / 2),
        (compcoll.allreduce(x, codec="intsum", bits=32), comm.size * np.arange(1000.0) + sum(range(comm.size))),
        (compcoll.allgatherv(x[: comm.rank]), np.concatenate([np.arange(r) + r for r in range(comm.size)])),
    ):
        assert isinstance(result, cupy.ndarray)
        np.testing.assert_allclose(cupy.asnumpy(result), expected, rtol=1e-3)

    root = comm.size - 1
    everybody = np.stack([np.arange(1000.0) + rank for rank in range(comm.size)])
    counts = [10 * (rank + 1) for rank in range(comm.size)]
    for result, expected in (
        (compcoll.reduce(x, root, codec="cast"), everybody.sum(0) if comm.rank == root else None),
        (compcoll.gather(x, root), everybody if comm.rank == root else None),
        (compcoll.scatter(cupy.tile(x, comm.size), root), everybody[root]),
        (compcoll.alltoallv(x[: sum(counts)], counts), None),
    ):
        assert result is None or isinstance(result, cupy.ndarray)
        if expected is not None:
            np.testing.assert_allclose(cupy.asnumpy(result), expected, rtol=1e-2)

    own, total = compcoll.Intracomm(comm, codec="cast", min_bytes=1), cupy.empty_like(x)
    own.Allreduce(x, total)
    np.testing.assert_allclose(cupy.asnumpy(total), everybody.sum(0), rtol=1e-2)
    total[:] = 0
    own.Iallreduce(x, total).Wait()
    np.testing.assert_allclose(cupy.asnumpy(total), everybody.sum(0), rtol=1e-2)
    for on_gpu in (True, comm.rank % 2 == 0):  # also if only some ranks have their arrays on a GPU
        given, received = (x, total) if on_gpu else (cupy.asnumpy(x), cupy.asnumpy(total))
        received[:] = 0
        own.Allreduce(Bare(given) if on_gpu else given, received)
        np.testing.assert_allclose(received.tolist(), everybody.sum(0), rtol=1e-2)

    requests = [compcoll.iallreduce(x * i, codec="minmax", algorithm="ring") for i in range(5)]
    for i, request in enumerate(requests):
        expected = i * (comm.size * np.arange(1000.0) + sum(range(comm.size)))
        np.testing.assert_allclose(cupy.asnumpy(request.wait()), expected, atol=0.02 * max(expected.max(), 1))
    stats = compcoll.get_communicator().stats
    assert stats is not None and stats.device.startswith("cuda")


main()
