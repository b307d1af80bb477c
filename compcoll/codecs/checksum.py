"""Wires with checksums, for any codec: a changed bit raises an error before anything is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import WireCorrupted
from ..host.encode_options import PLAIN, EncodeOptions
from .base import Array, Coder

# Bytes of a checksum at the end of a wire.
NBYTES = 4


def opened(device: Any, wire: Array, n: int) -> Array:
    """Check the checksum of a sealed wire of ``n`` values and return the wire without it.

    Raises
    ------
    WireCorrupted
        If the checksum does not match.
    """
    if wire.nbytes < NBYTES or not device.sealed(wire):
        raise WireCorrupted(
            f"a wire of {wire.nbytes} bytes for {n} values has changed on its way: its checksum is wrong"
        )
    return wire[:-NBYTES]


class CheckedCoder:
    """A `compcoll.codecs.base.Coder` that appends a CRC-32C to another coder's wires. Forwarded wires keep theirs.

    Parameters
    ----------
    coder : Coder
        The codec's coder.
    device : HostDevice or CudaDevice
        The device of the wires: ``seal(wire)`` stores the CRC-32C in the last 4 bytes, ``sealed(wire)`` checks it.
    """

    def __init__(self, coder: Coder, device: Any) -> None:
        self._coder = coder
        self._device = device
        self.fixed_size = coder.fixed_size
        self.knows_decoded = coder.knows_decoded

    def wire_nbytes(self, n: int) -> int:
        return self._coder.wire_nbytes(n) + NBYTES

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        terms = [opened(self._device, term, n) for term in wires]
        nbytes = self._coder.encode(n, add, terms, wire[:-NBYTES], how)
        self._device.seal(wire[: nbytes + NBYTES])
        return nbytes + NBYTES

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        self._coder.decode(n, add, [opened(self._device, wire, n) for wire in wires], out, scale=scale)
