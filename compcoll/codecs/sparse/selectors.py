"""Ways to find the k largest magnitudes of a buffer, exactly or about.

All of them return indices, ascending: never fewer than k where k values are not zero, never a zero, and always every
value that is not finite. Where a threshold cannot be found (many equal values), the exact choice takes over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

from ..base import Array
from .sparsifier import Selection

_SAMPLE = 16384  # values of a long buffer in which thresholds are tried before they are in all
_PART = 128  # of a longer one, a sample is this part
_WHOLE = 4096  # values that are not worth a sample
_RUN = 16  # values next to each other in a sample
_MIDDLE = 1.2  # of what is accepted, in units of k
_FEWEST = 8  # elements of a sample that shall be above a threshold, else it tells too little
_ENOUGH = 128  # of them, beyond which a longer sample costs more than it saves
_ROOM = 1 << 17  # indices, beyond which fresh memory costs more than another pass
_NARROW = 1e-6  # of the largest magnitude: an interval in which no further threshold is tried

_NORMAL = NormalDist()

Selector = Callable[[Selection, Array, int], Array]


def exact(kernels: Selection, values: Array, k: int) -> Array:
    """The indices of the k largest magnitudes.

    The threshold of a sample is a lower bound of the true one, nearly always; one pass collects what is above, and the
    choice is made among that. Too few: the bound is lowered, and the pass repeated.
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
    """Choose from k to 2k by the threshold of a sample of 1 %; where too many are above, the k largest of them.

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
    """The k largest: a threshold falls from the largest magnitude towards the mean until k are above, and the choice
    is made among them.

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
    """Choose from k to 2k: a threshold between mean and largest magnitude is found by bisection.

    RedSync, as `trimmed`, algorithm 3.
    """
    mean, largest = _mean_and_largest(kernels, values)
    return _searched(kernels, values, k, 2 * k, mean, largest, (mean + largest) / 2)


def ldte(kernels: Selection, values: Array, k: int) -> Array:
    """Choose k to 1.5 k, by LDTE-BS: the threshold that a Laplacian distribution of the same mean and variance would
    have, then bisection. The estimate is made for the middle of what is accepted; a normal distribution's threshold is
    tried before bisection, too, and first where the mean magnitude says that the tail is lighter.

    Of longer buffers the moments are a sample's, and of long ones the first trials, too, for about twice as many as
    wanted: a threshold that is too low costs little, since the search goes on among what one pass over everything has
    collected.
    """
    n, most = values.size, max(3 * k // 2, k + 1)
    if n <= 16 * _SAMPLE:
        # Beyond a length half of the time goes into moments; a part tells them well enough for the first trial.
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
    # The largest of the sample may not be everybody's.
    return _searched(kernels, values, k, most, mean, 4 * max(largest, threshold), threshold, scale, second)


def _laplacian(kernels: Selection, values: Array, m: int, density: float) -> tuple[float, float, float, float, float]:
    """Estimate like `Selection.laplacian`: threshold, mean, largest, scale of the tail, second threshold."""
    return kernels.laplacian(values, m, density, _NORMAL.inv_cdf(1 - density / 2))


def _mean_and_largest(kernels: Selection, values: Array) -> tuple[float, float]:
    _, magnitudes, _, largest = kernels.moments(values)
    return min(magnitudes / values.size, largest), largest


def _sampled(n: int, k: int) -> int:
    """Length of a sample of n values, to find k of them."""
    return max(min(n // 8, max(_SAMPLE, n // _PART), _ENOUGH * n // max(k, 1)), _RUN) // _RUN * _RUN


def _room(values: Array, k: int) -> int:
    n = int(values.size)
    return min(n, max(4 * k, min(n // 16, _ROOM)))


def _collect(kernels: Selection, values: Array, threshold: float, k: int) -> Array | None:
    """The indices of all above a threshold, if they are at least k."""
    found, count = kernels.above(values, threshold, _room(values, k))
    if found is None:
        found, count = kernels.above(values, threshold, count)
    return found if count >= k else None


def _largest_of(kernels: Selection, values: Array, indices: Array, k: int) -> Array:
    """The indices of the k largest magnitudes among some."""
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
    """Choose from k to ``most``, by bisection; once what is above the lower end has been collected, only among that.

    Where a count is known, the next trial goes by the fit's exponential tail.
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


# The selectors, by the names that `TopK` takes.
SELECTORS: Mapping[str, Selector] = {
    "exact": exact,
    "hierarchical": hierarchical,
    "trimmed": trimmed,
    "bisection": bisection,
    "ldte": ldte,
}
