"""Threads: each has a communicator of its own, and all of them work at once."""

from __future__ import annotations

import threading
import unittest

import numpy as np
from mpi4py import MPI

from compcoll import Communicator

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
