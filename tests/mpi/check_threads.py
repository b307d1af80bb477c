"""Threads: each has a communicator of its own, and all work at once; two in one communicator are refused."""

from __future__ import annotations

import threading
import time
import unittest

import numpy as np
import pytest
from mpi4py import MPI

from compcoll import Communicator
from compcoll.errors import CommunicatorBusy

ROUNDS = 40
WAYS = [(None, "auto"), ("minmax", "ring"), ("zfp", "direct"), (None, "native"), (None, "shared_memory")]


def work(communicator: Communicator, number: int, errors: list[BaseException]) -> None:
    draw = np.random.default_rng(number)
    try:
        for _ in range(ROUNDS):
            n = int(draw.integers(1, 20000))
            codec, algorithm = WAYS[draw.integers(len(WAYS))]
            x = np.full(n, 1.0 + communicator.rank, np.float32)
            exact = communicator.size * (communicator.size + 1) / 2
            requests = [communicator.iallreduce(x, codec=codec, algorithm=algorithm) for _ in range(draw.integers(3))]
            results = [communicator.allreduce(x, codec=codec, algorithm=algorithm)]
            results += [request.wait() for request in requests]
            for result in results:
                assert np.abs(result - exact).max() <= 0.02 * exact, (n, codec, algorithm)
    except BaseException as error:
        errors.append(error)


def check_threads_on_communicators_of_their_own(comm: MPI.Intracomm) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise unittest.SkipTest("MPI was initialised without MPI_THREAD_MULTIPLE")
    for progress in ("wait", "thread"):
        communicators = [Communicator(comm, progress=progress, timeout=40) for _ in range(3)]
        errors: list[BaseException] = []
        threads = [threading.Thread(target=work, args=(c, i, errors)) for i, c in enumerate(communicators)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        for communicator in communicators:
            communicator.free()


def check_second_thread_is_refused(comm: MPI.Intracomm) -> None:
    """While a thread is in a blocking call, other threads' calls are refused at once, and its own goes on."""
    communicator = Communicator(comm, timeout=40)
    x = np.full(5000, 1.0 + comm.rank, np.float32)
    results: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: results.append(communicator.allreduce(x, algorithm="ring")))
    if comm.rank != 0:  # these ranks' threads wait for rank 0, which comes when all have tried
        thread.start()
        while communicator.sequence_number == 0:
            time.sleep(0.001)
        for call in (communicator.allreduce, communicator.iallreduce, communicator.allreduce_init):
            with pytest.raises(CommunicatorBusy, match="another thread"):
                call(x)
    comm.gather(None, root=0)
    if comm.rank == 0:
        thread.start()
    thread.join()
    assert np.abs(results[0] - comm.size * (comm.size + 1) / 2).max() < 1e-3
    assert np.array_equal(communicator.allreduce(x, algorithm="ring"), results[0])
    communicator.free()
