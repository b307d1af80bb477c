"""Sparsifiers: the base class, the interface of a device's kernels for them, and their coder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ...dtypes import DTYPES, computed_on
from ...errors import InvalidArgument, InvalidBuffer
from ...feedback import ErrorFeedback, Incoming
from ...gpu.selection import DeviceSelection
from ...host.arrays import store
from ...host.encode_options import PLAIN, EncodeOptions
from ...host.selection import HostSelection
from ..base import Array, Codec, Coder, Device
from ..checksum import NBYTES, opened
from ..options import OneOf, option

# Formats of indices, in the kernels' order: 32 bits each; 28 bits beside a 4-bit power code; 16-bit run lengths; one
# bit for every element of the buffer.
WIRES = ("pairs", "packed", "runs", "mask")

# Formats of values: full precision; plus or minus a step; sign and exponent in 4 bits.
FULL, SIGN, POWER = 0, 1, 2

MOST_ELEMENTS, MOST_PACKED = (1 << 32) - 1, 1 << 28

_HEADER_NBYTES = 32
_EXPECTED_DENSITY = 0.01  # fraction of elements that the cost model assumes for sparsifiers without a density
# Elements to clear between two polls of messages.
_CLEARED_AT_ONCE = 1 << 21
_VALUE_NAMES = ("full", "sign", "power")


Selection = HostSelection | DeviceSelection
"""The kernels of a device for buffers in the type of computation: see `HostSelection`."""


class Choice(NamedTuple):
    """The elements that a sparsifier selects.

    Attributes
    ----------
    indices : array of uint32
        Indices of the elements, ascending.
    step : float
        Magnitude of sign values.
    largest : float
        For power codes, the magnitude that they refer to. If a sent magnitude is larger, they refer to that.
    """

    indices: Array
    step: float = 0.0
    largest: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Sparsifier(Codec):
    """Base class of codecs that send some elements of a buffer, as indices and values.

    Parameters
    ----------
    wire : {"auto", "pairs", "packed", "runs", "mask"}
        Format of the indices; by default the shortest.
    out_format : {"dense", "sparse"}
        Result of an allreduce: an array like the input, or a `SparseSum`.

    Attributes
    ----------
    state : type of ErrorFeedback
        The class of feedback that the method needs.
    largest_first : bool
        Whether the method sends the largest magnitudes. Sums may then keep only their largest elements, too.
    """

    wire: str = option("auto", OneOf(("auto", *WIRES)), "the format of indices and values")
    out_format: str = option("dense", OneOf(("dense", "sparse")), "of an allreduce's result", on_command_line=False)

    fixed_size = False
    value_format: ClassVar[int] = FULL
    state: ClassVar[type[ErrorFeedback]] = ErrorFeedback
    largest_first: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire == "packed" and self.value_format == SIGN:
            raise InvalidArgument(f"{self.name} sends signs, which packed wires do not hold: use wire='auto'")

    @property
    def kind(self) -> str:
        return "sparse"

    def wire_bits(self, device: Device, dtype: str) -> float:
        """Return the bits per value if each element sent takes a 32-bit index and its value."""
        return getattr(self, "density", _EXPECTED_DENSITY) * (32 + max(8 * DTYPES[dtype].itemsize, 32))

    @property
    def sent_values(self) -> int:
        """The format of the values on the wire."""
        return POWER if self.wire == "packed" else self.value_format

    def coder(self, device: Device, dtype: str) -> Coder:
        return SparseCoder(self, device, dtype)

    def check_call(self, feedback: ErrorFeedback | None, out: Any) -> None:
        """Raise `InvalidArgument` for a feedback or an ``out`` that an allreduce cannot use."""
        if out is not None and self.out_format == "sparse":
            raise InvalidArgument('out_format="sparse" returns indices and values of its own: give no out')

    @abstractmethod
    def choose(self, kernels: Selection, values: Array, feedback: ErrorFeedback | None) -> Choice:
        """Select the elements to send, always including all that are not finite."""

    def settle(self, kernels: Selection, feedback: ErrorFeedback, indices: Array, sent: Array) -> None:
        """Update the feedback with the elements that were sent."""
        feedback.sent(kernels, indices, sent)


class SparseSum(NamedTuple):
    """A sum of all ranks' sparse contributions.

    Attributes
    ----------
    indices : array of uint32
        Indices into the flattened array, ascending and unique.
    values : array
        The sums at these indices, in the input's element type.
    shape : tuple of int
        Shape of the whole array.

    Examples
    --------
    >>> x, feedback = np.arange(4, dtype=np.float32), compcoll.ErrorFeedback()
    >>> found = compcoll.allreduce(
    ...     x, op="mean", codec="topk", density=0.25, select="exact", feedback=feedback, out_format="sparse"
    ... )
    >>> found.indices, found.values, found.shape
    (array([3], dtype=uint32), array([3.], dtype=float32), (4,))
    """

    indices: Any
    values: Any
    shape: tuple[int, ...]


class Chosen(NamedTuple):
    """The elements that one rank sends.

    Attributes
    ----------
    n : int
        Number of elements of the buffer.
    indices : array of uint32
        Indices of the elements, ascending.
    values : array
        Their values.
    index_format, value_format : int
        Formats on the wire.
    step, top : float, int
        Magnitude of signs, and the exponent that power codes refer to.
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
        """The formats as readable text."""
        return f"{WIRES[self.index_format]} of {_VALUE_NAMES[self.value_format]} values"


