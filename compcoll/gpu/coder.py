"""A codec's CUDA kernels bound to an element type. This module needs neither a GPU nor CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..dtypes import DTYPES, computed_on
from ..errors import InvalidArgument
from ..host.encode_options import PLAIN, EncodeOptions
from ..kernels import _host
from .launches import MOST_WIRES, Launch, Parameters, grid_of, grid_of_teams, team_of
from .programs import TILE, configuration, kernel_names, program

if TYPE_CHECKING:
    from .runtime import CudaRuntime

Array = Any

CAST_TILE = 1024
"""Values that a warp takes at a time in casts, instead of `TILE`."""

_TILE_THREADS = 128  # of a thread block whose warps take a tile each: few, so that small arrays make many blocks
_MOST_TABLE_BLOCKS = 2112  # thread blocks of kernels that first copy a table: enough for 132 multiprocessors


class DeviceCoder:
    """A coder that runs kernels (the contract is `compcoll.codecs.base.Coder`).

    Arrays need only their elements' alignment. Kernels run at full speed if arrays and wires begin at multiples of 16
    bytes, as allocated memory does. A wire that is written must not overlap a wire that is read.

    Parameters
    ----------
    runtime : CudaRuntime
        Launches the kernels.
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

    fixed_size = True
    knows_decoded = False

    def __init__(
        self,
        runtime: CudaRuntime,
        kernel: tuple[str, int, int],
        dtype: str,
        *,
        variant: int = 0,
        seed: int = 0,
        known: bool = True,
    ) -> None:
        codec, first, second = kernel
        self._runtime, self._codec = runtime, codec
        self._storage = DTYPES[dtype].precision
        self._computed = computed_on(dtype).name
        # Host and device share the wire format: only the host's code computes its length and checks parameters.
        coder = _host.Coder(codec, first, second, variant, seed, self._storage, 0)
        self.wire_nbytes = coder.wire_nbytes
        bits = coder.wire_nbytes(second) - coder.wire_nbytes(max(second - 8, 0))  # of 8 values, in bytes
        alone = configuration(codec, first, second, bits, variant, dtype) if known else None
        self._tile = 0 if alone is None or codec == "zfp" else CAST_TILE if codec == "cast" else TILE
        self.program = program(codec, self._computed, alone)
        self._block = {"cast": 1, "zfp": 4}.get(codec, second)
        # Blocked codecs first reduce all values of a block, which takes a team of threads.
        team = team_of(self._block) if self._block >= 8 else 1
        names = kernel_names(codec, self._computed)
        self._name = names[(first > 32) + (first > 64)] if codec == "zfp" else names[0]
        team_bits = team.bit_length() - 1
        configured = {"first": first, "second": second, "variant": variant, "seed": seed, "team": team_bits}
        self._configured: dict[str, Any] = configured

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        if n:
            address = self._runtime.address
            launches, given = self._sum_of_many(n, add, how.scale, wires)
            residual, decoded = address(how.residual), address(how.decoded)
            given |= {"residual": residual, "residual_scale": how.residual_scale, "feed": how.feed, "decoded": decoded}
            given |= {"out": address(wire), "rng_counter": how.rng_counter, "position": how.position}
            verb = "recode" if given["wires"] or residual or decoded or how.scale != 1.0 else "encode"
            launches.append(self._launch(verb, self._encode_grid(n), n, given))
            self._runtime.launch(self.program, launches)
        return self.wire_nbytes(n)

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        if n:
            launches, given = self._sum_of_many(n, add, scale, wires)
            given["out"] = self._runtime.address(out)
            launches.append(self._launch("decode", self._decode_grid(n), n, given))
            self._runtime.launch(self.program, launches)

    def _sum_of_many(
        self, n: int, add: Array | None, scale: float, wires: Sequence[Array]
    ) -> tuple[list[Launch], dict[str, Any]]:
        """Return launches that add all but `MOST_WIRES` wires, and the parameters for the terms that remain."""
        if add is None and not wires:
            raise InvalidArgument("nothing to sum: give an array or a wire")
        address, launches = self._runtime.address, []
        terms = {"add": address(add), "scale": scale, "add_storage": self._storage}
        rest = [address(wire) for wire in wires]
        if len(rest) > MOST_WIRES:
            scratch = self._runtime.scratch(n * DTYPES[self._computed].itemsize)
            computed, grid = DTYPES[self._computed].precision, self._decode_grid(n)
        while len(rest) > MOST_WIRES:
            first = {"wires": rest[:MOST_WIRES], "out": scratch, "out_storage": computed}
            launches.append(self._launch("decode", grid, n, {**self._configured, **terms, **first}))
            rest, terms = rest[MOST_WIRES:], {"add": scratch, "scale": 1.0, "add_storage": computed}
        return launches, {**self._configured, **terms, "wires": rest, "out_storage": self._storage}

    def _launch(self, verb: str, grid: tuple[int, int], n: int, given: dict[str, Any]) -> Launch:
        parameters = Parameters(n, -(-n // self._block), **given)
        return Launch(f"{verb}_{self._name}_{self._computed}", *grid, parameters.packed())

    def _encode_grid(self, n: int) -> tuple[int, int]:
        if self._tile or self._block < 8:
            return self._decode_grid(n)
        return grid_of_teams(n, self._block)[:2]

    def _decode_grid(self, n: int) -> tuple[int, int]:
        """Return the grid: a warp takes a tile, or a thread takes four values of ZFP or eight of another codec."""
        if self._tile:
            return grid_of(n, self._tile // 32, _TILE_THREADS)
        if self._codec == "zfp":
            blocks, threads = grid_of(n, 4)
            return min(blocks, _MOST_TABLE_BLOCKS), threads
        return grid_of(n, 8)
