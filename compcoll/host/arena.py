"""Memory for wires, kept from one collective to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ALIGNMENT = 64


class Arena:
    """Slabs cut from front to back, each as large as all before it: large pieces of memory come in large pages.

    Attributes
    ----------
    slabs : list of array
        The pieces.
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self.slabs: list[Any] = []  # kernels may need memory longer than who took it
        self._taken: list[int] = []
        self._nbytes = 0

    def allocate(self, nbytes: int) -> Any:
        """Memory of ``nbytes`` bytes, until `rewind` or `reset`."""
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
        """Everything taken may be taken again."""
        self._taken = [0] * len(self.slabs)

    def reset(self) -> None:
        """Everything taken is free again; as much fits into one slab from now on."""
        if len(self.slabs) > 1:
            self.slabs = [self._allocate(sum(self._taken))]
            self._nbytes = self.slabs[0].nbytes
        self.rewind()
