"""intsum has no wires and no errors of its own: tests/codecs/test_additive.py compares sums."""

from __future__ import annotations

from oracles.codecs import Option, Reference, block_of

REFERENCE = Reference(
    options={"bits": Option(16, (8, 16, 32), (4, 64, 0.5)), "block": block_of(2048)},
    formula=None,
    bounds={},
    estimates={},
)
