"""Selectors: search methods for the k largest magnitudes of a buffer, exact or approximate.

All return ascending indices: at least k unless fewer than k values are nonzero, never of a zero, and always of all
values that are not finite. If no threshold is found, as with many equal values, the exact selection is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

from ..base import Array
from .sparsifier import Selection

_SAMPLE = 16384  # values in the sample of a long buffer, on which thresholds are tried first
_PART = 128  # of a longer buffer, the sample has 1/128 of the values
_WHOLE = 4096  # up to this many values no sample is taken
_RUN = 16  # consecutive values in a sample
_MIDDLE = 1.2  # number of elements to aim at, in units of k
_FEWEST = 8  # elements of a sample that a reliable threshold should have above it
_ENOUGH = 128  # number of such elements beyond which a longer sample costs more than it saves
_ROOM = 1 << 17  # indices beyond which fresh memory costs more than another pass
_NARROW = 1e-6  # smallest interval of thresholds to search, in units of the largest magnitude

_NORMAL = NormalDist()

Selector = Callable[[Selection, Array, int], Array]


def exact(kernels: Selection, values: Array, k: int) -> Array:
    """Return the indices of the k largest magnitudes.

    A sample gives a threshold that is nearly always below the true one. One pass collects all values above it, and the
    k largest are selected among them. If they are fewer than k, the threshold is lowered and the pass repeated.
    """
    n = values.size
    if n > _WHOLE and k < n // 2:
        sampled = kernels.sample(values, _sampled(n, k))
        expected = k * sampled.size / n
        rank = int(expected + 5 * math.sqrt(expected) + _RUN // 2)
        threshold, _, largest, _, second = _laplacian(kernels, sampled, sampled.size, 1.1 * rank / sampled.size)
        while rank < sampled.size:
            bound = kernels.bisected(sampled, rank, rank + rank // 4 + 2, 0.0, largest, threshold, second)
            bound = kernels.kth_largest(sampled, rank) if bound is None else bound
            found = _collect(kernels, values, bound, k)
            if found is not None:
                return _largest_of(kernels, values, found, k)
            rank, threshold = 2 * rank, bound / 2
    return kernels.largest(values, k)


def hierarchical(kernels: Selection, values: Array, k: int) -> Array:
    """Select k to 2k elements by the threshold of a 1 % sample; if more are above it, the k largest of them.

    Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR
    2018, section 3.1 and appendix.
    """
    n = values.size
    m = max(n // 100, 1024) // _RUN * _RUN
    if m >= n:
        return kernels.largest(values, k)
    sampled = kernels.sample(values, m)
    rank = math.ceil(k * m / n)
    while rank < m:
        found = _collect(kernels, values, kernels.kth_largest(sampled, rank), k)
        if found is not None:
            return found if found.size <= 2 * k else _largest_of(kernels, values, found, k)
        rank *= 2
    return kernels.largest(values, k)


def trimmed(kernels: Selection, values: Array, k: int) -> Array:
    """Select the k largest elements: lower a threshold from the largest magnitude to the mean until k are above it.

    J. Fang et al., "RedSync: Reducing synchronization bandwidth for distributed deep learning training system", JPDC
    133, 2019, algorithm 2.
    """
    mean, largest = _mean_and_largest(kernels, values)
    for ratio in (0.8, 0.6, 0.4, 0.2, 0.0):
        found = _collect(kernels, values, mean + ratio * (largest - mean), k)
        if found is not None:
            return _largest_of(kernels, values, found, k)
    return kernels.largest(values, k)


def bisection(kernels: Selection, values: Array, k: int) -> Array:
    """Select k to 2k elements by bisection for a threshold between mean and largest magnitude.

    Algorithm 3 of RedSync, see `trimmed`.
    """
    mean, largest = _mean_and_largest(kernels, values)
    return _searched(kernels, values, k, 2 * k, mean, largest, (mean + largest) / 2)


def ldte(kernels: Selection, values: Array, k: int) -> Array:
    """Select k to 1.5 k elements by LDTE-BS: the threshold of a fitted Laplacian distribution, then bisection.

    The estimate aims at 1.2 k elements. The threshold of a normal distribution is tried before bisection, too; it comes
    first if the mean magnitude indicates a lighter tail.

    Longer buffers take the moments from a sample. Very long buffers also try the first thresholds on a sample and aim
    at about twice as many elements: too low a threshold costs little, since the search continues among the elements
    that one pass has collected.
    """
    n, most = values.size, max(3 * k // 2, k + 1)
    if n <= 16 * _SAMPLE:
        # For longer buffers moments take half of the time; those of a sample are good enough for the first trial.
        m = n if n <= _SAMPLE else n // 32 // _RUN * _RUN
        threshold, mean, largest, scale, second = _laplacian(kernels, values, m, _MIDDLE * k / n)
        tail = largest if m == n else 4 * max(largest, threshold)
        return _searched(kernels, values, k, most, mean, tail, threshold, scale, second)
    sampled = kernels.sample(values, _sampled(n, k))
    expected = k * sampled.size / n
    deviation = math.sqrt(expected)
    threshold, mean, largest, scale, second = _laplacian(
        kernels, sampled, sampled.size, min((expected + 4 * deviation) / sampled.size, 1.0)
    )
    if expected >= _FEWEST:
        low, high = expected + 2 * deviation, expected + 6 * deviation
        tried = kernels.bisected(sampled, low, high, mean, largest, threshold, second)
        threshold = threshold if tried is None else tried
    # The buffer's largest magnitude may exceed the sample's, hence the factor 4.
    return _searched(kernels, values, k, most, mean, 4 * max(largest, threshold), threshold, scale, second)


def _laplacian(kernels: Selection, values: Array, m: int, density: float) -> tuple[float, float, float, float, float]:
    """Call `Selection.laplacian` on a sample of m values, and return its results."""
    return kernels.laplacian(values, m, density, _NORMAL.inv_cdf(1 - density / 2))


def _mean_and_largest(kernels: Selection, values: Array) -> tuple[float, float]:
    _, magnitudes, _, largest = kernels.moments(values)
    return min(magnitudes / values.size, largest), largest


def _sampled(n: int, k: int) -> int:
    """Return the length of the sample of n values that is used to find the k largest."""
    return max(min(n // 8, max(_SAMPLE, n // _PART), _ENOUGH * n // max(k, 1)), _RUN) // _RUN * _RUN


def _room(values: Array, k: int) -> int:
    n = int(values.size)
    return min(n, max(4 * k, min(n // 16, _ROOM)))


def _collect(kernels: Selection, values: Array, threshold: float, k: int) -> Array | None:
    """Return the indices of all values above a threshold; None if they are fewer than k."""
    found, count = kernels.above(values, threshold, _room(values, k))
    if found is None:
        found, count = kernels.above(values, threshold, count)
    return found if count >= k else None


def _largest_of(kernels: Selection, values: Array, indices: Array, k: int) -> Array:
    """Return the indices of the k largest magnitudes among those at ``indices``."""
    return kernels.take(indices, kernels.largest(kernels.take(values, indices), k))


def _searched(
    kernels: Selection,
    values: Array,
    k: int,
    most: int,
    head: float,
    tail: float,
    threshold: float,
    scale: float = 0.0,
    second: float = 0.0,
) -> Array:
    """Select k to ``most`` elements by bisection between the thresholds ``head`` and ``tail``.

    Once the elements above a threshold have been collected, the search continues only among them. If the number above
    a threshold is known, the exponential tail of the fit gives the next threshold.
    """
    narrow, room, aim = _NARROW * tail, _room(values, k), _MIDDLE * k
    while tail - head > narrow:
        found, above = kernels.chosen(values, (k, most, threshold, tail, scale, aim), room)
        if found is not None:
            return found if found.size <= most else _largest_of(kernels, values, found, k)
        if above < k:
            tail = threshold
            second = threshold + scale * math.log(above / aim) if above else second
        else:
            head = threshold
        threshold, second = second if head < second < tail else (head + tail) / 2, 0.0
    return exact(kernels, values, k)


# The selectors by name, as in `TopK`'s option ``select``.
SELECTORS: Mapping[str, Selector] = {
    "exact": exact,
    "hierarchical": hierarchical,
    "trimmed": trimmed,
    "bisection": bisection,
    "ldte": ldte,
}
