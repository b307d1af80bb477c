"""Quantizers, which represent values by integers that any allreduce can add, and their kernels for host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import computed_on
from ..kernels import _host
from .arrays import load, store
from .encode_options import PLAIN, EncodeOptions
from .gathered_votes import MOST_RANKS, GatheredVotes

Array = npt.NDArray[Any]


def integer_levels(levels: int, dtype: str) -> int:
    """Round levels down to a number that the type of computation holds exactly, so that sums cannot overflow."""
    spare = max(levels.bit_length() - computed_on(dtype).precision, 0)
    return levels >> spare << spare


class IntegerQuantizer(ABC):
    """An additive codec bound to a device, an element type and a number of ranks.

    It turns values into numbers that any allreduce can add. First the ranks agree, by a maximum, on one item for each
    block, such as its scale: the shared scale. The last block may be shorter.

    Attributes
    ----------
    shared_scale_dtype, number_dtype : numpy.dtype
        Element types of the shared scale and of the numbers.
    per_value : float
        Numbers per value.
    feedback : bool
        Whether error feedback works with it.
    is_sum : bool
        Whether the result is a sum. If not, an uncompressed sum never replaces it.
    gathered : GatheredVotes or None
        Another encoding, for few ranks: gathering it from all ranks takes fewer bytes than adding numbers.
    """

    number_dtype: np.dtype[Any]
    per_value: float
    feedback: bool
    is_sum: bool
    gathered: GatheredVotes | None = None

    def __init__(self, block: int, dtype: str) -> None:
        self._block = block
        self._computed = computed_on(dtype).numpy
        self.shared_scale_dtype = np.dtype(f"uint{8 * self._computed.itemsize}")

    def shared_scale(self, n: int) -> int:
        """Return the number of items of the shared scale of ``n`` values."""
        return -(-n // self._block)

    @abstractmethod
    def numbers(self, n: int) -> int:
        """Return how many numbers represent ``n`` values."""

    @abstractmethod
    def survey(self, add: Array, scale: float, residual: Array | None, shared_scale: Array) -> None:
        """Store this rank's items of the shared scale, of which all ranks then use the maximum."""

    @abstractmethod
    def encode(self, add: Array, scale: float, residual: Array | None, shared_scale: Array, numbers: Array) -> None:
        """Store the numbers of ``add · scale`` plus the residual, and update the residual."""

    @abstractmethod
    def decode(self, numbers: Array, shared_scale: Array, out: Array) -> None:
        """Store the values that sums of numbers represent."""


class InIntegers(IntegerQuantizer):
    """Quantizers with one integer for each value."""

    per_value = 1.0
    feedback = True
    is_sum = True

    def __init__(self, bits: int, levels: int, block: int, dtype: str) -> None:
        super().__init__(block, dtype)
        self.number_dtype = np.dtype(f"int{bits}")
        self._nbytes = bits // 8
        self._levels = integer_levels(levels, dtype)

    def numbers(self, n: int) -> int:
        return n


