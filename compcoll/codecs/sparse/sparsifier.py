"""Sparsifiers: the base class, the passes over buffers that they need of a device, and their coder."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from ...dtypes import DTYPES, computed_on
from ...errors import InvalidArgument, InvalidBuffer
from ...feedback import ErrorFeedback
from ...host.arrays import store
from ...host.encode_options import PLAIN, EncodeOptions
from ...host.selection import Search
from ..base import Array, Codec, Coder, Device
from ..checksum import NBYTES, opened
from ..options import OneOf, option

# Formats of indices, numbered as the kernels do: 32 bits each; 28 bits beside a power code of 4; 16-bit run lengths;
# one bit for every element of the buffer.
WIRES = ("pairs", "packed", "runs", "mask")

# Formats of values: as they are; plus or minus a step; sign and exponent in 4 bits.
FULL, SIGN, POWER = 0, 1, 2

MOST_ELEMENTS, MOST_PACKED = (1 << 32) - 1, 1 << 28

_HEADER_NBYTES = 32
_EXPECTED_DENSITY = 0.01  # the part of the elements that is sent, for the cost model, where no option says it
# Elements that are cleared between two looks at messages.
_CLEARED_AT_ONCE = 1 << 21
_VALUE_NAMES = ("full", "sign", "power")


class Selection(Protocol):
    """A device's passes over a buffer of values that are computed on: float64 for float64, else float32.

    Buffers are in the device's memory; indices, samples and what is taken of a buffer in the host's.

    Thresholds are for magnitudes; NaN and Inf are above every finite one.

    Attributes
    ----------
    dtype : dtype
        Of the values.
    """

    dtype: Any

    def moments(self, values: Array) -> tuple[float, float, float, float]:
        """Compute, of the finite values: sum, sum of magnitudes, sum of squares, largest magnitude."""

    def laplacian(
        self, values: Array, m: int, density: float, quantile: float
    ) -> tuple[float, float, float, float, float]:
        """A Laplacian distribution with the moments of a sample of m values, or of all: the estimate of the threshold,
        ``b · ln(cosh(μ/b) / η)``, above which a part of them lies; ``|μ|``; the largest magnitude looked at; in which
        length the tail falls to 1/e there, b; and the estimate of a normal distribution without mean, of which the
        quantile is given. The two change places where the mean magnitude says that the tail is lighter.
        """

    def count(self, values: Array, threshold: float) -> int:
        """Count the values above the threshold."""

    def above(self, values: Array, threshold: float, most: int) -> tuple[Array | None, int]:
        """The indices of values above a threshold, ascending, unless there are more than ``most``; and their count."""

    def unambiguous(self, values: Array, variances: Array, alpha: float, threshold: float) -> Array:
        """The indices of values r with ``|r| > threshold`` and ``r² > alpha · v``, and of those that are not finite."""

    def bisected(
        self, sample: Array, low: float, high: float, head: float, tail: float, first: float, second: float
    ) -> float | None:
        """A threshold between two others, above which from low to high of a sample lie: the first trial, the second, if
        it lies between what is left, or by bisection; None where none was found.
        """

    def chosen(self, values: Array, search: Search, room: int) -> tuple[Array | None, int]:
        """The indices of as many values as are searched, by one pass. All above the first threshold, if no higher one
        is found where more are; None if these are fewer than k or more than ``room``. And how many they are.
        """

    def kth_largest(self, values: Array, k: int) -> float:
        """The magnitude that k values reach."""

    def largest(self, values: Array, k: int) -> Array:
        """The indices of the k largest, without zeros and with all that are not finite; of equal ones the first."""

    def sample(self, values: Array, m: int) -> Array:
        """A stratified sample of m values, a multiple of 16, in runs of 16 neighbours."""

    def take(self, values: Array, indices: Array) -> Array: ...

    def put(self, indices: Array, values: Array | None, out: Array) -> None:
        """Store ``out[indices] = values``, or 0."""

    def zeros(self, n: int) -> Array: ...

    def clear(self, out: Array) -> None:
        """Clear the array: ``out = 0``."""

    def multiply(self, values: Array, factor: float) -> None:
        """Multiply in place: ``values *= factor``."""

    def plus(self, target: Array, source: Array, factor: float = 1.0) -> None:
        """Add in place: ``target += source · factor``."""

    def random(self, n: int, k: int, key: int) -> Array:
        """The indices of k of n elements at random, ascending."""

    def union(self, first: Array, second: Array) -> Array:
        """Indices that are in either, ascending."""

    def finite(self, values: Array) -> bool:
        """Tell whether all values are finite."""

    def powers(self, values: Array, largest: float = 0.0) -> tuple[Array, int]:
        """The positions of values that have a power code, and the exponent that codes refer to: that of ``largest``, or
        of the largest value if it is larger.
        """

    def wire_nbytes(self, n: int, indices: Array, index_format: int, value_format: int) -> int:
        """Length of the wire of these elements of n."""

    def write(
        self,
        n: int,
        indices: Array,
        values: Array,
        index_format: int,
        value_format: int,
        step: float,
        top: int,
        wire: Array,
    ) -> int:
        """Write the wire of these elements of n, and return its length."""

    def read(self, wire: Array, n: int) -> tuple[Array, Array]:
        """Indices and values of a wire; `WireCorrupted` for all that is not one of n elements."""

    def add(self, indices: Array, values: Array, out: Array) -> None:
        """Add in place: ``out[indices] += values``."""

    def subtract(self, indices: Array, sent: Array, out: Array) -> None:
        """Subtract in place: ``out[indices] -= sent``; 0 where that is not finite."""

    def without(self, n: int, positions: Array) -> Array:
        """The positions among n that are not these."""

    def merged(self, parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Sums of sparse vectors, added in their order."""

    def cuts(self, indices: Array, bounds: list[int]) -> list[int]:
        """Count the indices that lie below each bound."""


