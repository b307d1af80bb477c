"""Values as numbers in host memory that any allreduce adds (the contract is `compcoll.codecs.base.Summands`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import load, store

Array = npt.NDArray[Any]

_TINY = {"float32": 2.0**-80, "float64": 2.0**-900}


class _Blocks:
    """Values in blocks, the last one of which may be shorter."""

    def __init__(self, block: int, dtype: str) -> None:
        self._block = block
        self._dtype = dtype
        self._computed = np.dtype("float64" if dtype == "float64" else "float32")
        self._bits = np.dtype("uint64" if dtype == "float64" else "uint32")

    def agreed(self, n: int) -> Array:
        return np.empty(-(-n // self._block), self._bits)

    def _values(self, add: Array, scale: float, residual: Array | None) -> Array:
        values: Array = load(add, self._dtype)
        if scale != 1.0:
            values = values * self._computed.type(scale)
        fed: Array = values if residual is None else values + residual
        return fed

    def survey(self, add: Array, scale: float, residual: Array | None, agreed: Array) -> None:
        """The bits of the largest magnitude of each block: those of NaN are larger than those of Inf."""
        if not agreed.size:
            return
        magnitudes = np.abs(self._values(add, scale, residual)).view(self._bits)
        agreed[:] = np.maximum.reduceat(magnitudes, np.arange(0, magnitudes.size, self._block))

    def _spread_out(self, of_blocks: Array, n: int) -> Array:
        values: Array = np.repeat(of_blocks, self._block)[:n]
        return values


class Integers(_Blocks):
    """Values as integers: multiples of a step that the ranks agreed on.

    Parameters
    ----------
    bits : int
        Of an integer.
    levels : int
        The integer that the largest magnitude of all ranks becomes.
    block : int
        Values that share a step.
    dtype : str
        Element type.
    """

    per_value = 1.0
    feedback = True
    is_sum = True

    def __init__(self, bits: int, levels: int, block: int, dtype: str) -> None:
        super().__init__(block, dtype)
        self._integer = np.dtype(f"int{bits}")
        self._levels = levels

    def numbers(self, n: int) -> Array:
        return np.empty(n, self._integer)

    def _steps(self, agreed: Array) -> Array:
        """Of each block: NaN where something was not finite, 0 where all is tiny."""
        largest = agreed.view(self._computed)
        steps: Array = largest / self._computed.type(self._levels)
        steps[largest < _TINY[self._computed.name]] = 0
        steps[~np.isfinite(largest)] = np.nan
        return steps

    def encode(self, add: Array, scale: float, residual: Array | None, agreed: Array, numbers: Array) -> None:
        values, steps = self._values(add, scale, residual), self._steps(agreed)
        usable = steps > 0
        inverse = np.divide(1, steps, out=np.zeros_like(steps), where=usable)
        with np.errstate(invalid="ignore", over="ignore"):
            levels = np.rint(values * self._spread_out(inverse, values.size))
        levels[~np.isfinite(levels)] = 0
        np.clip(levels, -self._levels, self._levels, out=levels)
        numbers[:] = levels
        if residual is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                lost = values - levels * self._spread_out(steps, values.size)
            lost[~np.isfinite(lost)] = 0
            residual[:] = lost

    def decode(self, numbers: Array, agreed: Array, out: Array) -> None:
        with np.errstate(over="ignore"):
            values = numbers.astype(self._computed) * self._spread_out(self._steps(agreed), numbers.size)
        store(values, out, self._dtype)


class Votes(_Blocks):
    """Signs as numbers that count: 0 against, 1 for neither, 2 in favour, in fields as wide as all ranks' sum needs.

    Parameters
    ----------
    ranks : int
        That vote.
    block : int
        Values that share a mark for what is not finite.
    dtype : str
        Element type.
    """

    feedback = False
    is_sum = False

    def __init__(self, ranks: int, block: int, dtype: str) -> None:
        super().__init__(block, dtype)
        self._ranks = ranks
        self._width = next(width for width in (2, 4, 8, 16, 32) if 2 * ranks < 1 << width)
        self._number = np.dtype(f"uint{max(self._width, 8)}")
        self._fields = max(8 // self._width, 1)
        self.per_value = 1.0 / self._fields

    def numbers(self, n: int) -> Array:
        return np.empty(-(-n // self._fields), self._number)

    def encode(self, add: Array, scale: float, residual: Array | None, agreed: Array, numbers: Array) -> None:
        values = load(add, self._dtype)
        votes = np.zeros(numbers.size * self._fields, self._number)
        # NaN is neither: its block is marked.
        votes[: values.size] = (values >= 0).view(np.uint8) + (values > 0).view(np.uint8)
        fields = votes.reshape(-1, self._fields)
        numbers[:] = fields[:, 0]
        for index in range(1, self._fields):
            numbers |= fields[:, index] << np.uint8(index * self._width)

    def decode(self, numbers: Array, agreed: Array, out: Array) -> None:
        counts = np.empty((numbers.size, self._fields), np.int64)
        for index in range(self._fields):
            field = numbers >> self._number.type(index * self._width) if self._fields > 1 else numbers
            counts[:, index] = field & self._number.type(2**self._width - 1)
        values = np.sign(counts.reshape(-1)[: out.size] - self._ranks).astype(self._computed)
        values[self._spread_out(~np.isfinite(agreed.view(self._computed)), out.size)] = np.nan
        store(values, out, self._dtype)


class NumberCoder:
    """Moves numbers and combines them (the contract is `compcoll.codecs.base.Coder`).

    Parameters
    ----------
    dtype : numpy.dtype
        Of the numbers.
    op : {"sum", "max"}
        How they are combined.
    """

    fixed_size = True

    def __init__(self, dtype: np.dtype[Any], op: str) -> None:
        self._dtype = dtype
        self._combine: Callable[..., Array] = {"sum": np.add, "max": np.maximum}[op]

    def wire_nbytes(self, n: int) -> int:
        return n * self._dtype.itemsize

    def encode(
        self,
        n: int,
        add: Array | None,
        wires: Sequence[Array],
        wire: Array,
        *,
        residual: Array | None = None,
        feed: bool = True,
        residual_scale: float = 1.0,
        decoded: Array | None = None,
        scale: float = 1.0,
        draw: int = 0,
        position: int = 0,
    ) -> int:
        out = wire[: self.wire_nbytes(n)].view(self._dtype)
        self.decode(n, add, wires, out)
        if decoded is not None:
            decoded[:] = out
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
