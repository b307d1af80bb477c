"""Bad input over real MPI: a named error on every rank, nothing lost, no hang."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi.world import nodes_apart, raised
from mpi4py import MPI

import compcoll
from compcoll import Communicator
from compcoll.errors import (
    CollectiveMismatch,
    CommunicatorBroken,
    InvalidArgument,
    InvalidBuffer,
    PeerTimeout,
    UnsupportedDType,
    UnsupportedRecovery,
)
from compcoll.plan.choose import NAMES


def assert_usable(comm: MPI.Intracomm) -> None:
    for options in ({}, {"codec": "minmax", "algorithm": "ring"}):
        result = compcoll.allreduce(np.full(100, 2.0, np.float32), comm=comm, **options)
        assert (result == 2 * comm.size).all()


def check_refusals(comm: MPI.Intracomm) -> None:
    x = np.arange(1000, dtype=np.float32)
    calls = [
        (InvalidArgument, lambda: compcoll.allreduce(x, codec="zfp", rate=1, comm=comm)),
        (InvalidArgument, lambda: compcoll.allreduce(x, codec="nope", comm=comm)),
        (InvalidBuffer, lambda: compcoll.allreduce(x[::2], comm=comm)),
        (UnsupportedDType, lambda: compcoll.allreduce(x.astype(int), codec="zfp", comm=comm)),
        (InvalidArgument, lambda: compcoll.bcast(x, comm.size, comm=comm)),
        (InvalidBuffer, lambda: compcoll.alltoall(x[: comm.size], out=x[: comm.size], comm=comm)),
    ]
    for kind, call in calls:
        assert isinstance(raised(call), kind)
        assert_usable(comm)


def check_one_rank_refuses(comm: MPI.Intracomm) -> None:
    x = np.arange(1000, dtype=np.float32)
    last = comm.rank == comm.size - 1
    for options in ({"codec": "zfp"}, {}):
        error = raised(lambda options=options: compcoll.allreduce(x[::2] if last else x, comm=comm, **options))
        assert isinstance(error, InvalidBuffer if last else CollectiveMismatch), error
        assert last or f"rank {comm.size - 1}: allreduce refused: InvalidBuffer" in str(error)
        assert (x == np.arange(1000)).all()
        assert_usable(comm)


def check_disagreement(comm: MPI.Intracomm) -> None:
    x = np.arange(50000, dtype=np.float32)
    odd = comm.rank == comm.size // 2
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"x": x}, {"x": x[:40000]}),
        ({"x": x}, {"x": x.astype(np.float64)}),
        ({"codec": "zfp", "rate": 8}, {"codec": "zfp", "rate": 12}),
        ({"codec": "zfp"}, {}),
        ({"algorithm": "ring", "codec": "zfp"}, {"algorithm": "direct", "codec": "zfp"}),
        ({"op": "sum"}, {"op": "max"}),
        ({"x": x[:1]}, {"x": x[:2]}),
    ]
    for usual, other in pairs:
        call = {"x": x} | (other if odd else usual)
        error = raised(lambda call=call: compcoll.allreduce(call.pop("x"), comm=comm, **call))
        if comm.size == 1:
            assert error is None
            continue
        assert isinstance(error, CollectiveMismatch), (usual, other, error)
        assert f"rank {comm.size // 2}" in str(error) and "(this one)" in str(error)
        assert (x == np.arange(50000)).all()
        assert_usable(comm)


def check_disagreement_of_calls_that_have_begun(comm: MPI.Intracomm) -> None:
    """Known sums through shared memory begin before all ranks are known to make the same call."""
    if comm.size == 1:
        return
    communicator = Communicator(comm)
    short, long = np.ones(8192, np.float32), np.ones(16384, np.float32)
    for _ in range(3):
        for x in (short, long):
            assert (communicator.allreduce(x, algorithm="shared_memory") == comm.size).all()
        with pytest.raises(CollectiveMismatch, match=r"(?s)8192.*16384"):
            communicator.allreduce(long if comm.rank else short, algorithm="shared_memory")
        under_way = communicator.iallreduce(short, algorithm="shared_memory") if comm.rank == 0 else None
        if under_way is None:
            assert (communicator.allreduce(short, algorithm="shared_memory") == comm.size).all()
        assert (communicator.allreduce(long, algorithm="shared_memory") == comm.size).all()
        assert under_way is None or (under_way.wait() == comm.size).all()


def check_different_collectives(comm: MPI.Intracomm) -> None:
    if comm.size == 1:
        return
    x = np.ones(100, np.float32)
    calls = [lambda: compcoll.allreduce(x, comm=comm), lambda: compcoll.allgather(x, comm=comm)]
    assert isinstance(raised(calls[comm.rank % 2]), CollectiveMismatch)
    assert_usable(comm)


def check_blocking_and_nonblocking_belong_together(comm: MPI.Intracomm) -> None:
    x = np.full(100, comm.rank, np.float32)
    for _ in range(3):
        calls = [lambda: compcoll.allreduce(x, comm=comm), lambda: compcoll.iallreduce(x, comm=comm).wait()]
        assert (calls[comm.rank % 2]() == sum(range(comm.size))).all()


def check_a_rank_that_is_late(comm: MPI.Intracomm) -> None:
    if comm.size == 1:
        return
    communicator = Communicator(comm, timeout=0.5)
    x = np.ones(100000, np.float32)
    if comm.rank:
        for call in (
            lambda: communicator.allreduce(x, codec="zfp", algorithm="ring"),
            lambda: communicator.allreduce(x),
        ):
            begin, error = time.monotonic(), raised(call)
            assert isinstance(error, PeerTimeout | CommunicatorBroken)
            assert isinstance(error, CommunicatorBroken) or error.missing == (0,), error
            assert time.monotonic() - begin < 10
        assert isinstance(raised(lambda: communicator.allreduce(x)), CommunicatorBroken)
    comm.Barrier()
    assert_usable(comm)


def check_no_time_out(comm: MPI.Intracomm) -> None:
    communicator = Communicator(comm, timeout=math.inf)
    for options in ({}, {"timeout": math.inf}, {"algorithm": "ring", "codec": "minmax", "timeout": 1e12}):
        assert (communicator.allreduce(np.ones(1000, np.float32), **options) == comm.size).all()
        assert (communicator.iallreduce(np.ones(1000, np.float32), **options).wait() == comm.size).all()


def check_time_outs_of_some_ranks(comm: MPI.Intracomm) -> None:
    """A rank whose waits are bounded may not block in MPI; then no rank does. By call, communicator and environment."""
    n = 10_000 * comm.size  # where auto takes MPI's own, or shared memory where nothing may block
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (np.float32, {}),
        (np.float32, {"algorithm": "native"}),
        (np.float16, {"algorithm": "native", "op": "mean"}),
        (np.int64, {"op": "max"}),
    ]
    for who, apart in itertools.product(([0], [comm.size - 1], range(comm.size)), (False, True)):
        bounded = comm.rank in who
        with nodes_apart() if apart else contextlib.nullcontext():
            by_call, by_communicator = Communicator(comm), Communicator(comm, timeout=30 if bounded else None)
            with mock.patch.dict(os.environ, {"COMPCOLL_TIMEOUT": "30"} if bounded else {}):
                by_environment = Communicator(comm)
        for communicator, options in (
            (by_call, {"timeout": 30} if bounded else {}),
            (by_communicator, {}),
            (by_environment, {}),
        ):
            for (dtype, given), method, _ in itertools.product(kinds, ("allreduce", "reduce_scatter"), range(2)):
                x = np.full(n, comm.rank, dtype)
                op, result = given.get("op", "sum"), getattr(communicator, method)(x, **given, **options)
                exact = {"max": comm.size - 1, "mean": (comm.size - 1) / 2}.get(op, comm.size * (comm.size - 1) // 2)
                assert (result == exact).all(), (method, given, options)
                assert len(set(comm.allgather(communicator.stats.algorithm))) == 1
            communicator.free()


def check_time_outs_cost_nothing_inside_a_node(comm: MPI.Intracomm) -> None:
    """The same runs with them and without, though MPI's own would go on only while it is looked at."""
    if comm.size == 1:
        return
    usual, bounded = Communicator(comm), Communicator(comm, timeout=30)
    for nbytes in (256 << 10, 1 << 20, 6 << 20):
        x = np.ones(nbytes // 4, np.float32)
        for communicator, options in ((usual, {}), (usual, {"timeout": 30}), (bounded, {})):
            assert (communicator.allreduce(x, **options) == comm.size).all()
            assert communicator.stats.algorithm == "shared_memory"
            assert (communicator.iallreduce(x, **options).wait() == comm.size).all()
            assert communicator.stats.algorithm == "shared_memory"


def check_time_outs_cost_nothing_between_nodes(comm: MPI.Intracomm) -> None:
    """MPI's own would go on only while it is looked at: our own algorithms take its place, of what they can reduce."""
    if comm.size == 1:
        return
    with nodes_apart(), mock.patch.dict(os.environ, {"COMPCOLL_PROFILE": "defaults"}):
        usual, bounded = Communicator(comm), Communicator(comm, timeout=30)
    own = {*NAMES["allreduce"]} - {"native"}
    for nbytes, method in itertools.product((256 << 10, 1 << 20), ("allreduce", "reduce_scatter")):
        for dtype, expected in ((np.float32, own), (np.int64, {"native"})):
            x = np.full(nbytes // 8 * comm.size, comm.rank, dtype)
            exact = comm.size * (comm.size - 1) // 2
            for _ in range(6):  # the first one in each lane is recorded
                assert (getattr(usual, method)(x) == exact).all() and usual.stats.algorithm == "native"
                for communicator, options in ((usual, {"timeout": 30}), (bounded, {})):
                    assert (getattr(communicator, method)(x, **options) == exact).all()
                    assert communicator.stats.algorithm in expected
                    assert (getattr(communicator, f"i{method}")(x, **options).wait() == exact).all()
                    assert communicator.stats.algorithm in expected
                requests = [getattr(usual, f"i{method}")(x) for _ in range(5)]
                assert (getattr(usual, method)(x) == exact).all()  # others have some to advance
                assert len(set(comm.allgather(usual.stats.algorithm))) == 1
                assert all((request.wait() == exact).all() for request in requests)
    named = usual.iallreduce(np.ones(1000, np.float32), algorithm="native")
    assert (named.wait() == comm.size).all() and usual.stats.algorithm == "native"


def check_a_rank_that_is_late_for_what_mpi_does_itself(comm: MPI.Intracomm) -> None:
    """Blocking and not; for some rank counts only, since each waits for a second."""
    if comm.size != 4:
        return
    x = np.ones(100000, np.float32)
    for start in (
        lambda comm: comm.allreduce(x, algorithm="native"),
        lambda comm: comm.ialltoall(x, algorithm="native").wait(),
    ):
        communicator = Communicator(comm, timeout=0.5)
        if comm.rank:
            begin, error = time.monotonic(), raised(lambda start=start, one=communicator: start(one))
            assert isinstance(error, PeerTimeout) and error.missing == (0,), error
            assert time.monotonic() - begin < 10 and (x == 1).all()
        comm.Barrier()
    assert_usable(comm)


def check_shrinking_where_mpi_cannot(comm: MPI.Intracomm) -> None:
    """These jobs are started without fault tolerance, by Open MPI and by MPICH: nothing is lost by asking."""
    communicator = Communicator(comm)
    error = raised(communicator.shrink)
    assert isinstance(error, UnsupportedRecovery) and "mpirun --with-ft ulfm" in str(error), error
    assert communicator.allreduce(np.ones(3))[0] == comm.size
    communicator.free()


def check_not_a_communicator(comm: MPI.Intracomm) -> None:
    x = np.ones(4, np.float32)
    for wrong in (MPI.COMM_NULL, "world", 3):
        assert isinstance(raised(lambda wrong=wrong: compcoll.allreduce(x, comm=wrong)), InvalidArgument)
    freed = Communicator(comm)
    freed.free()
    error = raised(lambda: freed.allreduce(x))
    assert isinstance(error, CommunicatorBroken) and "freed" in str(error)
