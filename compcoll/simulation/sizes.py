"""A device without memory: arrays have only a length, and kernels take virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ..host.encode_options import PLAIN, EncodeOptions
from ..plan.cost import Speed
from .network import SimulatedTransport

Array = Any


class Extent:
    """A stand-in for memory of ``nbytes`` bytes. Slicing returns it whole, since kernels get lengths as arguments."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __getitem__(self, part: slice) -> Extent:
        return self


class SizesCoder:
    """A coder that only advances the clock; implements `compcoll.codecs.base.Coder`.

    Each term beyond the first two takes the time of ``accumulate``. 16-bit floats take as long as float32.

    Parameters
    ----------
    rank : SimulatedTransport
        The rank that encodes and decodes, whose clock it advances.
    wire_nbytes : callable
        Returns the bytes of a wire for a number of values.
    speed : Speed
        The kernels' speed.
    itemsize : int
        Bytes of a value.

    Attributes
    ----------
    encode_seconds, decode_seconds : float
        Virtual time spent so far.
    """

    fixed_size = True
    knows_decoded = False

    def __init__(
        self, rank: SimulatedTransport, wire_nbytes: Callable[[int], int], speed: Speed, itemsize: int
    ) -> None:
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0
        self.wire_nbytes = cache(wire_nbytes)
        self._rank = rank
        rates = (speed.encode, speed.decode, speed.accumulate, speed.recode)
        self._encode, self._decode, self._accumulate, self._recode = (max(itemsize, 4) / rate for rate in rates)

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        terms = len(wires) + (add is not None)
        seconds = n * (self._encode if terms == 1 else self._recode + (terms - 2) * self._accumulate)
        self._rank.now += seconds
        self.encode_seconds += seconds
        return self.wire_nbytes(n)

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        terms = len(wires) + (add is not None)
        seconds = n * (self._decode if terms == 1 else (terms - 1) * self._accumulate)
        self._rank.now += seconds
        self.decode_seconds += seconds
