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
"""Values that a warp processes at a time in casts; other kernels with tiles use `TILE`."""

_TILE_THREADS = 128  # per thread block, if each warp processes a tile: few, so that short arrays give many blocks
_MOST_TABLE_BLOCKS = 2112  # each block first copies a table: at most 16 blocks for each of 132 multiprocessors


class DeviceCoder:
    """A coder that runs on a GPU; implements `compcoll.codecs.base.Coder`.

    Arrays need only their elements' alignment. Kernels run at full speed if arrays and wires begin at multiples of 16
    bytes, as newly allocated memory does. The wire to write must not overlap the wires to read.

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
        Whether to use a program compiled for this configuration alone, if `configuration` returns one.

    Attributes
    ----------
    program : Program
        The CUDA program that contains the kernels.
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
        # Host and device share the wire format, so the host's coder computes lengths and checks the parameters.
        coder = _host.Coder(codec, first, second, variant, seed, self._storage, 0)
        self.wire_nbytes = coder.wire_nbytes
        bits = coder.wire_nbytes(second) - coder.wire_nbytes(max(second - 8, 0))  # bytes of 8 values
        alone = configuration(codec, first, second, bits, variant, dtype) if known else None
        self._tile = 0 if alone is None or codec == "zfp" else CAST_TILE if codec == "cast" else TILE
        self.program = program(codec, self._computed, alone)
        self._block = {"cast": 1, "zfp": 4}.get(codec, second)
        # Codecs with blocks first reduce all values of a block: a team of threads does this.
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
        """Return launches that add wires until at most `MOST_WIRES` are left, and parameters for the remaining sum."""
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
        """Return thread blocks, and threads per block. A warp decodes a tile, or a thread 8 values (4 of ZFP)."""
        if self._tile:
            return grid_of(n, self._tile // 32, _TILE_THREADS)
        if self._codec == "zfp":
            blocks, threads = grid_of(n, 4)
            return min(blocks, _MOST_TABLE_BLOCKS), threads
        return grid_of(n, 8)
