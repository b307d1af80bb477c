"""The automatic choice over MPI: the same on all ranks, and from a profile that rank 0 alone reads."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from compcoll import Communicator
from compcoll.errors import InvalidArgument
from compcoll.layout import World
from compcoll.plan.cost import DEFAULTS, RAW, Link, Timing
from compcoll.plan.profile import Place, Stored, load, save
from compcoll.tools.tune import tune
from compcoll.transports.mpi import MPITransport


@contextmanager
def setting(value: str) -> Iterator[None]:
    """COMPCOLL_PROFILE for a while."""
    before = os.environ.get("COMPCOLL_PROFILE")
    os.environ["COMPCOLL_PROFILE"] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ["COMPCOLL_PROFILE"]
        else:
            os.environ["COMPCOLL_PROFILE"] = before


def ran(communicator: Communicator, n: int, comm: MPI.Intracomm, **options: object) -> tuple[str | None, str]:
    """Codec and algorithm of an allreduce, which must be the same on all ranks."""
    x = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
    result = communicator.allreduce(x, **options)
    exact = comm.allreduce(x.astype(np.float64))
    assert np.linalg.norm(result - exact) <= 0.5 * np.linalg.norm(exact)
    stats = communicator.stats
    assert stats is not None
    every = comm.allgather((stats.codec, stats.algorithm))
    assert len(set(every)) == 1, every
    return every[0]


def check_rank_0_reads_the_profile_for_all(comm: MPI.Intracomm) -> None:
    if comm.size == 1:
        return
    transport = MPITransport(comm)
    world = World.of(transport.nodes)
    points = ((4, 1e-6), (65536, 1e-5), (1 << 20, 10.0))
    slow = tuple(Timing(name, RAW, 32.0, world, points) for name in ("native", "shared_memory"))
    own = Timing("ring", RAW, 32.0, world, ((4, 1e-4), (1 << 20, 1.0)))
    stored = Stored(replace(DEFAULTS, inside=Link(1e-6, 1e-8), timings=(*slow, own)), Place("", (), ""), "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        if comm.rank == 0:
            save(stored, path)
        with setting(str(path) if comm.rank == 0 else "/nonexistent"):
            communicator = Communicator(comm)
        assert ran(communicator, 1 << 18, comm)[0] is None
        assert ran(communicator, 1 << 18, comm)[1] not in ("native", "shared_memory")
        assert ran(communicator, 1 << 18, comm, codec="zfp", rate=8)[0] is not None
        assert ran(communicator, 1, comm, codec="zfp", rate=8)[0] is None
        assert ran(communicator, 1 << 18, comm, codec="auto", tolerance=0.1)[0] is not None
        assert ran(communicator, 1 << 18, comm, codec="auto", tolerance=0.1, algorithm="direct")[1] == "direct"
        with pytest.raises(InvalidArgument, match="tolerance="):
            communicator.allreduce(np.ones(4, np.float32), codec="auto")
        assert ran(communicator, 4, comm)[1] in ("native", "dissemination")
        communicator.free()
    transport.free()


def check_a_bad_profile_is_told_of_by_rank_0(comm: MPI.Intracomm) -> None:
    if comm.size == 1:
        return
    with setting("/nonexistent/profile.json"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        communicator = Communicator(comm)
    assert [str(one.message).split(" cannot")[0] for one in told] == ["profile /nonexistent/profile.json"] * (
        comm.rank == 0
    )
    with setting("defaults"):
        usual = Communicator(comm)
    codec, algorithm = ran(communicator, 1000, comm, codec="zfp")
    assert codec is None and (codec, algorithm) == ran(usual, 1000, comm, codec="zfp")
    usual.free()
    communicator.free()


def check_tune(comm: MPI.Intracomm) -> None:
    transport = MPITransport(comm)
    with setting("defaults"):
        communicator = Communicator(transport)
    stored = tune(communicator, transport, 0.5)
    assert len(stored.profile.speeds) >= 8
    if comm.size > 1:
        names = {timing.algorithm for timing in stored.profile.timings}
        assert {"native", "ring", "recursive_doubling"} <= names
        assert 0 < stored.profile.inside.latency and 0 < stored.profile.message
        assert stored.profile.measured(World.of(transport.nodes))
    assert len(stored.place.hosts) >= 1 and stored.place.mpi
    if comm.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = save(stored, Path(folder) / "p.json")
            assert replace(load(path).profile, source="measured") == stored.profile
    communicator.free()
