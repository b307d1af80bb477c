"""Memory for wires: pieces do not overlap, and what is kept is not much more than what is needed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compcoll.host.arena import Arena

LENGTHS = st.lists(st.integers(0, 1000), max_size=30)


class Memory:
    """Allocates, and knows how much."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, nbytes: int) -> np.ndarray:
        self.nbytes += nbytes
        return np.zeros(nbytes, np.uint8)


def taken(arena: Arena, lengths: list[int]) -> None:
    """Take pieces, and see that each is there for itself."""
    pieces = [arena.allocate(length) for length in lengths]
    for number, piece in enumerate(pieces):
        piece[:] = number
    for number, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
        assert piece.nbytes == length and (piece == number).all()


@given(st.lists(LENGTHS, max_size=5))
def test_rewound_arenas_allocate_for_the_largest(rounds: list[list[int]]) -> None:
    memory = Memory()
    arena = Arena(memory)
    for lengths in rounds:
        taken(arena, lengths)
        arena.rewind()
    needed = [sum(length + 63 for length in lengths) for lengths in rounds]
    assert memory.nbytes <= 4 * max(needed, default=0)
    before = memory.nbytes
    for lengths in rounds:
        taken(arena, lengths)
        arena.rewind()
    assert memory.nbytes == before


@given(LENGTHS)
def test_reset_arenas_hold_what_was_taken(lengths: list[int]) -> None:
    memory = Memory()
    arena = Arena(memory)
    taken(arena, lengths)
    arena.reset()
    before = memory.nbytes
    whole = sum(-(-length // 64) * 64 for length in lengths)
    arena.allocate(whole)  # of one slab
    arena.reset()
    taken(arena, lengths)
    assert memory.nbytes == before
