"""Differences from an earlier result that all ranks have: only the changed elements travel, bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..dtypes import DTYPES
from ..errors import CodecError, WireCorrupted
from ..host.encode_options import PLAIN, EncodeOptions
from .base import Array, Codec, Coder, Device, ErrorBound, Example, Speed

_COUNT = struct.Struct("<Q")
_SKIP = 255
_TYPICAL = 0.02


class DeltaCoder:
    """The coder of `Delta`; implements `compcoll.codecs.base.Coder` for one array and for one wire.

    The wire is the number of changed elements in 8 bytes, then these elements, then a byte for each: the number of
    unchanged elements before it. In place of 255 or more, bytes 255 count 255 each, and the rest follows. If that is
    not shorter than all elements, the wire counts and holds all of them.

    Parameters
    ----------
    itemsize : int
        Bytes of an element. Elements are compared and copied as integers of this size, so NaN and -0.0 are exact.
    """

    fixed_size = False
    knows_decoded = True

    def __init__(self, itemsize: int) -> None:
        self._bits = np.dtype(f"u{itemsize}")

    def wire_nbytes(self, n: int) -> int:
        return _COUNT.size + n * self._bits.itemsize

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        """Write how ``add`` differs from ``how.decoded``, and update that."""
        if add is None or wires or how.decoded is None:
            raise CodecError("delta encodes one array, as its difference from how.decoded, and adds no wires")
        x, reference = add.view(self._bits), how.decoded.view(self._bits)
        differs = x != reference
        changed: Any = slice(None)
        elements, codes = x, np.empty(0, np.uint8)
        if np.count_nonzero(differs) * (x.itemsize + 1) < x.nbytes:  # else all elements are surely not longer
            positions = np.flatnonzero(differs)
            gaps = _gap_codes(positions)
            if positions.size * x.itemsize + gaps.size < x.nbytes:
                elements, changed, codes = x[positions], positions, gaps
        reference[changed] = elements
        _COUNT.pack_into(wire.data, 0, elements.size)
        middle = _COUNT.size + elements.nbytes
        wire[_COUNT.size : middle] = elements.view(np.uint8)
        wire[middle : middle + codes.size] = codes
        return int(middle + codes.size)

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        """Update ``out``, which must hold the values that ``how.decoded`` had before the encoding."""
        if add is not None or len(wires) != 1:
            raise CodecError("delta decodes one wire, and adds nothing")
        (wire,) = wires
        count = _COUNT.unpack_from(wire.data)[0] if wire.size >= _COUNT.size else 0
        middle = _COUNT.size + count * self._bits.itemsize
        changed: Any = slice(None)
        right = middle <= wire.size
        if count != n:
            changed = _positions(wire[middle:])
            right = right and changed.size == count and changed.max(initial=-1) < n
        if not right:
            raise WireCorrupted(f"a wire of {wire.size} bytes does not hold differences of {n} elements")
        out.view(self._bits)[changed] = wire[_COUNT.size : middle].view(self._bits)


def _gap_codes(positions: Array) -> Array:
    """Return the bytes that encode ascending positions by the gaps before them."""
    gaps = np.diff(positions, prepend=-1) - 1
    long = np.flatnonzero(gaps >= _SKIP)
    skips, gaps[long] = np.divmod(gaps[long], _SKIP)
    return np.insert(gaps.astype(np.uint8), np.repeat(long, skips), _SKIP)


def _positions(codes: Array) -> Array:
    """Return the positions that bytes encode: see `_gap_codes`."""
    last = codes < _SKIP
    return (np.cumsum(codes + last.astype(np.intp)) - 1)[last]


@dataclass(frozen=True)
class Delta(Codec):
    """Send only the elements that changed, exactly, to ranks that have the values from before.

    Only `allgather` and `bcast` take this codec, and they need ``out=``: on every rank it holds the previous result,
    and the call updates it. Weights of which a few percent changed since the last call are an example. Before the call
    sends anything, the ranks compare checksums of their previous results, unless ``algorithm="auto"`` takes MPI's or
    the process group's own collective, as inside one node, which sends all elements. If checksums differ, all ranks
    raise `compcoll.errors.ReferenceMismatch`, and no buffer changes.

    A changed element takes its own bytes and usually one more; 8 bytes a segment come on top. If most elements
    changed, wires hold all of them.

    Examples
    --------
    >>> weights = np.zeros(4096, np.float16)  # on every rank
    >>> root = compcoll.get_communicator().rank == 0
    >>> new = weights.copy()
    >>> if root:
    ...     new[::100] = 1
    >>> weights = compcoll.bcast(new, out=weights, codec="delta")
    >>> float(weights.sum())
    41.0
    """

    name: ClassVar[str] = "delta"
    fixed_size = False
    needs_reference = True
    conserves = "none"
    # If 2 % of the values changed. Nothing is added, so `accumulate` and `recode` are not used.
    speeds = (Speed("delta", 0.8, 3e9, 15e9, 15e9, 3e9),)
    examples = (Example({}),)

    def coder(self, device: Device, dtype: str) -> Coder:
        return DeltaCoder(DTYPES[dtype].itemsize)

    def wire_bits(self, device: Device, dtype: str) -> float:
        """Return the bits per value if 2 % of the values changed."""
        return _TYPICAL * 8 * (DTYPES[dtype].itemsize + 1)

    def encoding_error(self, dtype: str) -> float:
        return 0.0

    def error_bound(self, dtype: str) -> ErrorBound:
        return ErrorBound()
