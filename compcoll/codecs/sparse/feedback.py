"""Feedback objects of sparse training methods; the caller keeps one for each buffer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...errors import InvalidArgument, InvalidBuffer
from ...feedback import ErrorFeedback, Incoming
from ..options import real


class DGCFeedback(ErrorFeedback):
    """Deep Gradient Compression: momentum correction, momentum factor masking and local clipping.

    A call with values g computes ``u ← m · u + g; v ← v + u``. The codec selects elements of v to send, and sets u and
    v to 0 there. The optimizer that uses the sum must not apply momentum itself.

    Parameters
    ----------
    momentum : float
        m in the formula, 0 to less than 1.
    clip : float, optional
        The largest Euclidean norm: each call's values are scaled down to it. DGC uses the global threshold divided by
        the square root of the number of ranks.

    Attributes
    ----------
    residual : array or None
        v: the accumulated values that were not sent.
    velocity : array or None
        u in the formula.

    References
    ----------
    Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR
    2018, section 3.

    Examples
    --------
    >>> feedback = compcoll.sparse.DGCFeedback(momentum=0.9)
    >>> total = compcoll.allreduce(np.ones(100, np.float32), codec="topk", density=0.01, feedback=feedback)
    """

    conserves = "decay"
    arrays = ("residual", "velocity")

    def __init__(self, momentum: float = 0.9, clip: float | None = None) -> None:
        super().__init__()
        self.momentum = real("DGCFeedback: momentum", momentum)
        self.clip = None if clip is None else real("DGCFeedback: clip", clip)
        self.velocity: Any = None
        if not 0 <= self.momentum < 1:
            raise InvalidArgument(f"DGCFeedback: momentum={momentum!r} must be at least 0 and less than 1")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise InvalidArgument(f"DGCFeedback: clip={clip!r} must be finite and above 0")

    def __repr__(self) -> str:
        return f"DGCFeedback(momentum={self.momentum!r}, clip={self.clip!r})"

    def accumulate(self, incoming: Incoming) -> Any:
        factor = 1.0
        if self.clip is not None:
            norm = incoming.norm()
            factor = self.clip / norm if self.clip < norm < math.inf else 1.0
        incoming.kernels.multiply(self.velocity, self.momentum)
        incoming.add_to(self.velocity, factor)
        incoming.kernels.plus(self.residual, self.velocity)
        return self.residual

    def sent(self, kernels: Any, indices: Any, values: Any) -> None:
        super().sent(kernels, indices, values)
        kernels.put(indices, None, self.velocity)


def warmup_density(epoch: int, density: float = 0.001, epochs: int = 5) -> float:
    """Return the density of an epoch in DGC's schedule: 25 %, 6.25 %, 1.5625 %, 0.4 %, then 0.1 %.

    Parameters
    ----------
    epoch : int
        The epoch, counted from 0.
    density : float
        The final density.
    epochs : int
        Length of the schedule. The final density holds from its last epoch on, or earlier if a quarter of the previous
        density would be less.

    Examples
    --------
    >>> [compcoll.sparse.warmup_density(epoch) for epoch in range(3)]
    [0.25, 0.0625, 0.015625]
    """
    if epoch < 0 or epochs < 1 or not 0 < density <= 1:
        raise InvalidArgument(f"epoch={epoch!r}, epochs={epochs!r}, density={density!r}: not a schedule")
    return density if epoch >= epochs - 1 else max(density, 0.25 ** (epoch + 1))


class VarianceFeedback(ErrorFeedback):
    """The feedback of variance-based methods: accumulated means r and second moments v.

    Before each call, pass the second moments of the samples to `observe`: ``Σ (∇f_z / B)²`` over the B samples z of the
    mini-batch. The call's values are the mean of the same samples. If the call computes the ranks' mean, r is divided
    by the number of ranks and v by its square.

    Attributes
    ----------
    residual : array or None
        r: the accumulated means.
    variance : array or None
        v: the accumulated second moments.

    References
    ----------
    See `compcoll.sparse.Variance`.

    Examples
    --------
    >>> feedback = compcoll.sparse.VarianceFeedback()
    >>> feedback.observe(np.ones(100, np.float32))  # second moments of single samples
    >>> total = compcoll.allreduce(np.ones(100, np.float32), codec="variance", feedback=feedback)
    """

    arrays = ("residual", "variance")

    def __init__(self) -> None:
        super().__init__()
        self.variance: Any = None
        self._observed: Any = None

    def observe(self, second_moment: Any) -> None:
        """Add second moments to v in the next call: an array of the buffer's shape with finite, nonnegative values."""
        if not bool(((second_moment - second_moment) == 0).all()) or bool((second_moment < 0).any()):
            raise InvalidBuffer("second moments must be finite and not negative")
        flat = second_moment.reshape(-1)
        if self.residual is not None and flat.size != self.residual.size:
            raise InvalidBuffer(f"{flat.size} second moments, but the feedback holds {self.residual.size} elements")
        self._observed = flat.copy() if self._observed is None else self._observed + flat

    def reset(self) -> None:
        super().reset()
        self._observed = None

    def prepare(self, n: int, dtype: str, zeros: Callable[[int, str], Any]) -> Any:
        if self._observed is not None and self._observed.size != n:
            raise InvalidBuffer(f"{self._observed.size} second moments were observed, but this buffer has {n} elements")
        residual = super().prepare(n, dtype, zeros)
        if self._observed is not None and self._observed.dtype != residual.dtype:
            self._observed = self._observed.astype(residual.dtype)
        return residual

    def accumulate(self, incoming: Incoming) -> Any:
        if self._observed is not None:
            incoming.kernels.plus(self.variance, self._observed, incoming.scale**2)
            self._observed = None
        return super().accumulate(incoming)

    def decay(self, kernels: Any, factor: float, sent: Any) -> None:
        """Multiply v by ``factor`` except at the ``sent`` indices."""
        kept = kernels.take(self.variance, sent)
        kernels.multiply(self.variance, factor)
        kernels.put(sent, kept, self.variance)
