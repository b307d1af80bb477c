"""onebit in NumPy: signs, and the mean of the values of each sign."""

from __future__ import annotations

import numpy as np
from oracles.codecs import Reference, alike, block_of, quantizer_bounds
from oracles.quantizers import Coded, by_blocks, fixed_point, largest, packed

from compcoll import OneBit


def signs_of(x: np.ndarray, block: int, reconstructions: int) -> Coded:
    """Send signs and the mean of each sign, or one mean magnitude for both."""
    real = x.dtype.type

    def one(part: np.ndarray, begin: int) -> Coded:
        kind, exponent = largest(part)
        signs = np.signbit(part)
        if kind != "finite":
            means = (real(np.nan if kind == "nan" else 0),) * 2
            signs = np.zeros_like(signs)
        else:
            q = fixed_point(part, exponent)
            sums = (q[~signs].sum(), q[signs].sum())
            if reconstructions == 1:
                quotients = [float(sums[0] - sums[1]) / part.size]
                quotients.append(-quotients[0])
            else:
                counts = (np.count_nonzero(~signs), np.count_nonzero(signs))
                quotients = [float(s) / float(c) if c else 0.0 for s, c in zip(sums, counts)]
            means = tuple(real(value) * real(2.0 ** (exponent - 20)) for value in quotients)
        header = b"".join(mean.tobytes() for mean in means[:reconstructions])
        return header + packed(signs.astype(np.int64), 1), np.where(signs, means[1], means[0]).astype(real)

    return by_blocks(x, block, one)


def formula(codec: OneBit, x: np.ndarray, rng_counter: int, position: int) -> Coded:
    return signs_of(x, codec.block, 2)


REFERENCE = Reference(
    options={"block": block_of(2048, 1 << 16)},
    formula=formula,
    bounds={OneBit(block=64): quantizer_bounds(64, 1.0)},
    estimates={OneBit(): alike(0.60281)},
    instructions={
        OneBit(): {"encode": (17, 1.05), "accumulate": (11, 1.05), "recode": (25, 1.05), "feedback": (37.5, 1.05)},
    },
)
