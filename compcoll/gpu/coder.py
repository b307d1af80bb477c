"""A codec's CUDA kernels bound to an element type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..host.encode_options import PLAIN, EncodeOptions
from .launches import CodecLaunches, Launch

if TYPE_CHECKING:
    from .runtime import CudaRuntime

Array = Any


class DeviceCoder:
    """A coder that runs kernels (the contract is `compcoll.codecs.base.Coder`)."""

    fixed_size = True
    knows_decoded = False

    def __init__(self, runtime: CudaRuntime, launches: CodecLaunches) -> None:
        self._runtime = runtime
        self._launches = launches
        self.wire_nbytes = launches.wire_nbytes

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        address = self._runtime.address
        how = how._replace(residual=address(how.residual), decoded=address(how.decoded))
        self._launch(self._launches.encode, n, add, wires, wire, how)
        return self.wire_nbytes(n)

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        self._launch(self._launches.decode, n, add, wires, out, scale)

    def _launch(
        self,
        launches: Callable[..., list[Launch]],
        n: int,
        add: Array | None,
        wires: Sequence[Array],
        out: Array,
        how: Any,
    ) -> None:
        address = self._runtime.address
        scratch = self._runtime.scratch(self._launches.scratch_nbytes(n, len(wires)))
        terms = [address(term) for term in wires]
        self._runtime.launch(self._launches.program, launches(n, address(add), terms, address(out), how, scratch))
