"""terngrad: qsgd with 2 bits."""

from __future__ import annotations

import numpy as np
from oracles.codecs import Reference, alike, block_of, quantizer_bounds
from oracles.codecs.qsgd import SEED, quantized
from oracles.quantizers import Coded, random16

from compcoll import TernGrad


def formula(codec: TernGrad, x: np.ndarray, rng_counter: int, position: int) -> Coded:
    return quantized(x, 2, codec.block, "max", random16(x.size, codec.seed, rng_counter, position))


REFERENCE = Reference(
    options={"block": block_of(2048), "seed": SEED},
    formula=formula,
    bounds={TernGrad(block=64): quantizer_bounds(64, 1.0)},
    estimates={TernGrad(block=64): alike(1.038352)},
)
