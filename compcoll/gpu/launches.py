"""Descriptions of kernel launches: the kernel, its grid and its parameters.

This module needs neither a GPU nor CuPy: pointers are integers, and `compcoll.gpu.runtime` runs the launches.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import DTYPES, computed_on
from ..errors import InvalidArgument
from ..host.encode_options import PLAIN, EncodeOptions
from ..kernels import _host
from .programs import TILE, configuration, kernel_names, program

MOST_WIRES = 16
"""Most wires that one launch adds. Sums of more take several launches and `CodecLaunches.scratch_nbytes` bytes."""

TILE_VALUES = 2048
"""Values that a thread block of a selection searches."""

CAST_TILE = 1024
"""Values that a warp takes at a time in casts, instead of `TILE`."""

_NO_WIRES = (0,) * MOST_WIRES
_THREADS = 256  # of a thread block, unless it is one smaller team
_TILE_THREADS = 128  # of a thread block whose warps take a tile each: few, so that small arrays make many blocks
_MOST_TABLE_BLOCKS = 2112  # thread blocks of kernels that first copy a table: enough for 132 multiprocessors
_MOST_BLOCKS = 2**31 - 1  # of a grid

_PARAMETERS = struct.Struct(f"=qqQdQQdQQQQ8i{MOST_WIRES}Q")
"""`Parameters` of kernels/device.h, without padding."""

_AS_BYTES = np.dtype(f"V{_PARAMETERS.size}")  # opaque: CuPy describes arguments by NumPy, which for fields takes 13 us


class Parameters(NamedTuple):
    """A kernel's argument: the fields of `Parameters` in kernels/device.h, in its order but for the wires' number."""

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
        Thread blocks, and threads of a block.
    argument : array
        The kernel's argument, packed `Parameters`.
    """

    function: str
    grid: int
    block: int
    argument: Any


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def grid_of_eights(n: int) -> tuple[int, int]:
    """Return the thread blocks and their threads if a thread takes eight values."""
    return min(_ceil_div(n, 8 * _THREADS), _MOST_BLOCKS), _THREADS


def grid_of(n: int) -> tuple[int, int]:
    """Return the thread blocks and their threads if a thread takes one element at a time."""
    return min(_ceil_div(n, _THREADS), _MOST_BLOCKS), _THREADS


