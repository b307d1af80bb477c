"""Devices whose memory other processes open, over real MPI: notices, the ends of calls, and ranks that are missing."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.at_once import Device
from mpi.world import raised
from mpi4py import MPI

from compcoll import Communicator
from compcoll.errors import CommunicatorBroken, PeerTimeout
from compcoll.execute.gpu import DeviceCollectives

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import gpu_ipc

WAYS: list[dict[str, Any]] = [
    {"codec": "minmax", "algorithm": "direct"},
    {"codec": "zfp", "rate": 8, "algorithm": "ring"},
    {"codec": "minmax", "algorithm": "recursive_doubling", "op": "mean"},
    {"codec": None, "algorithm": "ring"},
]


def with_device(comm: MPI.Intracomm, **settings: Any) -> tuple[Communicator, Device]:
    ours, device = Communicator(comm, **settings), Device()
    ours._gpu = DeviceCollectives(
        device, ours._collectives, ours._transport, direct=False, seconds=ours._engine.timeout
    )
    if set(ours.nodes) != {0}:
        pytest.skip("not all ranks are on one node")
    return ours, device


def values(comm: MPI.Intracomm, n: int) -> np.ndarray:
    return np.random.default_rng([n, comm.rank]).standard_normal(n).astype(np.float32)


def check_memory_of_other_processes(comm: MPI.Intracomm) -> None:
    """The bits of the host: buffers that grow, and several at once."""
    ours, device = with_device(comm)
    for n in (1000, 1_200_000, 5000):
        x = values(comm, n)
        expected = [ours.allreduce(x, **way) for way in WAYS]
        arrays = [device.upload(x) for _ in WAYS]
        requests = [ours.iallreduce(array, **way) for array, way in zip(arrays, WAYS, strict=True)]
        for request, one in zip(requests, expected, strict=True):
            np.testing.assert_array_equal(device.download(request.wait()), one)
            assert request.stats.gpu_transport == ("files" if comm.size > 1 else "")
        for way, one in zip(WAYS, expected, strict=True):
            np.testing.assert_array_equal(device.download(ours.allreduce(arrays[0], **way)), one)
    kept = [path for path in device.runtime.paths.values() if os.path.exists(path)]
    assert kept or comm.size == 1
    ours.free()
    ours._gpu = None
    gc.collect()
    assert not any(os.path.exists(path) for path in kept)


def check_a_rank_that_does_not_come(comm: MPI.Intracomm) -> None:
    """To a call, or to free the communicator: the others learn of it, or go on, in time."""
    if comm.size == 1:
        return
    ours, device = with_device(comm, timeout=60)
    x = device.upload(values(comm, 5000))
    ours.allreduce(x, **WAYS[0])
    if comm.rank == comm.size - 1:
        time.sleep(1.5)
    else:
        error = raised(lambda: ours.allreduce(x, timeout=0.3, **WAYS[0]))
        assert isinstance(error, (PeerTimeout, CommunicatorBroken)), error
    comm.Barrier()


def check_both_ways_are_compared(comm: MPI.Intracomm) -> None:
    """What `launch/gpu_ipc.py` does with ranks that share a GPU."""
    if comm.size == 1:
        return
    devices: list[Device] = []

    def make() -> Communicator:
        ours, device = with_device(comm)
        devices.append(device)
        return ours

    ways = gpu_ipc.pair(make, None)
    found = gpu_ipc.compare(ways, devices[0].upload, devices[0].download, sizes=(4096, 100_000), times=2)
    assert len(found) == 2 * len(gpu_ipc.CODECS) * len(gpu_ipc.ALGORITHMS) * 2
    assert [result["gpu_transport"] for result in found] == ["files", ""] * (len(found) // 2)
    assert all(result["wrong"] == 0 < result["median_us"] for result in found)
    for way in ways:
        way.free()
