"""Arrays of a device whose work is done later, over real MPI: through pinned memory, and MPI's own collectives."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from fakes.deferred import Device, DeviceArray, unwrapped
from mpi4py import MPI
from oracles import collectives as oracles
from promises import ALGORITHMS

from compcoll import Communicator, ErrorFeedback
from compcoll.execute.gpu import DeviceCollectives


class AwareTransport:
    """MPI's transport, as one that takes device memory."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def isend(self, wire: Any, dest: int, tag: int) -> Any:
        return self._transport.isend(unwrapped(wire), dest, tag)

    def irecv(self, wire: Any, source: int, tag: int) -> Any:
        return self._transport.irecv(unwrapped(wire), source, tag)


def with_device(comm: MPI.Intracomm, *, direct: bool = False, **settings: Any) -> tuple[Communicator, Device]:
    communicator, device = Communicator(comm, **settings), Device(early=comm.rank % 2 == 1, seed=comm.rank)
    transport: Any = communicator._transport
    if direct:
        transport = AwareTransport(transport)
    communicator._gpu = DeviceCollectives(device, communicator._collectives, transport, direct=direct)
    return communicator, device


def check_sums_on_a_device(comm: MPI.Intracomm) -> None:
    """The bits of the host, also where only some ranks have a device."""
    for direct, checksum in ((False, False), (True, False), (True, True)):
        sums_on_a_device(comm, direct=direct, checksum=checksum)


def sums_on_a_device(comm: MPI.Intracomm, **settings: bool) -> None:
    ours, device = with_device(comm, **settings)
    for n, algorithm in zip(itertools.cycle((1000, 70_000, 300_000, 50_000)), ALGORITHMS):
        x = np.random.default_rng([n, comm.rank]).standard_normal(n).astype(np.float32)
        expected = ours.allreduce(x, codec="minmax", algorithm=algorithm)
        for mixed in (False, True):
            if mixed and comm.rank % 2 == 0:
                result = ours.allreduce(x, codec="minmax", algorithm=algorithm)
            else:
                result = device.download(ours.allreduce(device.upload(x), codec="minmax", algorithm=algorithm))
            np.testing.assert_array_equal(result, expected)
    ours.free()


def check_sparse_sums_on_a_device(comm: MPI.Intracomm) -> None:
    """The bits of the host, where the even ranks have a device; by MPI's allgatherv, too."""
    for checksum in (False, True):
        ours, device = with_device(comm, checksum=checksum)
        for algorithm in ("sparse_ring", "sparse_direct") if checksum else ("sparse_ring", "sparse_native"):
            kept = ErrorFeedback(), ErrorFeedback()
            for seed in range(2):
                x = np.random.default_rng([seed, comm.rank]).standard_normal(30_000).astype(np.float32)
                way: dict[str, Any] = {"codec": "topk", "density": 0.01, "algorithm": algorithm}
                expected = ours.allreduce(x, feedback=kept[0], **way)
                there = comm.rank % 2 == 0
                result = ours.allreduce(device.upload(x) if there else x, feedback=kept[1], **way)
                np.testing.assert_array_equal(device.download(result) if there else result, expected)
        ours.free()


def check_mpis_own_collectives_on_a_device(comm: MPI.Intracomm) -> None:
    ours, device = with_device(comm)
    ranks = np.arange(comm.size)
    x = np.arange(comm.size * 5000, dtype=np.int64) + comm.rank

    def got(result: Any) -> np.ndarray:
        assert isinstance(result, DeviceArray)
        return device.download(result)

    np.testing.assert_array_equal(got(ours.allreduce(device.upload(x), op="max")), x - comm.rank + comm.size - 1)
    summed = comm.size * (x - comm.rank) + ranks.sum()
    np.testing.assert_array_equal(got(ours.allreduce(device.upload(x), algorithm="native")), summed)
    halves = np.full(300, 1.5 + comm.rank, np.float16)
    mean = got(ours.allreduce(device.upload(halves), op="mean", algorithm="native"))
    np.testing.assert_allclose(mean, np.full(300, 1.5 + ranks.mean()), rtol=1e-3)
    part = got(ours.reduce_scatter(device.upload(x)))
    np.testing.assert_array_equal(part, summed.reshape(comm.size, -1)[comm.rank])
    np.testing.assert_array_equal(
        got(ours.allgather(device.upload(x), algorithm="native")), np.stack([x - comm.rank + r for r in ranks])
    )
    joined = got(ours.allgatherv(device.upload(x[: comm.rank + 1]), algorithm="native"))
    np.testing.assert_array_equal(joined, np.concatenate([np.arange(r + 1) + r for r in ranks]))
    root = comm.size - 1
    np.testing.assert_array_equal(got(ours.bcast(device.upload(x), root, algorithm="native")), x - comm.rank + root)
    blocks = got(ours.alltoall(device.upload(x.reshape(comm.size, -1)), algorithm="native"))
    np.testing.assert_array_equal(blocks[:, 0], comm.rank * 5000 + ranks)
    every = [x - comm.rank + rank for rank in ranks]
    for collective, algorithm in (
        *(("reduce", "native"), ("gather", "native"), ("scatter", "native"), ("alltoallv", "native")),
        *(("gather", "linear"), ("scatter", "linear"), ("alltoallv", "pairwise")),
    ):
        given = oracles.arguments(collective, x.size, comm.size, comm.rank, root)
        right = oracles.expected(collective, every, comm.rank, root)
        for method in (collective, f"i{collective}"):
            result = getattr(ours, method)(device.upload(x), algorithm=algorithm, **given)
            result = result.wait() if method.startswith("i") else result
            if right is None:
                assert result is None
            else:
                np.testing.assert_array_equal(got(result), right)
    halved = ours.reduce(device.upload(halves), root, op="mean", algorithm="native")
    if comm.rank == root:
        np.testing.assert_allclose(got(halved), np.full(300, 1.5 + ranks.mean()), rtol=1e-3)
    else:
        assert halved is None
    ours.free()


def check_several_of_all_kinds_in_flight(comm: MPI.Intracomm) -> None:
    for direct in (False, True):
        several_in_flight(comm, direct)


def several_in_flight(comm: MPI.Intracomm, direct: bool) -> None:
    ours, device = with_device(comm, direct=direct)
    inputs = [np.full(3000 + i, i + comm.rank, np.float32) for i in range(9)]
    ways: list[dict[str, Any]] = [
        {"algorithm": "native"},
        {"algorithm": "ring"},
        {"codec": "intsum", "bits": 32, "algorithm": "native"},
    ]
    requests = [ours.iallreduce(device.upload(x), **ways[i % 3]) for i, x in enumerate(inputs)]
    for i, request in reversed(list(enumerate(requests))):
        expected = np.full(3000 + i, comm.size * i + sum(range(comm.size)), np.float32)
        np.testing.assert_allclose(device.download(request.wait()), expected, rtol=1e-6)
    ours.free()