class InVotes(IntegerQuantizer):
    """Quantizers with a bit field for each value, several in a number."""

    feedback = False
    is_sum = False

    def __init__(self, ranks: int, block: int, dtype: str) -> None:
        super().__init__(block, dtype)
        self._ranks = ranks
        # Bits of a field that can hold the sum of all ranks' votes.
        self._width = next(width for width in (2, 4, 8, 16, 32) if 2 * ranks < 1 << width)
        self.number_dtype = np.dtype(f"uint{max(self._width, 8)}")
        self._fields = max(8 // self._width, 1)
        self.per_value = 1.0 / self._fields

    def numbers(self, n: int) -> int:
        return -(-n // self._fields)


class _OnHost(IntegerQuantizer):
    """The part of an integer quantizer that uses the CPU's kernels."""

    def _bind(self, dtype: str, instruction_set: int) -> None:
        self._dtype = dtype
        wide = dtype == "float64"
        self._passes = (_host.IntegerQuantizer64 if wide else _host.IntegerQuantizer32)(instruction_set, self._block)

    def _values(self, add: Array, scale: float, residual: Array | None) -> Array:
        values: Array = load(add, self._dtype)
        if scale != 1.0:
            values = values * self._computed.type(scale)
        fed: Array = values if residual is None else values + residual
        return fed

    def survey(self, add: Array, scale: float, residual: Array | None, shared_scale: Array) -> None:
        """Store the bits of each block's largest magnitude. As integers, those of NaN are larger than those of Inf."""
        self._passes.survey(self._values(add, scale, residual), shared_scale)

    def _decode(self, out: Array, decode: Callable[[Array], None]) -> None:
        values = out if out.dtype == self._computed else np.empty(out.size, self._computed)
        decode(values)
        if values is not out:
            store(values, out, self._dtype)


class Integers(InIntegers, _OnHost):
    """Encodes values as integer multiples of a step that the ranks share.

    Parameters
    ----------
    bits : int
        Bits of an integer.
    levels : int
        The integer for the largest magnitude of all ranks.
    block : int
        Values that share a step.
    dtype : str
        Element type.
    instruction_set : int
        Index of one of the device's instruction sets.
    """

    def __init__(self, bits: int, levels: int, block: int, dtype: str, instruction_set: int) -> None:
        super().__init__(bits, levels, block, dtype)
        self._bind(dtype, instruction_set)

    def encode(self, add: Array, scale: float, residual: Array | None, shared_scale: Array, numbers: Array) -> None:
        values = self._values(add, scale, residual)
        self._passes.to_levels(values, shared_scale, self._levels, self._nbytes, numbers.view(np.uint8), residual)

    def decode(self, numbers: Array, shared_scale: Array, out: Array) -> None:
        of, levels = numbers.view(np.uint8), self._levels
        self._decode(out, lambda values: self._passes.from_levels(of, self._nbytes, shared_scale, levels, values))


class Votes(InVotes, _OnHost):
    """Encodes signs as votes: 0 for negative, 1 for zero, 2 for positive, in bit fields that hold all ranks' sum.

    Parameters
    ----------
    ranks : int
        Number of ranks that vote.
    block : int
        Values that share a mark for NaN and Inf.
    dtype : str
        Element type.
    instruction_set : int
        Index of one of the device's instruction sets.
    """

    def __init__(self, ranks: int, block: int, dtype: str, instruction_set: int) -> None:
        super().__init__(ranks, block, dtype)
        self._bind(dtype, instruction_set)
        self.gathered = GatheredVotes(block, dtype, self._from_bits) if 2 <= ranks <= MOST_RANKS else None

    def encode(self, add: Array, scale: float, residual: Array | None, shared_scale: Array, numbers: Array) -> None:
        self._passes.to_votes(load(add, self._dtype), self._width, numbers.view(np.uint8))

    def decode(self, numbers: Array, shared_scale: Array, out: Array) -> None:
        of, width = numbers.view(np.uint8), self._width
        self._decode(out, lambda values: self._passes.from_votes(of, width, self._ranks, shared_scale, values))

    def _from_bits(self, rows: Array, marks: Array, out: Array) -> None:
        self._decode(out, lambda values: self._passes.from_bits(rows, marks, values))


class NumberCoder:
    """A coder that sends numbers unchanged and combines them; implements `compcoll.codecs.base.Coder`.

    Parameters
    ----------
    dtype : numpy.dtype
        Element type of the numbers.
    op : {"sum", "max"}
        The operation that combines them.
    """

    fixed_size = True
    knows_decoded = False

    def __init__(self, dtype: np.dtype[Any], op: str) -> None:
        self._dtype = dtype
        self._combine: Callable[..., Array] = {"sum": np.add, "max": np.maximum}[op]

    def wire_nbytes(self, n: int) -> int:
        return n * self._dtype.itemsize

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        out = wire[: self.wire_nbytes(n)].view(self._dtype)
        self.decode(n, add, wires, out)
        if how.decoded is not None:
            how.decoded[:] = out
        return out.nbytes

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        terms = [] if add is None else [add]
        terms += [wire[: self.wire_nbytes(n)].view(self._dtype) for wire in wires]
        if len(terms) == 1:
            out[:] = terms[0]
            return
        self._combine(terms[0], terms[1], out=out)
        for term in terms[2:]:
            self._combine(out, term, out=out)
