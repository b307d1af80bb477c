"""The sparsifiers: their options, and how they select elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import InvalidArgument
from ...feedback import ErrorFeedback
from ..base import Array, ErrorBound, Example
from ..options import Integers, OneOf, Reals, option
from .feedback import VarianceFeedback
from .selectors import SELECTORS
from .sparsifier import POWER, SIGN, Choice, Selection, Sparsifier

_DENSITY = Reals(0, 1)
_ABOVE_ZERO = Reals(0)


def _all_above(kernels: Selection, values: Array, threshold: float) -> Array:
    indices, count = kernels.above(values, threshold, values.size // 16)
    if indices is None:
        indices, _ = kernels.above(values, threshold, count)
    return indices


def _wanted(density: float, n: int) -> int:
    return min(math.ceil(density * n), n)


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Send the elements of largest magnitude: ``k = ceil(density · n)`` of n, or more, depending on ``select``.

    At least k are sent unless fewer than k are nonzero. Elements that are not finite are always sent.

    Parameters
    ----------
    density : float
        The fraction of the elements to send, above 0 and at most 1.
    select : {"exact", "ldte", "hierarchical", "trimmed", "bisection"}
        The search method: exactly k with ``"exact"`` and ``"trimmed"``, up to 1.5 k with ``"ldte"``, up to 2 k with
        ``"hierarchical"`` (DGC's sampling) and ``"bisection"``.
    wire : {"auto", "pairs", "packed", "runs", "mask"}
        Format of the indices; by default the shortest. ``"packed"`` rounds to powers of two: 4 bits of value and 28
        bits of index. Elements below 2**-7 of the largest power stay in the residual, and buffers of more than 2**28
        elements use another format.
    out_format : {"dense", "sparse"}
        Result of an allreduce: an array like the input, or a `SparseSum`.

    References
    ----------
    See `compcoll.codecs.sparse.selectors`.

    Examples
    --------
    >>> x, feedback = np.arange(-4, 4, dtype=np.float32), compcoll.ErrorFeedback()
    >>> compcoll.allreduce(x, op="mean", codec="topk", density=0.25, select="exact", feedback=feedback)
    array([-4., -3.,  0.,  0.,  0.,  0.,  0.,  0.], dtype=float32)
    """

    density: float = option(0.01, _DENSITY, "the part of the elements to send")
    select: str = option("ldte", OneOf(tuple(SELECTORS)), "how they are found")

    name: ClassVar[str] = "topk"
    largest_first: ClassVar[bool] = True
    examples = (
        Example({}),
        Example({"density": 0.05, "select": "exact"}),
        Example({"density": 0.3, "select": "hierarchical", "wire": "runs"}),
        Example({"density": 1.0, "select": "trimmed"}),
        Example({"density": 0.1, "select": "bisection", "wire": "packed"}),
    )

    @property
    def label(self) -> str:
        return f"topk {self.density:g} {self.select}"

    def error_bound(self, dtype: str) -> ErrorBound:
        """Return the whole value as bound, since an element may not be sent."""
        return ErrorBound(relative=1.0)

    def choose(self, kernels: Selection, values: Array, feedback: ErrorFeedback | None) -> Choice:
        k = _wanted(self.density, values.size)
        return Choice(SELECTORS[self.select if k else "exact"](kernels, values, k))


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Send ``ceil(density · n)`` random elements, the same on all ranks, and all elements that are not finite.

    Sent values are not scaled up, so sums are biased unless feedback keeps the residual. The selection depends on the
    seed and the feedback's number of calls. Without feedback every call with the same seed selects the same elements.

    Parameters
    ----------
    density : float
        The fraction of the elements to send, above 0 and at most 1.
    seed : int
        Seed of the random numbers, 0 to 2**32 - 1.
    wire, out_format
        See `TopK`.

    Examples
    --------
    >>> x, feedback = np.ones(100, np.float32), compcoll.ErrorFeedback()
    >>> int(compcoll.allreduce(x, op="mean", codec="randomk", density=0.05, feedback=feedback).sum())
    5
    """

    density: float = option(0.01, _DENSITY, "the part of the elements to send")
    seed: int = option(0, Integers(0, (1 << 32) - 1), "of random numbers")

    name: ClassVar[str] = "randomk"
    examples = (Example({"density": 0.1, "seed": 3, "wire": "mask"}),)

    def choose(self, kernels: Selection, values: Array, feedback: ErrorFeedback | None) -> Choice:
        n = values.size
        calls = 0 if feedback is None else feedback.calls
        indices = kernels.random(n, _wanted(self.density, n), self.seed << 32 | calls & 0xFFFFFFFF)
        return Choice(kernels.union(indices, _all_above(kernels, values, math.inf)))


@dataclass(frozen=True)
class Strom(Sparsifier):
    """Send every element above a fixed threshold as plus or minus the threshold. The rest stays in the residual.

    If some selected element is not finite, all selected elements are sent with full values.

    Parameters
    ----------
    threshold : float
        τ in the paper, in the unit of the values; for a mean, of the values divided by the number of ranks.
    wire, out_format
        See `TopK`; ``"packed"`` is not possible.

    References
    ----------
    N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.

    Examples
    --------
    >>> x, feedback = np.array([0.5, 3, -2], np.float32), compcoll.ErrorFeedback()
    >>> compcoll.allreduce(x, op="mean", codec="strom", threshold=1, feedback=feedback)
    array([ 0.,  1., -1.], dtype=float32)
    """

    threshold: float = option(1e-3, _ABOVE_ZERO, "what is sent, and from which magnitude on")

    name: ClassVar[str] = "strom"
    examples = (Example({"threshold": 1.0}), Example({"threshold": 100.0}))
    value_format: ClassVar[int] = SIGN

    def choose(self, kernels: Selection, values: Array, feedback: ErrorFeedback | None) -> Choice:
        return Choice(_all_above(kernels, values, self.threshold), self.threshold)


class _NeedsVariance(Sparsifier):
    """A sparsifier that uses second moments."""

    state: ClassVar[type[ErrorFeedback]] = VarianceFeedback

    def check_call(self, feedback: ErrorFeedback | None, out: Any) -> None:
        super().check_call(feedback, out)
        if not isinstance(feedback, VarianceFeedback):
            raise InvalidArgument(
                f"{self.name} decides by second moments: feedback={feedback!r} must be a "
                "compcoll.sparse.VarianceFeedback that has observed them"
            )


def _variance(kernels: Selection, values: Array, feedback: ErrorFeedback | None) -> Array:
    """Return the feedback's second moments; zeros for an encoding without feedback."""
    return feedback.variance if isinstance(feedback, VarianceFeedback) else kernels.zeros(values.size)


