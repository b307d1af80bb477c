"""szp: tests/codecs/test_szp.py has its wires in NumPy."""

from __future__ import annotations

from oracles.codecs import Option, Reference

from compcoll import SZP
from compcoll.codecs.base import ErrorBound

REFERENCE = Reference(
    options={
        "tolerance": Option(None, (5e-324, 1.7e308), (0, -1.0, float("inf"), float("nan"))),
        "relative": Option(None, (5e-324, 1), (0, 1.1)),
    },
    formula=None,
    bounds={
        SZP(tolerance=1e-3): (ErrorBound(1, 2.0**-24, 0.0, 1e-3), ErrorBound(1, 2.0**-53, 0.0, 1e-3)),
        SZP(): (ErrorBound(1 << 40, 1e-3 + 2.0**-24), ErrorBound(1 << 40, 1e-3 + 2.0**-53)),
    },
    estimates={SZP(): (None, None), SZP(tolerance=1): (None, None)},
)