class SparseCoder:
    """A sparsifier bound to a device and an element type; implements `compcoll.codecs.base.Coder`.

    Values are computed and sent in float64 for float64, else in float32.

    Parameters
    ----------
    sparsifier : Sparsifier
        Selects the elements.
    device : Device
        The device of the arrays.
    dtype : str
        Element type of the arrays.
    checksum : bool
        Whether wires end with a checksum, which is checked before anything else.
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
        # Values in the type of computation are the wire of this cast, so the cast kernels can load, add and store them.
        self._cast: Coder = device.coder(("cast", computed.precision, 0), dtype)
        self._empty_bytes = device.empty_bytes

    def checked(self) -> SparseCoder:
        """Return the same coder with checksums."""
        return SparseCoder(self.sparsifier, self._device, self._dtype, checksum=True)

    def on(self, device: Any) -> SparseCoder:
        """Return the same coder for another device."""
        return SparseCoder(self.sparsifier, device, self._dtype, checksum=bool(self._seal_nbytes))

    def wire_nbytes(self, n: int) -> int:
        """Return the bytes of the longest wire of n values: all are sent, in the longest possible format."""
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
            # Only recursive doubling encodes without feeding the residual or with a share, and it takes no sparsifier.
            assert how.feed and how.residual_scale == 1.0
            self.kernels.subtract(indices, sent, values)
        if how.decoded is not None:
            self.store([(indices, sent)], self.zeros_for(how.decoded, lambda: None), how.decoded)
        return nbytes

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        values = self.kernels.zeros(n)
        self._sum(n, add, wires, values, scale)
        self._cast.decode(n, None, (values.view("uint8"),), out)

    def select(self, n: int, x: Array, scale: float, feedback: ErrorFeedback | None) -> Chosen:
        """Select the elements to send from ``x · scale`` plus the residual."""
        if feedback is not None:
            values = feedback.accumulate(Incoming(self, x, scale))
        elif self._direct and scale == 1.0:
            values = x
        else:
            values = self.kernels.zeros(n)
            self.accumulate(x, values, scale)
        return self._chosen(values, feedback)

    def write(self, chosen: Chosen, begin: int, end: int, wire: Array) -> int:
        """Write the wire of the chosen elements in ``[begin, end)``, as a separate buffer, and return its length."""
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
        """Return the bytes of the wire of all chosen elements."""
        nbytes = self.kernels.wire_nbytes(chosen.n, chosen.indices, chosen.index_format, chosen.value_format)
        return nbytes + self._seal_nbytes

    def read(self, wire: Array, n: int) -> tuple[Array, Array]:
        """Return the indices and values of a wire of n elements."""
        return self.kernels.read(opened(self._device, wire, n) if self._seal_nbytes else wire, n)

    def settle(self, feedback: ErrorFeedback, indices: Array, sent: Array) -> None:
        """Update the feedback with the elements that were sent."""
        self.sparsifier.settle(self.kernels, feedback, indices, sent)
        feedback.calls += 1

    def zeros_for(self, out: Array, now_and_then: Callable[[], None]) -> Array:
        """Return zeros for a dense sum: ``out`` itself if it has the type of computation, else new memory.

        ``now_and_then`` is called after each part that was cleared.
        """
        if not self._direct:
            return self.kernels.zeros(int(out.size))
        for begin in range(0, int(out.size), _CLEARED_AT_ONCE):
            self.kernels.clear(out[begin : begin + _CLEARED_AT_ONCE])
            now_and_then()
        return out

    def store(self, parts: Sequence[tuple[Array, Array]], zeros: Array, out: Array) -> None:
        """Store the dense sum of sparse vectors in ``out``, added in their order."""
        for indices, sent in parts:
            self.kernels.add(indices, sent, zeros)
        if not self._direct:
            self._cast.decode(int(out.size), None, (zeros.view("uint8"),), out)

    def stored(self, values: Array) -> Array:
        """Convert values in host memory to the element type."""
        out = self._empty_bytes(values.size * DTYPES[self._dtype].itemsize).view(DTYPES[self._dtype].numpy)
        store(values, out, self._dtype)
        return out

    def accumulate(self, x: Array, target: Array, scale: float) -> None:
        """Add in place: ``target += x · scale``."""
        at = target.view("uint8")
        self._cast.encode(int(x.size), x, (at,), at, EncodeOptions(scale=scale))

    def longest(self, n: int, count: int | None = None) -> int:
        """Return an upper bound of the bytes of a wire of n elements, of which at most ``count`` are sent."""
        count = n if count is None else min(n, count)
        indices = max(4 * count, -(-n // 8), 2 * count + 2 * (n // 0xFFFF + 1))
        return _HEADER_NBYTES + indices + self._itemsize * count + self._seal_nbytes

    def sent(self, chosen: Chosen) -> tuple[Array, Array]:
        """Return the indices and values as the receiving ranks decode them."""
        if chosen.value_format == FULL:
            return chosen.indices, chosen.values
        wire = self._empty_bytes(self.nbytes_of(chosen))
        self.write(chosen, 0, chosen.n, wire)
        return self.read(wire, chosen.n)

    def quantiles(self, chosen: Chosen, parts: int) -> list[int]:
        """Return the indices at which equally filled parts would begin, except for the first part."""
        count, n = int(chosen.indices.size), chosen.n
        if count == 0:
            return [n * part // parts for part in range(1, parts)]
        return [int(chosen.indices[count * part // parts]) for part in range(1, parts)]

    def reduced(self, merged: tuple[Array, Array], n: int, most: int) -> tuple[Chosen, tuple[Array, Array] | None]:
        """Return the elements of a sum of sparse vectors to send, and the rest, None if there is none.

        If the sparsifier sends the largest magnitudes, only the ``most`` largest are sent.
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
            self.accumulate(add, values, scale)
        for wire in wires:
            self.kernels.add(*self.read(wire, n), values)

    def _chosen(self, values: Array, feedback: ErrorFeedback | None) -> Chosen:
        if values.size > MOST_ELEMENTS:
            raise InvalidBuffer(f"{values.size} elements: sparse wires hold at most {MOST_ELEMENTS}, send parts")
        kernels = self.kernels
        indices, step, largest = self.sparsifier.choose(kernels, values, feedback)
        sent = kernels.take(values, indices)
        value_format, top = self.sparsifier.sent_values, 0
        # Neither signs nor powers of two can represent NaN and Inf.
        if value_format != FULL and not kernels.finite(sent):
            value_format = FULL
        if value_format == POWER:
            kept, top = kernels.powers(sent, largest)
            indices, sent = kernels.take(indices, kept), kernels.take(sent, kept)
        return self._formatted(values.size, indices, sent, value_format, step, top)

    def _formatted(self, n: int, indices: Array, values: Array, value_format: int, step: float, top: int) -> Chosen:
        """Use the requested index format if it fits, else the shortest."""
        asked = self.sparsifier.wire
        packed = value_format == POWER and n <= MOST_PACKED
        fits = [number for number, name in enumerate(WIRES) if packed or name != "packed"]
        if asked != "auto" and WIRES.index(asked) in fits:
            fits = [WIRES.index(asked)]
        shortest = min(fits, key=lambda number: self.kernels.wire_nbytes(n, indices, number, value_format))
        return Chosen(n, indices, values, shortest, value_format, step, top)