@dataclass(frozen=True)
class Variance(_NeedsVariance):
    """Send only unambiguous elements: those with ``r² > alpha · v``, for accumulated means r and second moments v.

    Needs a `VarianceFeedback`, which keeps r and v. Values are sent as powers of two in 4 bits: from the power of the
    largest magnitude in the whole buffer, sent or not, down to 2**-7 of it. Smaller elements stay for a later call. If
    some selected element is not finite, full values are sent.

    Parameters
    ----------
    alpha : float
        Usually 1 to 2; larger values send fewer elements.
    zeta : float
        Factor, 0 to 1, by which v decays in each call at elements that are not sent.
    wire, out_format
        See `TopK`.

    References
    ----------
    Y. Tsuzuku, H. Imachi, T. Akiba, "Variance-based Gradient Compression for Efficient Distributed Deep Learning",
    ICLR 2018 workshop.

    Examples
    --------
    >>> x, feedback = np.array([4, 0.5], np.float32), compcoll.sparse.VarianceFeedback()
    >>> feedback.observe(np.ones(2, np.float32))  # second moments of single samples
    >>> compcoll.allreduce(x, op="mean", codec="variance", feedback=feedback)
    array([4., 0.], dtype=float32)
    """

    alpha: float = option(1.5, _ABOVE_ZERO, "r² over v from which on an element is sent")
    zeta: float = option(0.999, Reals(0, 1, closed=True), "decay of v where nothing is sent")

    name: ClassVar[str] = "variance"
    conserves = "none"  # values become powers of two, and the difference is dropped, as in the paper
    value_format: ClassVar[int] = POWER

    def choose(self, kernels: Selection, values: Array, feedback: ErrorFeedback | None) -> Choice:
        indices = kernels.unambiguous(values, _variance(kernels, values, feedback), self.alpha, 0.0)
        return Choice(indices, largest=kernels.moments(values)[3])

    def settle(self, kernels: Selection, feedback: ErrorFeedback, indices: Array, sent: Array) -> None:
        assert isinstance(feedback, VarianceFeedback)
        feedback.decay(kernels, self.zeta, indices)
        kernels.put(indices, None, feedback.residual)
        kernels.put(indices, None, feedback.variance)


@dataclass(frozen=True)
class Hybrid(_NeedsVariance):
    """Send elements that are above a threshold and unambiguous, as plus or minus the threshold.

    This combines `Strom` and `Variance` and needs a `VarianceFeedback`. If some selected element is not finite, full
    values are sent.

    Parameters
    ----------
    threshold : float
        See `Strom`.
    alpha, zeta : float
        See `Variance`.
    wire, out_format
        See `TopK`; ``"packed"`` is not possible.

    References
    ----------
    The paper of `Variance`, section 4.4.

    Examples
    --------
    >>> x, feedback = np.array([4, 0.5], np.float32), compcoll.sparse.VarianceFeedback()
    >>> feedback.observe(np.ones(2, np.float32))  # second moments of single samples
    >>> compcoll.allreduce(x, op="mean", codec="hybrid", threshold=1, feedback=feedback)
    array([1., 0.], dtype=float32)
    """

    threshold: float = option(1e-3, _ABOVE_ZERO, "what is sent, and from which magnitude on")
    alpha: float = option(1.5, _ABOVE_ZERO, "r² over v from which on an element is sent")
    zeta: float = option(0.999, Reals(0, 1, closed=True), "decay of v where nothing is sent")

    name: ClassVar[str] = "hybrid"
    examples = (Example({"threshold": 1.0}),)
    value_format: ClassVar[int] = SIGN

    def choose(self, kernels: Selection, values: Array, feedback: ErrorFeedback | None) -> Choice:
        variance = _variance(kernels, values, feedback)
        return Choice(kernels.unambiguous(values, variance, self.alpha, self.threshold), self.threshold)

    def settle(self, kernels: Selection, feedback: ErrorFeedback, indices: Array, sent: Array) -> None:
        assert isinstance(feedback, VarianceFeedback)
        step = self.threshold
        magnitudes = abs(kernels.take(feedback.residual, indices))
        left = kernels.take(feedback.variance, indices) - 2 * magnitudes * step + step * step
        feedback.decay(kernels, self.zeta, indices)
        # Comparisons with NaN and Inf are false, so 0 is left there.
        left = left * (left > 0) * (magnitudes < math.inf) if kernels.finite(left) else None
        kernels.put(indices, left, feedback.variance)
        feedback.sent(kernels, indices, sent)


ALL: tuple[type[Sparsifier], ...] = (TopK, RandomK, Strom, Variance, Hybrid)
