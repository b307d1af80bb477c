"""What a communicator explains is what runs, over MPI."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
from mpi.world import nodes_apart
from mpi4py import MPI

from compcoll import ZFP, Communicator, CompcollError, MinMax
from compcoll.devices.host import HostDevice
from compcoll.kernels._host import Function
from compcoll.layout import World
from compcoll.model.predict import DEFAULTS, RAW, Timing
from compcoll.model.profile import Stored, place_of, save

SIZES = (4, 4096, 400_000, 1_500_000)
WAYS: list[dict[str, Any]] = [
    {},
    {"codec": ZFP(rate=8)},
    {"codec": "auto", "tolerance": 1e-2},
    {"codec": MinMax(), "algorithm": "direct"},
    {"algorithm": "native"},
    {"codec": "intsum"},
    {"codec": "topk"},
]


def compare(communicator: Communicator, comm: MPI.Intracomm, *, bounded: bool = False) -> int:
    """Compare what is explained with what runs; gives how many calls ran."""
    ran = 0
    for dtype in ("float16", "float32", "int64"):
        for nbytes in SIZES:
            x = np.ones(max(nbytes // np.dtype(dtype).itemsize // comm.size, 1) * comm.size, dtype)
            for way in WAYS:
                for collective in ("allreduce", "reduce_scatter", "bcast"):
                    try:
                        plan = communicator.explain(x, collective=collective, **way)
                    except CompcollError:
                        continue
                    getattr(communicator, collective)(x, **way)
                    stats, codec = communicator.stats, None if plan.codec is None else repr(plan.codec)
                    instead = plan if plan.other is None else plan.other  # others may want a core
                    allowed = (plan.algorithm, instead.algorithm)
                    if bounded and plan.unblocked is not None:
                        allowed = (plan.unblocked.algorithm,) * 2
                    assert stats.codec == codec, (collective, dtype, nbytes, way)
                    assert stats.algorithm in allowed, (collective, dtype, nbytes, way)
                    assert plan.algorithm in str(plan)
                    ran += 1
    return ran


def check_what_is_explained_runs(comm: MPI.Intracomm) -> None:
    for where in (contextlib.nullcontext(), nodes_apart()):
        with where:
            usual, bounded, checked = (
                Communicator(comm),
                Communicator(comm, timeout=30),
                Communicator(comm, checksum=True),
            )
        assert compare(usual, comm) > 100 and compare(bounded, comm, bounded=True) > 100 and compare(checked, comm) > 30


def check_what_is_explained_runs_with_a_profile(comm: MPI.Intracomm) -> None:
    if comm.size == 1:
        return
    transport = Communicator(comm)._transport
    world, points = World.of(transport.nodes), ((4, 1e-5), (1 << 24, 1e-2))
    slow = Timing("native", RAW, 32.0, world, tuple((n, 3 * seconds) for n, seconds in points))
    timings = (slow, *(Timing(name, RAW, 32.0, world, points) for name in ("ring", "direct")))
    with TemporaryDirectory() as folder:
        made = Stored(replace(DEFAULTS, timings=timings), place_of(transport, "host"), "2026-01-01T00:00:00+00:00")
        path = save(made, Path(folder) / "profile.json")
        with mock.patch.dict("os.environ", {"COMPCOLL_PROFILE": str(path)}):
            tuned = Communicator(comm)
    assert compare(tuned, comm) > 100
    assert tuned.explain(np.ones(1 << 20, np.float32)).algorithm in ("ring", "direct", "recursive_doubling")


class Slow:
    """Functions of arrays that take some seconds more."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[[Any, Any], Any]) -> Function:
        def slow(x: Any, out: Any) -> None:
            time.sleep(self.seconds)
            function(x, out)

        return Function(slow, -1)


def check_cores_that_others_want(comm: MPI.Intracomm) -> None:
    """Where some rank sees that, all take what takes less time, as measured, in the same calls: MPI's own or shared
    memory, whichever the plan has; and else the plan's.
    """
    wanted, by_mpi, by_memory, inner = [False], Slow(), Slow(), comm.Dup()

    def new() -> Communicator:
        with (
            mock.patch("compcoll.collectives.runs.Contention", return_value=lambda: wanted[0]),
            mock.patch.dict("os.environ", {"COMPCOLL_PROFILE": "defaults"}),
        ):
            return Communicator(comm)

    native = type(new()._collectives._native)
    reductions = native.reductions

    def slow_reductions(*asked: Any) -> Any:
        reduce, start = reductions(*asked)
        return by_mpi(reduce), start

    for n, usual, slow in itertools.product((1 << 18, 1 << 14), (True, False), (by_mpi, by_memory)):
        communicator = new()
        x = np.arange(n, dtype=np.float32) + comm.rank
        out = np.empty_like(x)
        with (  # while it is made how such calls run
            mock.patch.object(native, "reductions", slow_reductions),
            mock.patch.object(HostDevice, "shared_sum", return_value=by_memory(inner.Allreduce)),
        ):
            plan = communicator.explain(x)
        if plan.other is None:  # one rank, or no memory in common
            return
        faster = "native" if slow is by_memory else "shared_memory"
        if usual != (plan.algorithm == faster):
            continue
        names = (plan.algorithm, plan.other.algorithm)
        assert set(names) == {"native", "shared_memory"}
        assert f"others want some rank's core: {names[0]} or {names[1]}, whichever takes less" in str(plan)

        def calls(count: int, communicator: Communicator = communicator, x: Any = x, out: Any = out) -> list[str]:
            ran = []
            for _ in range(count):
                communicator.allreduce(x, out=out)
                np.testing.assert_array_equal(out, comm.size * (x - comm.rank) + sum(range(comm.size)))
                ran.append(communicator.stats.algorithm)
            assert comm.allgather(ran) == [ran] * comm.size
            return ran

        slow.seconds = 0.05
        wanted[0] = comm.rank == comm.size - 1  # which does not decide
        tries, then = calls(110), calls(40)
        assert set(tries) == set(names), (usual, faster, tries)
        assert then.count(faster) >= 28, (usual, faster, then)  # more ranks than cores disturb each other
        wanted[0], slow.seconds = False, 0.0
        time.sleep(1.0)
        if usual:
            assert calls(4) == [names[0]] * 4
    wanted[0] = comm.rank == 0
    communicator.allreduce(x, out=out, algorithm="native")  # as it was asked for
    assert communicator.stats.algorithm == "native"
    under_way = communicator.iallreduce(x)
    communicator.allreduce(x, out=out)
    np.testing.assert_array_equal(out, under_way.wait())


def check_a_time_out_where_others_want_cores(comm: MPI.Intracomm) -> None:
    """A rank whose waits must end does not block in MPI, and so nobody does."""
    with (
        mock.patch("compcoll.collectives.runs.Contention", return_value=lambda: True),
        mock.patch.dict("os.environ", {"COMPCOLL_PROFILE": "defaults"}),
    ):
        communicator = Communicator(comm, timeout=30 if comm.rank == comm.size - 1 else None)
    for n in (1 << 14, 1 << 18):
        x, ran = np.ones(n, np.float32), []
        if communicator.explain(x).algorithm not in ("native", "shared_memory") or comm.size == 1:
            return
        for _ in range(300):
            assert (communicator.allreduce(x) == comm.size).all()
            ran.append(communicator.stats.algorithm)
        assert set(ran) == {"shared_memory"}, ran
