"""What the checks of the PyTorch backend share."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

torch.set_num_threads(1)  # of each rank: they share the cores


@contextlib.contextmanager
def world(options: Any = None, seconds: float = 60.0) -> Iterator[Any]:
    """The default process group, on compcoll."""
    dist.init_process_group("compcoll", pg_options=options, timeout=timedelta(seconds=seconds))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def raised(call: Any) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def bits(tensors: Any) -> bytes:
    """A digest of tensors' memory."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def assert_same_bits(comm: MPI.Intracomm, tensors: Any) -> None:
    assert len(set(comm.allgather(bits(tensors)))) == 1
