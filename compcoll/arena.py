"""Memory for wires, kept from one collective to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ALIGNMENT = 64


class Arena:
    """One slab cut from front to back; what does not fit is allocated beside it, and the next slab is large enough."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._slab = allocate(0)
        self._used = 0
        self._beside: list[Any] = []

    def take(self, nbytes: int) -> Any:
        """Memory of ``nbytes`` bytes, until `reset`."""
        begin = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._used > self._slab.nbytes:
            self._beside.append(memory := self._allocate(nbytes))  # kernels may need it longer than who took it
            return memory
        return self._slab[begin : begin + nbytes]

    def reset(self) -> None:
        """Everything taken is free again."""
        if self._used > self._slab.nbytes:
            self._slab = self._allocate(self._used)
            self._beside.clear()
        self._used = 0


class ArenaPool:
    """As many arenas as there have been collectives in flight at once on this rank."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._free: list[Arena] = []

    def acquire(self) -> Arena:
        return self._free.pop() if self._free else Arena(self._allocate)

    def release(self, arena: Arena) -> None:
        arena.reset()
        self._free.append(arena)
