"""A device without memory: arrays are lengths, and kernels take virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..host.encode_options import PLAIN, EncodeOptions

Array = Any


class Extent:
    """A stand-in for memory of ``nbytes`` bytes. A slice is not smaller: kernels get lengths as arguments."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __getitem__(self, part: slice) -> Extent:
        return self


class Clock(Protocol):
    """The virtual clock of a rank, in seconds."""

    now: float


class KernelSeconds(NamedTuple):
    """The time of kernels, in seconds per value.

    Attributes
    ----------
    encode, decode, accumulate, recode : float
        Seconds to encode; to decode; to decode and add; to decode, add and encode again.
    """

    encode: float = 0.0
    decode: float = 0.0
    accumulate: float = 0.0
    recode: float = 0.0


class SizesCoder:
    """A coder that only advances the clock (the contract is `compcoll.codecs.base.Coder`).

    Each term beyond the first two takes the time of ``accumulate``.

    Parameters
    ----------
    clock : Clock
        The clock of the rank that encodes and decodes.
    wire_nbytes : callable
        Returns the bytes of a wire for a number of values.
    seconds : KernelSeconds
        Seconds per value.

    Attributes
    ----------
    encode_seconds, decode_seconds : float
        Virtual time spent so far.
    """

    fixed_size = True
    knows_decoded = False

    def __init__(self, clock: Clock, wire_nbytes: Callable[[int], int], seconds: KernelSeconds) -> None:
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0
        self._clock = clock
        self._length = wire_nbytes
        self._known: dict[int, int] = {}
        self._encode, self._decode, self._accumulate, self._recode = seconds

    def wire_nbytes(self, n: int) -> int:
        if n not in self._known:
            self._known[n] = self._length(n)
        return self._known[n]

    def encode(self, n: int, add: Array | None, wires: Sequence[Array], wire: Array, how: EncodeOptions = PLAIN) -> int:
        terms = len(wires) + (add is not None)
        seconds = n * (self._encode if terms == 1 else self._recode + (terms - 2) * self._accumulate)
        self._clock.now += seconds
        self.encode_seconds += seconds
        return self.wire_nbytes(n)

    def decode(self, n: int, add: Array | None, wires: Sequence[Array], out: Array, *, scale: float = 1.0) -> None:
        terms = len(wires) + (add is not None)
        seconds = n * (self._decode if terms == 1 else (terms - 1) * self._accumulate)
        self._clock.now += seconds
        self.decode_seconds += seconds
