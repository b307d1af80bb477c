"""Memory for wires that is reused from one collective to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ALIGNMENT = 64


class Arena:
    """An allocator that cuts memory from large slabs. Each new slab is at least as large as all before it together.

    The operating system gives large pages to large slabs.

    Parameters
    ----------
    allocate : callable
        Takes a number of bytes and returns new memory.

    Attributes
    ----------
    slabs : list of array
        The slabs.
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self.slabs: list[Any] = []  # public, so that other objects can keep the memory alive for kernels
        self._taken: list[int] = []
        self._nbytes = 0

    def allocate(self, nbytes: int) -> Any:
        """Allocate ``nbytes`` bytes, valid until `rewind` or `reset`."""
        length = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for index, slab in enumerate(self.slabs):
            if self._taken[index] + length <= slab.nbytes:
                break
        else:
            index = len(self.slabs)
            self.slabs.append(self._allocate(max(length, self._nbytes)))
            self._nbytes += self.slabs[-1].nbytes
            self._taken.append(0)
        begin = self._taken[index]
        self._taken[index] = begin + length
        return self.slabs[index][begin : begin + nbytes]

    def rewind(self) -> None:
        """Free everything that was allocated."""
        self._taken = [0] * len(self.slabs)

    def reset(self) -> None:
        """Free everything that was allocated. Replace several slabs by one, in which all of it would have fit."""
        if len(self.slabs) > 1:
            self.slabs = [self._allocate(sum(self._taken))]
            self._nbytes = self.slabs[0].nbytes
        self.rewind()
