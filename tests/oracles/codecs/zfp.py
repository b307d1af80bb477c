"""zfp: tests/codecs/test_zfp.py compares its streams with zfpy's."""

from __future__ import annotations

import math

from oracles.codecs import Option, Reference, alike

from compcoll import ZFP
from compcoll.codecs.base import ErrorBound


def of_planes(single: int, double: int) -> tuple[ErrorBound, ErrorBound]:
    """Return the bounds if this many bit planes of a block are sent."""
    return (
        ErrorBound(4, 20 * 2.0**-single + 2.0**-25, 0.0, 2.0**-98),
        ErrorBound(4, 20 * 2.0**-double + 2.0**-57, 0.0, 2.0**-962),
    )


REFERENCE = Reference(
    options={
        "rate": Option(None, (math.nextafter(2, 3), 64), (2, math.nextafter(64, 65), math.inf)),
        "tolerance": Option(None, (5e-324, 1.7e308), (0, math.inf)),
        "precision": Option(None, (1, 64), (0, 65)),
        "lossless": Option(False, (False, True), (8, 0.5)),
    },
    formula=None,
    # Of 4 · rate bits 9 or 12 are the exponent's; k planes take 4 k + 3 at most.
    bounds={
        ZFP(rate=3): of_planes(0, 0),
        ZFP(rate=4): of_planes(1, 0),
        ZFP(rate=8): of_planes(5, 4),
        ZFP(rate=10): of_planes(7, 6),
        ZFP(rate=10.75): of_planes(7, 7),
        ZFP(rate=11): of_planes(8, 7),
        ZFP(rate=16): of_planes(13, 12),
        ZFP(rate=32): of_planes(29, 28),
        ZFP(precision=16): of_planes(16, 16),
        ZFP(tolerance=1e-3): (ErrorBound(4, 4 * 2.0**-24, 0.0, 1e-3), ErrorBound(4, 4 * 2.0**-53, 0.0, 1e-3)),
        ZFP(lossless=True): (ErrorBound(), ErrorBound()),
    },
    # Half as much for every bit; of float64, three bits of each four values more are the exponent's.
    estimates={
        ZFP(rate=2.25): alike(1.0),
        **{ZFP(rate=rate): (5.5e-2 * 2.0 ** (8 - rate), 5.5e-2 * 2.0 ** (8.75 - rate)) for rate in (6, 8, 10, 16)},
        ZFP(rate=32): (2.0**-24, 5.5e-2 * 2.0**-23.25),
        ZFP(rate=64): (2.0**-24, 2.0**-53),
        ZFP(lossless=True): (0.0, 0.0),
        ZFP(precision=8): (None, None),
    },
    instructions={
        ZFP(rate=8): {"encode": (38, 1.08), "accumulate": (52, 1.05), "recode": (88, 1.13), "feedback": (100, 1.06)},
        ZFP(rate=16): {"encode": (49, 1.07), "accumulate": (67, 1.05), "recode": (114, 1.1), "feedback": (125, 1.06)},
    },
)