class Choice(NamedTuple):
    """The elements that a sparsifier sends of some values.

    Attributes
    ----------
    indices : array of uint32
        Ascending.
    step : float
        For sign values.
    largest : float
        For power codes, the magnitude that they refer to; that of what is sent if it is larger.
    """

    indices: Array
    step: float = 0.0
    largest: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Sparsifier(Codec):
    """A method that sends some elements of a buffer, as indices and values.

    Parameters
    ----------
    wire : {"auto", "pairs", "packed", "runs", "mask"}
        Format of the indices; by default the shortest.
    out_format : {"dense", "sparse"}
        What an allreduce returns: an array like the input, or a `SparseSum`.

    Attributes
    ----------
    state : type of ErrorFeedback
        What it keeps from call to call, at the least.
    largest_first : bool
        Whether the largest magnitudes are sent, so that sums may be cut down to as many again.
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
        """An index of 32 bits and the value for each element that is expected to be sent."""
        return getattr(self, "density", _EXPECTED_DENSITY) * (32 + max(8 * DTYPES[dtype].itemsize, 32))

    @property
    def sent_values(self) -> int:
        """Format of the values on the wire."""
        return POWER if self.wire == "packed" else self.value_format

    def coder(self, device: Device, dtype: str) -> Coder:
        return SparseCoder(self, device, dtype)

    def check_call(self, feedback: ErrorFeedback | None, out: Any) -> None:
        """Refuse a state, or a buffer for the result, that an allreduce could not work with."""
        if out is not None and self.out_format == "sparse":
            raise InvalidArgument('out_format="sparse" returns indices and values of its own: give no out')

    @abstractmethod
    def choose(self, kernels: Selection, values: Array, feedback: ErrorFeedback | None) -> Choice:
        """Choose what to send; elements that are not finite always are."""

    def settle(self, kernels: Selection, feedback: ErrorFeedback, indices: Array, sent: Array) -> None:
        """Account for what was sent."""
        feedback.sent(kernels, indices, sent)


class SparseSum(NamedTuple):
    """A sum of all ranks' sparse contributions.

    Attributes
    ----------
    indices : array of uint32
        Ascending, without repetition; of the flattened array.
    values : array
        As many, of the input's element type.
    shape : tuple of int
        Of the whole array.

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
        packed = value_format == POWER and n <= MOST_PACKED
        fits = [number for number, name in enumerate(WIRES) if packed or name != "packed"]
        if asked != "auto" and WIRES.index(asked) in fits:
            fits = [WIRES.index(asked)]
        shortest = min(fits, key=lambda number: self.kernels.wire_nbytes(n, indices, number, value_format))
        return Chosen(n, indices, values, shortest, value_format, step, top)