def team_of(block: int) -> int:
    """Return the number of threads in the team that works on a block of ``block`` values."""
    return min(_THREADS, 1 << (block // 8 - 1).bit_length())


def grid_of_teams(n: int, block: int) -> tuple[int, int, int]:
    """Return the thread blocks, their threads, and log2 of a team's threads if a team takes a block of values."""
    team = team_of(block)
    threads = team if team > 32 else _THREADS
    return min(_ceil_div(n, block * (threads // team)), _MOST_BLOCKS), threads, team.bit_length() - 1


class CodecLaunches:
    """Launches of a codec bound to an element type: `compcoll.codecs.base.Coder` on integer device pointers (0: none).

    Pointers need only their elements' alignment. Kernels run at full speed if arrays and wires begin at multiples of 16
    bytes, as allocated memory does. A wire that is written must not overlap a wire that is read.

    Parameters
    ----------
    kernel : tuple of str, int, int
        The codec and its two parameters.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Element type of arrays. Residuals are float64 for float64, else float32.
    variant, seed : int
        The codec's variant, and the seed of its random numbers.
    known : bool
        Whether to use the program of this configuration only, if there is one.

    Attributes
    ----------
    program : Program
        The program with the kernels.
    """

    def __init__(
        self, kernel: tuple[str, int, int], dtype: str, *, variant: int = 0, seed: int = 0, known: bool = True
    ) -> None:
        self._codec, self._first, self._second = kernel
        self._storage = DTYPES[dtype].precision
        self._computed = computed_on(dtype).name
        # Host and device share the wire format: only the host's code computes its length and checks parameters.
        coder = _host.Coder(self._codec, self._first, self._second, variant, seed, self._storage, 0)
        self.wire_nbytes = coder.wire_nbytes
        bits = coder.wire_nbytes(self._second) - coder.wire_nbytes(max(self._second - 8, 0))  # of 8 values, in bytes
        alone = configuration(self._codec, self._first, self._second, bits, variant, dtype) if known else None
        self._tile = 0 if alone is None or self._codec == "zfp" else CAST_TILE if self._codec == "cast" else TILE
        self.program = program(self._codec, self._computed, alone)
        self._block = {"cast": 1, "zfp": 4}.get(self._codec, self._second)
        # Blocked codecs first reduce all values of a block, which takes a team of threads.
        team = team_of(self._block) if self._block >= 8 else 1
        names = kernel_names(self._codec, self._computed)
        self._name = names[(self._first > 32) + (self._first > 64)] if self._codec == "zfp" else names[0]
        team_bits = team.bit_length() - 1
        codec = {"first": self._first, "second": self._second, "variant": variant, "seed": seed, "team": team_bits}
        self._configured: dict[str, Any] = codec

    def scratch_nbytes(self, n: int, wire_count: int) -> int:
        """Return the bytes of scratch memory for a sum over ``wire_count`` wires."""
        return n * DTYPES[self._computed].itemsize if wire_count > MOST_WIRES else 0

    def encode(
        self, n: int, add: int, wires: Sequence[int], wire: int, how: EncodeOptions = PLAIN, scratch: int = 0
    ) -> list[Launch]:
        """Return the launches, in order, that write the wire of ``add · scale + D(wires[0]) + …``.

        The residual and the decoded copy in ``how`` are pointers, too.

        Raises
        ------
        InvalidArgument
            If there is nothing to sum, or required scratch memory is missing.
        """
        if n == 0:
            return []
        launches, terms = self._sum_of_many(n, add, how.scale, wires, scratch)
        options = {**how._asdict(), "residual": how.residual or 0, "decoded": how.decoded or 0, **terms}
        verb = "recode" if wires or how.residual or how.decoded or how.scale != 1.0 else "encode"
        return [*launches, self._launch(verb, self._encode_grid(n), n, out=wire, **options)]

    def decode(
        self, n: int, add: int, wires: Sequence[int], out: int, scale: float = 1.0, scratch: int = 0
    ) -> list[Launch]:
        """Return the launches that store ``add · scale + D(wires[0]) + …`` in ``out``, which may be ``add``."""
        if n == 0:
            return []
        launches, terms = self._sum_of_many(n, add, scale, wires, scratch)
        return [*launches, self._launch("decode", self._decode_grid(n), n, out=out, **terms)]

    def _sum_of_many(
        self, n: int, add: int, scale: float, wires: Sequence[int], scratch: int
    ) -> tuple[list[Launch], dict[str, Any]]:
        """Return launches that add all but `MOST_WIRES` wires, and the parameters of the terms that remain."""
        if not add and not wires:
            raise InvalidArgument("nothing to sum: give an array or a wire")
        if len(wires) > MOST_WIRES and not scratch:
            raise InvalidArgument(f"a sum of {len(wires)} wires needs scratch memory: more than {MOST_WIRES}")
        launches: list[Launch] = []
        terms: dict[str, Any] = {"add": add, "scale": scale, "add_storage": self._storage}
        while len(wires) > MOST_WIRES:
            computed = DTYPES[self._computed].precision
            partly = {**terms, "wires": wires[:MOST_WIRES], "out": scratch, "out_storage": computed}
            launches.append(self._launch("decode", self._decode_grid(n), n, **partly))
            wires, terms = wires[MOST_WIRES:], {"add": scratch, "scale": 1.0, "add_storage": computed}
        return launches, {**terms, "wires": wires, "out_storage": self._storage}

    def _launch(self, verb: str, grid: tuple[int, int], n: int, **more: Any) -> Launch:
        parameters = Parameters(n, _ceil_div(n, self._block), **self._configured, **more)
        return Launch(f"{verb}_{self._name}_{self._computed}", *grid, parameters.packed())

    def _encode_grid(self, n: int) -> tuple[int, int]:
        if self._tile or self._block < 8:
            return self._decode_grid(n)
        return grid_of_teams(n, self._block)[:2]

    def _decode_grid(self, n: int) -> tuple[int, int]:
        """Return the grid: a warp takes a tile, or a thread takes four values of ZFP or eight of another codec."""
        if self._tile:
            return min(_ceil_div(n, self._tile * _TILE_THREADS // 32), _MOST_BLOCKS), _TILE_THREADS
        if self._codec == "zfp":
            return min(_ceil_div(n, 4 * _THREADS), _MOST_TABLE_BLOCKS), _THREADS
        return grid_of_eights(n)
