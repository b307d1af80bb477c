"""What a communicator explains is what runs, over MPI."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
from mpi.world import nodes_apart
from mpi4py import MPI

from compcoll import ZFP, Communicator, CompcollError, MinMax
from compcoll.layout import World
from compcoll.plan.cost import DEFAULTS, RAW, Timing
from compcoll.plan.profile import Stored, place_of, save

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
                for collective in ("allreduce", "reduce_scatter", "bcast", "reduce", "gather", "scatter"):
                    try:
                        plan = communicator.explain(x, collective=collective, **way)
                    except CompcollError:
                        continue
                    getattr(communicator, collective)(x, **way)
                    stats, codec = communicator.stats, None if plan.codec is None else repr(plan.codec)
                    runs = plan.unblocked if bounded and plan.unblocked is not None else plan
                    assert stats.codec == codec, (collective, dtype, nbytes, way)
                    assert stats.algorithm == runs.algorithm, (collective, dtype, nbytes, way)
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
    assert tuned.explain(np.ones(1 << 20, np.float32)).algorithm in ("ring", "direct", "shared_memory")
