"""Raises errors of compcoll and prints the last line of each traceback, as JSON by class: ``python raised.py GROUP``.

The groups are the functions below. ``failing_ranks`` needs ``mpirun -n 2 --with-ft ulfm``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import compcoll

X = np.ones(1 << 20, np.float32)
NOISE = np.random.default_rng(0)


@dataclass(frozen=True)
class Dithered(compcoll.NumpyCodec):
    """A codec that draws random numbers of its own."""

    name = "dithered"

    def encode(self, x: Any, rng: Any) -> bytes:
        return bytes((x + NOISE.uniform(-1e-3, 1e-3, x.size)).astype(np.float16).tobytes())

    def decode(self, wire: Any, n: int, dtype: Any) -> Any:
        return np.frombuffer(wire, np.float16, n)


@dataclass(frozen=True)
class Failing(Dithered):
    """A codec that fails."""

    def encode(self, x: Any, rng: Any) -> bytes:
        raise MemoryError("no memory for the wire")


class OnGPU:
    """What compcoll takes for an array on a GPU."""

    __cuda_array_interface__: ClassVar = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}


OnGPU.__module__, OnGPU.__qualname__ = "numba.cuda", "DeviceNDArray"


def raised(*calls: Callable[[], object]) -> dict[str, str]:
    """Return what Python prints at last if nothing catches the error of a call, by the error's class."""
    found = {}
    for call in calls:
        try:
            call()
        except Exception as error:
            found[type(error).__name__] = "".join(traceback.format_exception_only(error)).strip()
        else:
            raise AssertionError(f"call {len(found)} raised no error")
    return found


def one_process() -> dict[str, str]:
    comm = compcoll.get_communicator()
    return raised(
        lambda: comm.allreduce(X, codec="minmax", bits=9),
        lambda: comm.allreduce(X, codec="zpf"),
        lambda: comm.allreduce(X, algorithm="rng"),
        lambda: comm.allreduce(X[::2]),
        lambda: comm.allreduce(X.astype(np.int32), codec="int8"),
        lambda: comm.allreduce(OnGPU()),
        lambda: comm.shrink(),
        lambda: compcoll.check_codec(Dithered()),
        lambda: compcoll.decode(np.zeros(40, np.uint8), X.size, np.float32, "topk"),
    )


def damaged_profile() -> dict[str, str]:
    from compcoll.plan import profile

    path = profile.folder() / "profile.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    return raised(lambda: profile.load(path))


def without_mpi4py() -> dict[str, str]:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    return raised(lambda: compcoll.get_communicator())


def in_child() -> None:
    """Start MPI in a process of `multiprocessing`."""
    print(json.dumps(raised(lambda: compcoll.get_communicator())), flush=True)


def child() -> None:
    os.environ["OMPI_COMM_WORLD_RANK"] = "0"
    process = multiprocessing.get_context("spawn").Process(target=in_child)
    process.start()
    process.join(60)


def pytorch() -> dict[str, str]:
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import compcoll.torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
    found = raised(lambda: compcoll.torch.compress(ddp, transport="mpi"))
    compression = compcoll.torch.compress(ddp, transport="group")
    found |= raised(lambda: compcoll.torch.compress(ddp, transport="group"))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    low_rank = compcoll.torch.ACPSGD(model, rank=2, transport="group")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    found |= raised(lambda: model(torch.ones(4, 64)).sum().backward())
    low_rank.free()
    compression.free()
    dist.destroy_process_group()
    return found


def failing_ranks() -> dict[str, str]:
    from mpi4py import MPI

    comm = compcoll.Communicator(timeout=30)
    rank = comm.rank
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        comm.allreduce(X, codec="minmax:bits=2", algorithm="ring")
    found = {each.category.__name__: f"{each.category.__name__}: {each.message}" for each in warned}
    found |= raised(
        lambda: comm.allreduce(X[: X.size - rank], codec="zfp:rate=8", algorithm="ring"),
        lambda: comm.bcast(X, out=X + rank, codec="delta", algorithm="binomial"),
        lambda: comm.allreduce(X, codec=Failing(), algorithm="ring"),
    )
    comm.free()

    comm = compcoll.Communicator(timeout=2)

    def reduce() -> None:
        comm.allreduce(X, algorithm="ring")

    thread = threading.Thread(target=reduce)
    if rank == 0:
        thread.start()
        while comm.sequence_number == 0:
            time.sleep(0.01)
        found |= raised(reduce)
    MPI.COMM_WORLD.Barrier()
    if rank != 0:
        thread.start()
    thread.join()
    if rank == 0:
        found |= raised(reduce, reduce)
    MPI.COMM_WORLD.Barrier()

    comm = compcoll.Communicator(timeout=30)
    if rank != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    found |= raised(lambda: [comm.allreduce(X, algorithm="ring") for _ in range(100)])
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    found = globals()[sys.argv[1]]()
    if found is not None:
        print(json.dumps(found), flush=True)
