"""A codec's CUDA kernels bound to an element type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..host.encode_options import PLAIN, EncodeOptions
from .launches import CodecLaunches, Launch
from .programs import Program

Array = Any


class Launcher(Protocol):
    """A device that runs kernels in order. Implementations need neither a GPU nor CuPy."""

    def address(self, array: Array | None) -> int:
        """Return the address of an array in device memory; 0 for None."""

    def scratch(self, nbytes: int) -> int:
        """Return the address of scratch memory for the next kernels."""

    def launch(self, program: Program, launches: Sequence[Launch]) -> None:
        """Launch kernels, which run one after the other."""


class DeviceCoder:
    """A coder that runs kernels (the contract is `compcoll.codecs.base.Coder`)."""

    fixed_size = True
    knows_decoded = False

    def __init__(self, launcher: Launcher, launches: CodecLaunches) -> None:
        self._launcher = launcher
        self._launches = launches
        self.wire_nbytes = launches.wire_nbytes

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        address = self._launcher.address
        launches = self._launches.encode(
            n,
            address(add),
            how.scale,
            [address(term) for term in wires],
            address(wire),
            address(how.residual),
            how.feed,
            how.residual_scale,
            address(how.decoded),
            how.rng_counter,
            how.position,
            scratch=self._launcher.scratch(self._launches.scratch_nbytes(n, len(wires))),
        )
        self._launcher.launch(self._launches.program, launches)
        return self.wire_nbytes(n)

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        address = self._launcher.address
        launches = self._launches.decode(
            n,
            address(add),
            scale,
            [address(term) for term in wires],
            address(out),
            scratch=self._launcher.scratch(self._launches.scratch_nbytes(n, len(wires))),
        )
        self._launcher.launch(self._launches.program, launches)
