"""sign with a scale, in NumPy: signs, and the mean magnitude. tests/codecs/test_additive.py has votes."""

from __future__ import annotations

import numpy as np
from oracles.codecs import Option, Reference, alike, block_of, quantizer_bounds
from oracles.codecs.onebit import signs_of
from oracles.quantizers import Coded

from compcoll import Sign


def formula(codec: Sign, x: np.ndarray, rng_counter: int, position: int) -> Coded:
    return signs_of(x, codec.block, 1)


REFERENCE = Reference(
    options={"scale": Option(None, (None, "mean"), (8, 0.5)), "block": block_of(2048, 1 << 16)},
    formula=formula,
    bounds={Sign("mean", block=64): quantizer_bounds(64, 1.0)},
    estimates={Sign("mean"): alike(0.60281)},
)
