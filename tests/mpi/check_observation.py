"""What each rank warns of, logs and refuses, over MPI."""

from __future__ import annotations

import logging
import warnings

import numpy as np
from logs import logged
from mpi.world import raised
from mpi4py import MPI

from compcoll import AccuracyWarning, Communicator, ErrorFeedback, Int8, MinMax
from compcoll.errors import CollectiveMismatch, InvalidArgument

X = np.linspace(-1, 1, 4096, dtype=np.float32)


def check_rank_0_warns_once(comm: MPI.Intracomm) -> None:
    communicator = Communicator(comm)
    feedback = ErrorFeedback()
    for kept, expected in ((feedback, 0), (None, 1), (None, 0), (feedback, 0)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            communicator.allreduce(X, codec=MinMax(bits=1), algorithm="ring", feedback=kept)
        assert [each.category for each in found] == [AccuracyWarning] * expected * (comm.rank == 0 and comm.size > 1)
    communicator.free()


def check_max_error(comm: MPI.Intracomm) -> None:
    communicator = Communicator(comm)
    if comm.size > 1:  # one rank loses nothing
        for start in (communicator.allreduce, communicator.iallreduce, communicator.allreduce_init):
            refused = raised(lambda start=start: start(X, codec="int8", algorithm="ring", max_error=1e-6))
            assert type(refused) is InvalidArgument and "max_error=1e-06" in str(refused), refused
        differs = raised(lambda: communicator.allreduce(X, codec="int8", algorithm="ring", max_error=0.5 + comm.rank))
        assert isinstance(differs, CollectiveMismatch) and "max_error 0.5" in str(differs), differs
    total = communicator.allreduce(X, codec="int8", algorithm="ring", max_error=0.1)
    assert np.linalg.norm(total - comm.size * X.astype(np.float64)) <= 0.1 * np.linalg.norm(total)
    communicator.free()


def check_lines_of_the_log(comm: MPI.Intracomm) -> None:
    with logged(logging.DEBUG) as records:
        communicator = Communicator(comm)
        for _ in range(2):
            communicator.allreduce(X, codec=Int8(), algorithm="ring")
        communicator.iallreduce(X).wait()
        communicator.allreduce(X)
        communicator.free()
    lines = [record.getMessage() for record in records]
    first = [line for line in lines if line.startswith("allreduce of 16 KiB float32")]
    assert len(first) == 2 * (comm.rank == 0), lines
    ended = [line for line in lines if line.startswith(f"rank {comm.rank}: allreduce")]
    assert len(ended) == 4 and len(lines) == len(first) + len(ended), lines
    assert " by shared_memory, uncompressed, " in ended[-1] or comm.size == 1, ended
    with logged(logging.WARNING) as records:
        communicator = Communicator(comm)
        communicator.allreduce(X, codec=Int8(), algorithm="ring")
        communicator.free()
    assert records == []
