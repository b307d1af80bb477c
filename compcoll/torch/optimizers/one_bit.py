"""Adam whose momentum is averaged in compressed form, once its variance has settled: 1-bit Adam."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

from ...codecs.base import Codec
from ...errors import InvalidArgument
from .adam import CompressedAdam, Parameters
from .ranks import Ranks

_SETTLED = 0.96
"""The ratio of norms of the variance, a memory of it apart, from which on 1-bit Adam takes it for settled."""


class OneBitAdam(CompressedAdam):
    """AdamW that averages its momentum in compressed form: 1-bit Adam. Collective.

    At first it is AdamW with means of the gradients, exact ones by default. Once the variance has settled it is held,
    and each rank sends the common momentum with its own gradient in it, ``β1 m + (1 - β1) g``, compressed and with
    what earlier steps lost; the mean, compressed once more with feedback of its own, becomes everybody's m. Momentum
    averages linearly, which a step of Adam does not: so methods that lose much belong here under Adam, and not at the
    gradients.

    After ``backward()`` the gradients are each rank's own: with DistributedDataParallel, too, of which this becomes the
    communication hook. ``no_sync()`` changes nothing then, and gradients may be accumulated as one likes.

    Parameters
    ----------
    model : torch.nn.Module
        DistributedDataParallel, or any other, whose parameters become rank 0's.
    lr, betas, eps, weight_decay
        As of `torch.optim.AdamW`.
    warmup : int or "auto"
        Steps of AdamW at first, 1 or more. ``"auto"`` ends them by the paper's criterion: the learning rate rises no
        more, and the sum of the variance is at least 0.96 of what it was ``1 / (1 - β2)`` steps before.
    params : iterable, optional
        Parameters of the model, or groups of them with their own ``lr`` and ``weight_decay``; all by default.
    codec : str or Codec, optional
        Of the momentum, as for `compcoll.allreduce`; None averages it exactly.
    algorithm : str, optional
        Of that allreduce: ``"direct"``, or ``"sparse_ring"`` for sparsifiers. ``"auto"`` does not compress where that
        would not pay.
    gradient_codec : str or Codec, optional
        Of the gradients' means, from which the variance is made, without feedback: None averages them exactly, a
        sparsifier is refused. Elements whose means all decode to 0 there do not move later.
    group : ProcessGroup or Communicator, optional
        The ranks: the default process group; or a communicator of compcoll's that is used for nothing else.
    timeout, over
        As of `compcoll.torch.compress`.
    **codec_options
        Configuration of a codec given by name.

    Attributes
    ----------
    steps : int
        How many were made.
    frozen_at : int
        The step after which the variance was held; 0 before.
    momentum, variance : Tensor
        Of all parameters, one behind the other, in host memory.
    account : Account
        What was sent so far. Replace it by a new one to count from zero.

    Raises
    ------
    InvalidArgument
        If an option is not allowed, parameters are not the model's, or the codec's losses would grow without end.
    HookTaken
        If DistributedDataParallel has a communication hook already.
    CollectiveMismatch
        If models, settings, or versions and instruction sets of torch differ between ranks.
    NotUnderMPI, MPIMissing, ThreadsUnavailable
        As for `compcoll.torch.compress`.

    Notes
    -----
    The variance that is held, and the momentum, are without the bias of their start (``1 - β^t``), so that nothing
    jumps when the warm-up ends; the paper's long warm-up leaves none.

    After the warm-up the new momentum plus the residuals of all ranks equals the mean of the ranks' own momenta plus
    the residuals before, up to rounding, in all elements that move.

    A parameter without a gradient counts as one with a gradient of zeros, as after ``zero_grad(set_to_none=False)``.

    References
    ----------
    H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021,
    arXiv 2102.02888.

    Examples
    --------
    >>> model = DistributedDataParallel(nn.Linear(64, 64))
    >>> optimizer = compcoll.torch.OneBitAdam(model, lr=1e-3, warmup=500)
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> optimizer.step()
    """

    _counters = (*CompressedAdam._counters, "norms", "highest_rate")

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup: int | str = "auto",
        params: Parameters | None = None,
        codec: str | Codec | None = "onebit",
        algorithm: str | None = None,
        gradient_codec: str | Codec | None = None,
        group: Ranks | None = None,
        timeout: float | None = None,
        over: str = "auto",
        **codec_options: Any,
    ) -> None:
        if warmup != "auto" and (isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1):
            raise InvalidArgument(f'warmup={warmup!r}: a number of steps, 1 or more, or "auto" is needed')
        self._warmup = warmup
        self.norms: list[float] = []
        self.highest_rate = 0.0
        super().__init__(
            *(model, lr, betas, eps, weight_decay, params, codec, algorithm, gradient_codec),
            *(group, timeout, over, codec_options),
            settings=f"warmup {warmup}",
        )

    def _advance(self) -> None:
        if self.frozen_at:
            self.momentum.lerp_(self._gradient, 1 - self._betas[0])
            self._exchange.mean(self.momentum, self._communicator, self.account)
            self.momentum.masked_fill_(self._dead, 0)
            self._move(self._denominators, [self._rate(group) for group in self.param_groups])
            return
        self._adamw_step(self.steps)
        if self.steps == self._warmup or (self._warmup == "auto" and self._settled()):
            self.frozen_at = self.steps
            self._hold(self.frozen_at)

    def _restored(self, alike: bool) -> None:
        if self.frozen_at:
            self._hold(self.frozen_at)

    def _settled(self) -> bool:
        """Tell whether all ranks find that the variance has settled. Collective."""
        span = math.ceil(1 / (1 - self._betas[1]) - 1e-9)
        norms = deque(self.norms, span + 1)
        norms.append(float(self.variance.sum(dtype=torch.float64)))
        self.norms = list(norms)
        rate = max(float(group["lr"]) for group in self.param_groups)
        rising, self.highest_rate = rate > self.highest_rate, max(rate, self.highest_rate)
        found = not rising and len(norms) > span and norms[-1] >= _SETTLED * norms[0]
        # Sums may differ in their last bits where ranks have other numbers of threads.
        return bool(self._communicator.allreduce(np.array([int(found)]), op="min", codec=None)[0])
