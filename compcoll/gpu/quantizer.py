"""Integer quantizers by CUDA kernels (see `compcoll.host.quantizer.IntegerQuantizer`).

This module needs neither a GPU nor CuPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtypes import DTYPES
from ..host.encode_options import PLAIN, EncodeOptions
from ..host.quantizer import InIntegers, IntegerQuantizer, InVotes
from .launches import MOST_WIRES, Launch, Parameters, grid_of, grid_of_teams
from .programs import COMPUTED, program

if TYPE_CHECKING:
    from .runtime import CudaRuntime

Array = Any


class _OnDevice(IntegerQuantizer):
    """The kernels of an integer quantizer."""

    def _bind(self, runtime: CudaRuntime, kind: str, first: int, size: int, dtype: str) -> None:
        self._runtime, self._kind = runtime, kind
        self._storage = DTYPES[dtype].precision
        self._configured: dict[str, Any] = {"first": first, "second": self._block, "variant": size}

    def survey(self, add: Array, scale: float, residual: Array | None, shared_scale: Array) -> None:
        grid, threads, team = grid_of_teams(add.size, self._block)
        self._run(
            "survey_blocks", (grid, threads), add.size, shared_scale, team=team, **self._terms(add, scale, residual)
        )

    def encode(self, add: Array, scale: float, residual: Array | None, shared_scale: Array, numbers: Array) -> None:
        grid, terms = grid_of(add.size, 8), self._terms(add, scale, residual)
        self._run(f"encode_{self._kind}", grid, add.size, numbers, (shared_scale,), **terms)

    def decode(self, numbers: Array, shared_scale: Array, out: Array) -> None:
        grid, wires = grid_of(out.size, 8), (shared_scale, numbers)
        self._run(f"decode_{self._kind}", grid, out.size, out, wires, out_storage=self._storage)

    def _terms(self, add: Array, scale: float, residual: Array | None) -> dict[str, Any]:
        address = self._runtime.address
        return {"add": address(add), "scale": scale, "residual": address(residual), "add_storage": self._storage}

    def _run(
        self, verb: str, grid: tuple[int, int], n: int, out: Array, wires: Sequence[Array] = (), **more: Any
    ) -> None:
        if not n:
            return
        address, computed = self._runtime.address, self._computed.name
        pointers = [address(wire) for wire in wires]
        blocks = self.shared_scale(n)
        told = Parameters(n, blocks, out=address(out), wires=pointers, **self._configured, **more)
        launch = Launch(f"{verb}_{computed}", *grid, told.packed())
        self._runtime.launch(program("integer_quantizer", computed), [launch])


class DeviceIntegers(InIntegers, _OnDevice):
    """Quantizer of values to integers on a device, as `compcoll.host.quantizer.Integers`."""

    def __init__(self, runtime: CudaRuntime, bits: int, levels: int, block: int, dtype: str) -> None:
        super().__init__(bits, levels, block, dtype)
        self._bind(runtime, "integers", self._levels, self._nbytes, dtype)


class DeviceVotes(InVotes, _OnDevice):
    """Quantizer of values to votes (signs) on a device, as `compcoll.host.quantizer.Votes`."""

    def __init__(self, runtime: CudaRuntime, ranks: int, block: int, dtype: str) -> None:
        super().__init__(ranks, block, dtype)
        self._bind(runtime, "votes", ranks, self._width, dtype)


class DeviceNumberCoder:
    """Coder that moves and combines numbers on a device, as `compcoll.host.quantizer.NumberCoder`."""

    fixed_size = True
    knows_decoded = False

    def __init__(self, runtime: CudaRuntime, dtype: np.dtype[Any], op: str) -> None:
        self._runtime, self._dtype = runtime, dtype
        self._configured: dict[str, Any] = {"first": ("sum", "max").index(op), "variant": dtype.itemsize}

    def wire_nbytes(self, n: int) -> int:
        return n * self._dtype.itemsize

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        self._combine(n, add, wires, wire, how.decoded)
        return self.wire_nbytes(n)

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        self._combine(n, add, wires, out, None)

    def _combine(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, decoded: Array | None) -> None:
        if not n:
            return
        address = self._runtime.address
        first, sources = address(add), [address(wire) for wire in wires]
        launches: list[Launch] = []
        name, grid = f"combine_numbers_{COMPUTED[0]}", grid_of(n * self._dtype.itemsize // 2 + 1, 8)
        while sources or not launches:
            pointers: dict[str, Any] = {"out": address(out), "decoded": address(decoded), "wires": sources[:MOST_WIRES]}
            told = Parameters(n, add=first, **pointers, **self._configured)
            launches.append(Launch(name, *grid, told.packed()))
            first, sources = address(out), sources[MOST_WIRES:]
        self._runtime.launch(program("integer_quantizer", COMPUTED[0]), launches)
