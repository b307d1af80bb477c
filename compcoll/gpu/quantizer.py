"""Integer quantizers by CUDA kernels (see `compcoll.host.quantizer.IntegerQuantizer`).

This module needs neither a GPU nor CuPy: a `Launcher` runs the launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dtypes import DTYPES
from ..host.encode_options import PLAIN, EncodeOptions
from ..host.quantizer import InIntegers, IntegerQuantizer, InVotes
from .coder import Launcher
from .launches import MOST_WIRES, Launch, grid_of_eights, grid_of_teams, parameters
from .programs import COMPUTED, program

Array = Any


class _OnDevice(IntegerQuantizer):
    """The kernels of an integer quantizer."""

    def _bind(self, launcher: Launcher, kind: str, first: int, size: int, dtype: str) -> None:
        self._launcher, self._kind = launcher, kind
        self._storage = DTYPES[dtype].precision
        self._configured: dict[str, Any] = {"first": first, "second": self._block, "variant": size}

    def survey(self, add: Array, scale: float, residual: Array | None, shared_scale: Array) -> None:
        grid, threads, team = grid_of_teams(add.size, self._block)
        self._run(
            "survey_blocks", grid, threads, add.size, shared_scale, team=team, **self._terms(add, scale, residual)
        )

    def encode(self, add: Array, scale: float, residual: Array | None, shared_scale: Array, numbers: Array) -> None:
        terms = self._terms(add, scale, residual)
        self._run_eights(f"encode_{self._kind}", add.size, numbers, wires=(shared_scale,), **terms)

    def decode(self, numbers: Array, shared_scale: Array, out: Array) -> None:
        self._run_eights(
            f"decode_{self._kind}", out.size, out, wires=(shared_scale, numbers), out_storage=self._storage
        )

    def _terms(self, add: Array, scale: float, residual: Array | None) -> dict[str, Any]:
        address = self._launcher.address
        return {"add": address(add), "scale": scale, "residual": address(residual), "add_storage": self._storage}

    def _run_eights(self, verb: str, n: int, out: Array, **more: Any) -> None:
        self._run(verb, *grid_of_eights(n), n, out, **more)

    def _run(
        self, verb: str, grid: int, threads: int, n: int, out: Array, wires: Sequence[Array] = (), **more: Any
    ) -> None:
        if not n:
            return
        address = self._launcher.address
        told = parameters(
            n, self.shared_scale(n), address(out), wires=[address(wire) for wire in wires], **self._configured, **more
        )
        launch = Launch(f"{verb}_{self._computed.name}", grid, threads, 0, (told,))
        self._launcher.launch(program("integer_quantizer", self._computed.name), [launch])


class DeviceIntegers(InIntegers, _OnDevice):
    """Quantizer of values to integers on a device, as `compcoll.host.quantizer.Integers`."""

    def __init__(self, launcher: Launcher, bits: int, levels: int, block: int, dtype: str) -> None:
        super().__init__(bits, levels, block, dtype)
        self._bind(launcher, "integers", self._levels, self._nbytes, dtype)


class DeviceVotes(InVotes, _OnDevice):
    """Quantizer of values to votes (signs) on a device, as `compcoll.host.quantizer.Votes`."""

    def __init__(self, launcher: Launcher, ranks: int, block: int, dtype: str) -> None:
        super().__init__(ranks, block, dtype)
        self._bind(launcher, "votes", ranks, self._width, dtype)


class DeviceNumberCoder:
    """Coder that moves and combines numbers on a device, as `compcoll.host.quantizer.NumberCoder`."""

    fixed_size = True
    knows_decoded = False

    def __init__(self, launcher: Launcher, dtype: np.dtype[Any], op: str) -> None:
        self._launcher, self._dtype = launcher, dtype
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
        address = self._launcher.address
        first, sources = address(add), [address(wire) for wire in wires]
        launches: list[Launch] = []
        name, (grid, threads) = f"combine_numbers_{COMPUTED[0]}", grid_of_eights(n * self._dtype.itemsize // 2 + 1)
        while sources or not launches:
            told = parameters(
                n, 0, address(out), add=first, wires=sources[:MOST_WIRES], decoded=address(decoded), **self._configured
            )
            launches.append(Launch(name, grid, threads, 0, (told,)))
            first, sources = address(out), sources[MOST_WIRES:]
        self._launcher.launch(program("integer_quantizer", COMPUTED[0]), launches)
