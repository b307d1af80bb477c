"""Descriptions of kernel launches: the kernel, its grid and its parameters.

This module needs neither a GPU nor CuPy: pointers are integers, and `compcoll.gpu.runtime` runs the launches.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_WIRES = 16
"""The largest number of wires that one launch adds. A sum of more wires takes several launches and scratch memory."""

TILE_VALUES = 2048
"""Values that one thread block searches in a selection."""

_NO_WIRES = (0,) * MOST_WIRES
THREADS = 256  # per thread block, unless the block is one smaller team
_MOST_BLOCKS = 2**31 - 1  # CUDA's limit for a grid

_PARAMETERS = struct.Struct(f"=qqQdQQdQQQQ8i{MOST_WIRES}Q")
"""The layout of ``Parameters`` in kernels/device.h, which has no padding."""

_AS_BYTES = np.dtype(f"V{_PARAMETERS.size}")  # opaque bytes, since CuPy takes 13 us to describe a dtype with fields


class Parameters(NamedTuple):
    """A kernel's argument: the fields of ``Parameters`` in kernels/device.h. `packed` adds the number of wires."""

    n: int
    blocks: int = 0
    add: int = 0
    scale: float = 1.0
    out: int = 0
    residual: int = 0
    residual_scale: float = 1.0
    decoded: int = 0
    seed: int = 0
    rng_counter: int = 0
    position: int = 0
    first: int = 0
    second: int = 0
    variant: int = 0
    feed: bool = False
    add_storage: int = 0
    out_storage: int = 0
    team: int = 0
    wires: Sequence[int] = ()

    def packed(self) -> Any:
        """Return the structure as a zero-dimensional NumPy array."""
        *fields, team, wires = self
        packed = _PARAMETERS.pack(*fields, len(wires), team, *wires, *_NO_WIRES[len(wires) :])
        return np.frombuffer(packed, _AS_BYTES).reshape(())


class Launch(NamedTuple):
    """One kernel on a one-dimensional grid.

    Attributes
    ----------
    function : str
        The kernel's name in its program.
    grid, block : int
        Number of thread blocks, and threads per block.
    argument : array
        The kernel's argument, packed `Parameters`.
    """

    function: str
    grid: int
    block: int
    argument: Any


def grid_of(n: int, each: int = 1, threads: int = THREADS) -> tuple[int, int]:
    """Return thread blocks, and threads per block, for ``n`` values if a thread processes ``each`` at a time."""
    return min(-(-n // (each * threads)), _MOST_BLOCKS), threads


def team_of(block: int) -> int:
    """Return the number of threads in the team that works on a block of ``block`` values."""
    return min(THREADS, 1 << (block // 8 - 1).bit_length())


def grid_of_teams(n: int, block: int) -> tuple[int, int, int]:
    """Return thread blocks, threads per block, and log2 of a team's threads, if a team processes ``block`` values."""
    team = team_of(block)
    threads = team if team > 32 else THREADS
    return min(-(-n // (block * (threads // team))), _MOST_BLOCKS), threads, team.bit_length() - 1
