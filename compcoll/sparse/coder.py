"""A sparsifier bound to a device and an element type."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..codecs.base import Array, Coder
from ..codecs.checksum import NBYTES, opened
from ..devices.arrays import store
from ..devices.encode_options import PLAIN, EncodeOptions
from ..dtypes import DTYPES, computed_on
from ..errors import InvalidBuffer
from ..feedback import ErrorFeedback
from .contract import FULL, MOST_ELEMENTS, MOST_PACKED, POWER, WIRES, Selection, Sparsifier

_HEADER_NBYTES = 32
_CLEARED_AT_ONCE = 1 << 21
_PACKED = WIRES.index("packed")
_VALUE_NAMES = ("full", "sign", "power")


class Chosen(NamedTuple):
    """Elements that one rank sends.

    Attributes
    ----------
    n : int
        Of how many.
    indices : array of uint32
        Which, ascending.
    values : array
        What they are.
    index_format, value_format : int
        How they travel.
    step, top : float, int
        What signs and power codes refer to.
    """

    n: int
    indices: Array
    values: Array
    index_format: int
    value_format: int
    step: float
    top: int

    @property
    def formats(self) -> str:
        """The formats, for people."""
        return f"{WIRES[self.index_format]} of {_VALUE_NAMES[self.value_format]} values"


class _Incoming:
    """A call's values, for a feedback."""

    def __init__(self, coder: SparseCoder, n: int, x: Array, scale: float) -> None:
        self._coder, self._n, self._x, self.scale = coder, n, x, scale
        self.kernels = coder.kernels

    def add_to(self, target: Any, factor: float = 1.0) -> None:
        self._coder.accumulate(self._n, self._x, target, self.scale * factor)

    def norm(self) -> float:
        values = self.kernels.zeros(self._n)
        self._coder.accumulate(self._n, self._x, values, 1.0)
        return math.sqrt(self.kernels.moments(values)[2])


