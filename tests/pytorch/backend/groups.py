"""What the checks of the PyTorch backend share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

torch.set_num_threads(1)  # of each rank: they share the cores

# PyTorch 2.12 has them by these names only.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
EVERY = [*FLOATS, *INTEGERS, *COMPLEX, *FP8, torch.bool]


@contextlib.contextmanager
def world(options: Any = None, seconds: float = 60.0) -> Iterator[Any]:
    """The default process group, on compcoll."""
    dist.init_process_group("compcoll", pg_options=options, timeout=timedelta(seconds=seconds))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def values(rank: int, dtype: torch.dtype, shape: Any = (7,)) -> torch.Tensor:
    """Small integers, which every type holds exactly; as many ranks' sums and products do."""
    generator = np.random.default_rng([rank, 5])
    numbers = torch.from_numpy(generator.integers(0 if dtype in (torch.bool, torch.uint8) else -2, 3, shape))
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.flip(0).double()).to(dtype)
    return numbers.to(torch.float32).to(dtype) if dtype in FP8 else numbers.to(dtype)


def stacked(comm: MPI.Intracomm, dtype: torch.dtype, shape: Any = (7,)) -> np.ndarray:
    """All ranks' values in double precision."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    every = [values(rank, dtype, shape) for rank in range(comm.size)]
    return np.stack([(v.float() if dtype in FP8 else v).to(wide).numpy() for v in every])


def same(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return bool(((tensor.float() if tensor.dtype in FP8 else tensor).to(wide).numpy() == expected).all())
