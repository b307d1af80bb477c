"""cast: tests/codecs/test_cast_and_minmax.py compares all 16-bit floats with NumPy's."""

from __future__ import annotations

from oracles.codecs import ROUNDING, Option, Reference, alike

from compcoll import Cast
from compcoll.codecs.base import ErrorBound

HALF, BRAIN = ErrorBound(1, 2.0**-11, 0.0, 2.0**-25), ErrorBound(1, 2.0**-8, 0.0, 2.0**-134)
SINGLE = ErrorBound(1, 2.0**-24, 0.0, 2.0**-150)

REFERENCE = Reference(
    options={"dtype": Option("float16", ("float16", "bfloat16", "float32", "float64"), (8, 0.5))},
    formula=None,
    bounds={
        Cast("float16"): (HALF, HALF),
        Cast("bfloat16"): (BRAIN, BRAIN),
        Cast("float32"): (ErrorBound(), SINGLE),
        Cast("float64"): (ErrorBound(), ErrorBound()),
    },
    estimates={
        Cast("float16"): alike(ROUNDING * 2.0**-11),
        Cast("bfloat16"): alike(ROUNDING * 2.0**-8),
        Cast("float32"): (0.0, ROUNDING * 2.0**-24),
    },
    instructions={
        Cast(): {"encode": (9.5, 1.05), "accumulate": (12, 1.05), "recode": (16, 1.05), "feedback": (30, 1.05)},
        Cast("bfloat16"): {
            "encode": (9.8, 1.05),
            "accumulate": (11, 1.05),
            "recode": (15, 1.05),
            "feedback": (28, 1.05),
        },
    },
)