class SparseCoder:
    """A sparsifier's work on one device and element type (the contract is `compcoll.codecs.base.Coder`).

    Values are computed on in float64 for float64 and else in float32, and travel so.

    Parameters
    ----------
    sparsifier : Sparsifier
        What to send.
    device : Device
        Where arrays are.
    dtype : str
        Element type.
    checksum : bool
        Whether wires end with a checksum, which is looked at before anything else.
    """

    fixed_size = False
    knows_decoded = False

    def __init__(self, sparsifier: Sparsifier, device: Any, dtype: str, *, checksum: bool = False) -> None:
        computed = computed_on(dtype)
        self.sparsifier = sparsifier
        self._device, self._dtype = device, dtype
        self._seal_nbytes = NBYTES if checksum else 0
        self.kernels: Selection = device.selection(computed.name)
        self._direct = dtype == computed.name
        self._itemsize = computed.itemsize
        # Values as they are computed on are the wire of this cast: the cast kernels load, add and store them.
        self._cast: Coder = device.coder(("cast", computed.precision, 0), dtype)
        self._as_bytes = device.as_bytes
        self._empty_bytes = device.empty_bytes

    def checked(self) -> SparseCoder:
        """Give a coder like this one, with checksums."""
        return SparseCoder(self.sparsifier, self._device, self._dtype, checksum=True)

    def on(self, device: Any) -> SparseCoder:
        """Give a coder like this one on another device."""
        return SparseCoder(self.sparsifier, device, self._dtype, checksum=bool(self._seal_nbytes))

    def wire_nbytes(self, n: int) -> int:
        """The longest wire of n values: with all of them sent, in the longest format that may be taken."""
        masks = -(-n // 8)
        indices = {"pairs": 4 * n, "packed": masks, "mask": masks, "runs": 2 * n + 2 * (n // 0xFFFF + 1), "auto": masks}
        return _HEADER_NBYTES + indices[self.sparsifier.wire] + self._itemsize * n + self._seal_nbytes

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        residual = how.residual
        values = self.kernels.zeros(n) if residual is None else residual
        self._sum(n, add, wires, values, how.scale)
        chosen = self._chosen(values, None)
        nbytes = self.write(chosen, 0, n, wire)
        indices, sent = self.read(wire[:nbytes], n)
        if residual is not None:
            # Recursive doubling alone encodes what is not its own, and shares that; it takes no sparsifier.
            assert how.feed and how.residual_scale == 1.0
            self.kernels.subtract(indices, sent, values)
        if how.decoded is not None:
            self.store([(indices, sent)], self.zeros_for(how.decoded, lambda: None), how.decoded)
        return nbytes

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        values = self.kernels.zeros(n)
        self._sum(n, add, wires, values, scale)
        self._cast.decode(n, None, (self._as_bytes(values),), out)

    def select(self, n: int, x: Array, scale: float, feedback: ErrorFeedback | None) -> Chosen:
        """Choose what to send of ``x · scale``, and of what the feedback holds."""
        if feedback is not None:
            values = feedback.accumulate(_Incoming(self, n, x, scale))
        elif self._direct and scale == 1.0:
            values = x
        else:
            values = self.kernels.zeros(n)
            self.accumulate(n, x, values, scale)
        return self._chosen(values, feedback)

    def write(self, chosen: Chosen, begin: int, end: int, wire: Array) -> int:
        """Write the wire of the chosen ones between two elements, as a buffer of its own, and return its length."""
        first, last = self.kernels.cuts(chosen.indices, [begin, end])
        indices = chosen.indices[first:last] - begin if begin else chosen.indices[first:last]
        nbytes = self.kernels.write(
            end - begin,
            indices.astype(chosen.indices.dtype, copy=False),
            chosen.values[first:last],
            chosen.index_format,
            chosen.value_format,
            chosen.step,
            chosen.top,
            wire,
        )
        if not self._seal_nbytes:
            return nbytes
        self._device.seal(wire[: nbytes + self._seal_nbytes])
        return nbytes + self._seal_nbytes

    def nbytes_of(self, chosen: Chosen) -> int:
        """The length of the wire of all chosen elements."""
        nbytes = self.kernels.wire_nbytes(chosen.n, chosen.indices, chosen.index_format, chosen.value_format)
        return nbytes + self._seal_nbytes

    def read(self, wire: Array, n: int) -> tuple[Array, Array]:
        """Indices and values of a wire of n elements."""
        return self.kernels.read(opened(self._device, wire, n) if self._seal_nbytes else wire, n)

    def settle(self, feedback: ErrorFeedback, indices: Array, sent: Array) -> None:
        """Let the feedback know what was sent."""
        self.sparsifier.settle(self.kernels, feedback, indices, sent)
        feedback.calls += 1

    def zeros_for(self, out: Array, now_and_then: Callable[[], None]) -> Array:
        """Zeros to add sparse vectors to whose dense sum goes to ``out``: its own memory, where that will do."""
        if not self._direct:
            return self.kernels.zeros(int(out.size))
        for begin in range(0, int(out.size), _CLEARED_AT_ONCE):
            self.kernels.clear(out[begin : begin + _CLEARED_AT_ONCE])
            now_and_then()
        return out

    def store(self, parts: Sequence[tuple[Array, Array]], zeros: Array, out: Array) -> None:
        """Store the dense sum of sparse vectors, added in their order."""
        for indices, sent in parts:
            self.kernels.add(indices, sent, zeros)
        if not self._direct:
            self._cast.decode(int(out.size), None, (self._as_bytes(zeros),), out)

    def stored(self, values: Array) -> Array:
        """Values that are on the host, in the element type."""
        out = self._empty_bytes(values.size * DTYPES[self._dtype].itemsize).view(DTYPES[self._dtype].numpy)
        store(values, out, self._dtype)
        return out

    def accumulate(self, n: int, x: Array, target: Array, scale: float) -> None:
        """Add in place: ``target += x · scale``."""
        at = self._as_bytes(target)
        self._cast.encode(n, x, (at,), at, EncodeOptions(scale=scale))

    def longest(self, n: int, count: int | None = None) -> int:
        """Bytes that no wire of n elements exceeds, with at most so many of them sent."""
        count = n if count is None else min(n, count)
        indices = max(4 * count, -(-n // 8), 2 * count + 2 * (n // 0xFFFF + 1))
        return _HEADER_NBYTES + indices + self._itemsize * count + self._seal_nbytes

    def sent(self, chosen: Chosen) -> tuple[Array, Array]:
        """Indices and values as those see them who receive them."""
        if chosen.value_format == FULL:
            return chosen.indices, chosen.values
        wire = self._empty_bytes(self.nbytes_of(chosen))
        self.write(chosen, 0, chosen.n, wire)
        return self.read(wire, chosen.n)

    def quantiles(self, chosen: Chosen, parts: int) -> list[int]:
        """The indices at which parts with as many elements would begin, but for the first."""
        count, n = int(chosen.indices.size), chosen.n
        if count == 0:
            return [n * part // parts for part in range(1, parts)]
        return [int(chosen.indices[count * part // parts]) for part in range(1, parts)]

    def reduced(self, merged: tuple[Array, Array], n: int, most: int) -> tuple[Chosen, tuple[Array, Array] | None]:
        """A sum of sparse vectors, as something to send of n elements, and what is left of it.

        Where largest elements are sent, only so many of them are.
        """
        kernels, (indices, values) = self.kernels, merged
        left = None
        if self.sparsifier.largest_first and indices.size > most:
            kept = kernels.largest(values, most)
            rest = kernels.without(indices.size, kept)
            left = (kernels.take(indices, rest), kernels.take(values, rest))
            indices, values = kernels.take(indices, kept), kernels.take(values, kept)
        return self._formatted(n, indices, values, FULL, 0.0, 0), left

    def _sum(self, n: int, add: Array | None, wires: Sequence[Array], values: Array, scale: float) -> None:
        if add is not None:
            self.accumulate(n, add, values, scale)
        for wire in wires:
            self.kernels.add(*self.read(wire, n), values)

    def _chosen(self, values: Array, feedback: ErrorFeedback | None) -> Chosen:
        if values.size > MOST_ELEMENTS:
            raise InvalidBuffer(f"{values.size} elements: sparse wires hold at most {MOST_ELEMENTS}, send parts")
        kernels = self.kernels
        indices, step, largest = self.sparsifier.choose(kernels, values, feedback)
        sent = kernels.take(values, indices)
        value_format, top = self.sparsifier.sent_values, 0
        # Neither signs nor powers of two hold what is not finite.
        if value_format != FULL and not kernels.finite(sent):
            value_format = FULL
        if value_format == POWER:
            kept, top = kernels.powers(sent, largest)
            indices, sent = kernels.take(indices, kept), kernels.take(sent, kept)
        return self._formatted(values.size, indices, sent, value_format, step, top)

    def _formatted(self, n: int, indices: Array, values: Array, value_format: int, step: float, top: int) -> Chosen:
        """Use the index format asked for where it fits, else the shortest."""
        asked = self.sparsifier.wire
        fits = [
            number for number in range(len(WIRES)) if number != _PACKED or (value_format == POWER and n <= MOST_PACKED)
        ]
        if asked != "auto" and WIRES.index(asked) in fits:
            fits = [WIRES.index(asked)]
        shortest = min(fits, key=lambda number: self.kernels.wire_nbytes(n, indices, number, value_format))
        return Chosen(n, indices, values, shortest, value_format, step, top)
