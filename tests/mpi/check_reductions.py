"""MPI's own reductions, called without Python, are those that mpi4py's own calls make."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from compcoll import Communicator
from compcoll.execute import engine
from compcoll.pending import NeedsPolling
from compcoll.transports.mpi import MPITransport

FORMATS = [*"bBhHiIlLqQfd"]
OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}


def values(comm: MPI.Intracomm, n: int, kind: str) -> np.ndarray:
    return np.random.default_rng([n, comm.rank]).integers(0, 4, n).astype(kind)


def check_every_type_and_operation(comm: MPI.Intracomm) -> None:
    transport = MPITransport(comm)
    for op, operation in OPERATIONS.items():
        allreduce, _ = transport.reductions("allreduce", op)
        scatter, _ = transport.reductions("reduce_scatter", op)
        for kind in FORMATS:
            for n in (0, 1, 1000):
                x, expected, found = values(comm, n, kind), np.zeros(n, kind), np.zeros(n, kind)
                comm.Allreduce(x, expected, operation)
                allreduce(x, found)
                assert found.tobytes() == expected.tobytes()
                in_place = x.copy()
                allreduce(in_place, in_place)
                assert in_place.tobytes() == expected.tobytes()
                blocks = np.tile(x, comm.size)
                scatter(blocks, found)
                comm.Reduce_scatter_block(blocks, expected, operation)
                assert found.tobytes() == expected.tobytes()
    transport.free()


class Counting(MPI.Intracomm):
    """Knows how often mpi4py was asked to reduce."""

    asked = 0

    def Allreduce(self, *arguments: Any) -> None:
        self.asked += 1
        super().Allreduce(*arguments)


def check_other_memory_goes_by_mpi4py(comm: MPI.Intracomm) -> None:
    """Arrays that are not in C order, and element types that MPI may not know: and nothing else."""
    transport = MPITransport(comm)
    own = transport.comm
    counting = transport.comm = Counting(own)
    reduce, _ = transport.reductions("allreduce", "sum")
    transport.comm = own
    x = values(comm, 600, "d").reshape(20, 30)
    expected = comm.allreduce(x)
    x.flags.writeable = False
    found = np.zeros_like(x)
    reduce(x, found)
    np.testing.assert_array_equal(found, expected)
    assert counting.asked == 0
    ordered, found = np.asfortranarray(x), np.zeros_like(x, order="F")
    reduce(ordered, found)
    np.testing.assert_array_equal(found, expected)
    assert counting.asked == 1
    found = np.zeros(600, np.longdouble)
    reduce(x.reshape(-1).astype(np.longdouble), found)
    np.testing.assert_array_equal(found, expected.reshape(-1))
    found = np.zeros(600)
    reduce([x, MPI.DOUBLE], [found, MPI.DOUBLE])
    np.testing.assert_array_equal(found, expected.reshape(-1))
    assert counting.asked == 3
    transport.free()


def check_errors_keep_nothing(comm: MPI.Intracomm) -> None:
    """What MPI refuses is raised by name; the arrays are free afterwards, and the next reduction works."""
    transport = MPITransport(comm)
    reduce, _ = transport.reductions("allreduce", "band")
    x, out = bytearray(np.ones(8).tobytes()), bytearray(64)
    with pytest.raises(MPI.Exception) as raised:
        reduce(memoryview(x).cast("d"), memoryview(out).cast("d"))  # bits of floating-point numbers
    assert raised.value.Get_error_class() == MPI.ERR_OP
    x.extend(b"more"), out.extend(b"more")  # nobody holds them
    bits = values(comm, 8, "i")
    found = np.zeros_like(bits)
    reduce(bits, found)
    np.testing.assert_array_equal(found, np.bitwise_and.reduce(comm.allgather(bits)))
    with pytest.raises(ValueError, match="mismatch"):
        reduce(bits, found[:4])
    transport.free()


def check_a_thread_that_computes_in_python(comm: MPI.Intracomm) -> None:
    """A communicator's calls give the same while another thread takes the GIL."""
    communicator = Communicator(comm)
    x = np.ones(1 << 16)
    out = np.empty_like(x)
    communicator.allreduce(x, out=out, algorithm="native")
    stopped = threading.Event()

    def compute() -> None:
        while not stopped.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for number in range(20):
            x[:] = number
            communicator.allreduce(x, out=out, algorithm="native")
            assert (out == number * comm.size).all()
    finally:
        stopped.set()
        thread.join()
    communicator.free()


def check_other_calls_advance_without_python(comm: MPI.Intracomm) -> None:
    """One of MPI's nonblocking collectives, whose rounds need all ranks, while one of ours waits in C++ for a rank that
    comes to it when that has ended.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "sleeps_within", lambda timeout: 20_000)
        communicator = Communicator(comm)
    x, long, total = np.full(16, comm.rank, np.float32), np.full(1 << 18, comm.rank, np.float64), np.empty(1 << 18)
    expected = sum(range(comm.size))
    communicator.allreduce(x)
    vars(communicator._engine)["follow"] = None  # by which Python would wait
    for last in range(comm.size):
        communicator.allreduce(x)
        request = comm.Iallreduce(long, total)
        if comm.rank == last:
            request.Wait()
        assert (communicator.allreduce(x) == expected).all()
        request.Wait()
        assert (total == expected).all()
    communicator.free()


def check_nonblocking_ones_are_known_to_need_looks(comm: MPI.Intracomm) -> None:
    transport = MPITransport(comm)
    x, out, gathered = (np.full(n * comm.size, comm.rank, np.float32) for n in (4, 4, 4 * comm.size))
    calls = {
        "allreduce": lambda: transport.reductions("allreduce", "sum")[1](x, out),
        "in place": lambda: transport.reductions("allreduce", "max")[1](out, out),
        "reduce_scatter": lambda: transport.reductions("reduce_scatter", "sum")[1](x, out[:4]),
        "allgather": lambda: transport.iallgatherv(x, gathered, [4 * comm.size] * comm.size),
        "alltoall": lambda: transport.ialltoall(x, out),
        "bcast": lambda: transport.ibcast(x, 0),
    }
    for name, call in calls.items():
        started = call()
        assert isinstance(started, NeedsPolling), name
        while not started.Test():
            pass
    assert (x == 0).all() and (gathered.reshape(comm.size, -1).T == range(comm.size)).all()
    transport.free()
