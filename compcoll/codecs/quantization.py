"""Errors of rounding: formulas shared by the quantizers' error estimates and bounds."""

from __future__ import annotations

import math
from statistics import NormalDist

from ..dtypes import computed_on
from .base import ErrorBound


def quantizer_bound(block: int, of_largest: float, dtype: str) -> ErrorBound:
    """Return the error bound of a quantizer with an error of at most ``of_largest`` times a block's largest magnitude.

    Blocks with all values below 2**-80 (float64: 2**-900) are sent as zeros.
    """
    tiny = 2.0**-900 if dtype == "float64" else 2.0**-80
    return ErrorBound(block, of_largest + 4 * computed_on(dtype).rounding, absolute=2 * tiny)


def largest_of(n: int) -> float:
    """Return about the largest of n normal values of variance 1: ``Φ⁻¹((n - 3/8) / (n + 1/4))``.

    For the largest of n magnitudes, pass 2 n.

    References
    ----------
    G. Blom, "Statistical Estimates and Transformed Beta-Variables", 1958.
    """
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def float_rounding(half_unit: float) -> float:
    """Return the RMS error of rounding normal values of variance 1 to floating point.

    A value x is rounded to multiples of ``2 u 2**⌊log2 |x|⌋``, with the error ``u 2**⌊log2 |x|⌋ / √3``. The mean of
    ``4**⌊log2 |x|⌋`` over normal x is 0.54286.

    Parameters
    ----------
    half_unit : float
        u, half the distance from 1 to the next number.
    """
    return half_unit * math.sqrt(0.54286 / 3)


def rounding_error(step: float, *, zero: bool, stochastic: bool) -> float:
    """Return the RMS error of rounding normal values of variance 1 to multiples of a step.

    If a value lies at the fraction f between two levels, stochastic rounding has the squared error ``s² f (1 - f)``,
    rounding to nearest ``s² min(f, 1 - f)²``. Their Fourier series in f and the mean ``exp(-2 π² k² / s²)`` of
    ``cos(2 π k x / s)`` over normal x give ``s² (1/6 - Σ …/(π k)²)`` and ``s² (1/12 + Σ (-1)^k …/(π k)²)``.

    Parameters
    ----------
    step : float
        Distance between neighbouring levels.
    zero : bool
        Whether 0 is a level; else it is halfway between two levels.
    stochastic : bool
        Whether rounding is stochastic and unbiased, else to nearest.
    """
    total = 1 / 6 if stochastic else 1 / 12
    for k in range(1, math.ceil(2 * step) + 2):
        sign = (1 if zero else (-1) ** k) * (-1 if stochastic else (-1) ** k)
        total += sign * math.exp(-2 * (math.pi * k / step) ** 2) / (math.pi * k) ** 2
    return step * math.sqrt(max(total, 0.0))
