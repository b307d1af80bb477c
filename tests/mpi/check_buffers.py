"""Buffers over real MPI, in every collective: not aligned, longer than MPI counts, or none at all."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
from mpi.world import raised
from mpi4py import MPI
from oracles.collectives import arguments, expected

from compcoll import Communicator
from compcoll.algorithms import native
from compcoll.algorithms.record import REDUCTIONS, UNEVEN
from compcoll.errors import InvalidBuffer
from compcoll.plan.choose import NAMES
from compcoll.sparse import TopK

CONSTANTS = (MPI.IN_PLACE, MPI.BOTTOM)


def numbers(comm: MPI.Intracomm, dtype: Any = np.float32, rows: int = 600) -> list[np.ndarray]:
    """Small whole numbers, others on each rank; of all ranks."""
    return [(np.arange(rows * comm.size) % 5 + rank).astype(dtype) for rank in range(comm.size)]


def unaligned(x: np.ndarray) -> np.ndarray:
    there = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    there[...] = x
    assert not there.flags.aligned
    return there


def result_of(communicator: Communicator, method: str, x: Any, **options: Any) -> Any:
    rows = getattr(x, "size", 0)
    given = arguments(method.removeprefix("i"), rows, communicator.size, communicator.rank, communicator.size - 1)
    result = getattr(communicator, method)(x, **given, **options)
    return result.wait() if method.startswith("i") else result


def check_arrays_that_are_not_aligned(comm: MPI.Intracomm) -> None:
    """By MPI's own, whose datatypes need them so, and by what is chosen; known calls, too."""
    communicator = Communicator(comm)
    for dtype in (np.float32, np.float16):
        inputs = numbers(comm, dtype)
        for collective, algorithm in itertools.product(NAMES, ("native", "auto")):
            right = expected(collective, inputs, comm.rank, comm.size - 1)
            for method in (collective, f"i{collective}"):
                for x, out in ((True, False), (False, True), (True, True)):
                    values = unaligned(inputs[comm.rank]) if x else inputs[comm.rank]
                    gets_out = out and collective not in UNEVEN and right is not None
                    options = {"out": unaligned(right * 0)} if gets_out else {}
                    result = result_of(communicator, method, values, algorithm=algorithm, **options)
                    assert np.array_equal(result, right), (collective, algorithm, method, x, out)
                    assert result is options.get("out", result)
                    assert np.array_equal(values, inputs[comm.rank])
    communicator.free()


def check_more_than_mpi_counts(comm: MPI.Intracomm) -> None:
    """The limit is lowered: what is moved goes by our own algorithms, or MPI's own is refused by name."""
    communicator = Communicator(comm)
    with mock.patch.object(native, "MOST", 500):
        for dtype in (np.uint8, np.float32, np.complex128):
            inputs = numbers(comm, dtype)
            for collective in NAMES:
                reduces = collective in REDUCTIONS
                for method in (collective, f"i{collective}"):
                    if not reduces or dtype is np.float32:
                        result = result_of(communicator, method, inputs[comm.rank])
                        right = expected(collective, inputs, comm.rank, comm.size - 1)
                        assert np.array_equal(result, right), (collective, dtype)
                        assert comm.size == 1 or communicator.stats.algorithm != "native"
                    if collective not in UNEVEN:  # whose sizes are known only when it has begun
                        error = raised(
                            lambda m=method, x=inputs[comm.rank]: result_of(communicator, m, x, algorithm="native")
                        )
                        assert type(error) is InvalidBuffer and "takes at most 500 elements" in str(error), error
        to_one = [400] + [0] * (comm.size - 1)  # few from each rank, but many to one
        communicator.alltoallv(np.zeros(400, np.float32), to_one, algorithm="native")
        assert communicator.stats.algorithm == ("pairwise" if comm.size > 1 else "copy")
        x = np.zeros(5000, np.float32)
        x[comm.rank :: 7] = 1.0 + comm.rank
        codec = TopK(density=1 / 7, select="exact")
        everybody = np.sum(comm.allgather(x), axis=0)
        for algorithm in ("sparse_native", "sparse_direct", "sparse_ring"):
            assert np.array_equal(communicator.allreduce(x, codec=codec, algorithm=algorithm), everybody), algorithm
            assert communicator.stats.algorithm == "sparse_ring" or comm.size == 1
    assert (communicator.allreduce(np.ones(3, np.float32)) == comm.size).all()
    communicator.free()


def check_constants_are_no_buffers(comm: MPI.Intracomm) -> None:
    communicator, x = Communicator(comm), numbers(comm)[comm.rank]
    for collective in NAMES:
        for constant in CONSTANTS:
            calls: list[Any] = [lambda c=collective, k=constant: result_of(communicator, c, k)]
            if collective not in (*UNEVEN, "reduce", "gather"):  # of which not all ranks use out
                calls.append(lambda c=collective, k=constant: result_of(communicator, c, x, out=k))
            for call in calls:
                error = raised(call)
                assert type(error) is InvalidBuffer and "both as x and as out" in str(error), error
                assert np.array_equal(x, numbers(comm)[comm.rank])
                assert (communicator.allreduce(np.ones(3, np.float32)) == comm.size).all()
    communicator.free()
