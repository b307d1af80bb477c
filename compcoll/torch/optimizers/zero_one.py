"""Adam with local steps between compressed averages, and a variance that is observed ever more rarely: 0/1 Adam."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...codecs.base import Codec
from ...errors import InvalidArgument
from .adam import CompressedAdam, Parameters
from .exchange import exact_mean
from .ranks import Ranks


class ZeroOneAdam(CompressedAdam):
    """AdamW whose ranks take steps of their own between compressed averages: 0/1 Adam. Collective.

    The variance takes the mean of the gradients in the first steps, then in every second, every fourth and so on,
    ``variance_updates`` times each, and not after the step ``freeze``. In all other steps a rank moves by its own
    momentum and adds that up, ``u ← u + lr m``. Every so often u is averaged, compressed and with feedback on both
    sides: all go on from where they last were together, moved by the mean of u, with the momentum that led there.
    From the step ``local_after`` on the distance of these averages doubles every ``local_steps`` steps, up to
    ``local_limit``.

    Between two averages the parameters differ from rank to rank; `synchronized` tells. `state_dict` holds them.

    Parameters
    ----------
    model, lr, betas, eps, weight_decay, params, codec, algorithm, gradient_codec, group, timeout, over, **codec_options
        As of `OneBitAdam`.
    variance_updates : int
        Updates of the variance at each distance: 16.
    freeze : int, optional
        The last step in which the variance may be updated; by default it is ever more rarely so.
    local_after : int, optional
        The first step that may be local; by default the one after ``freeze``, or none.
    local_steps : int
        Steps until the distance doubles: 32678, as in the paper's longest run.
    local_limit : int
        The largest distance: 16.

    Attributes
    ----------
    steps, momentum, variance, account
        As of `OneBitAdam`.
    frozen_at : int
        The step of the latest update of the variance.

    Raises
    ------
    InvalidArgument, HookTaken, CollectiveMismatch, NotUnderMPI, MPIMissing, ThreadsUnavailable
        As of `OneBitAdam`.

    Notes
    -----
    The variance is updated where the ranks are together only, at the first average when it is due. Weight decay shrinks
    what was added up, too, so that an exact average gives the mean of the ranks' parameters.

    The mean of u that moves the parameters plus the residuals of all ranks equals the mean of the ranks' own u plus the
    residuals before, up to rounding, in all elements that move.

    References
    ----------
    Y. Lu, C. Li, M. Zhang, C. De Sa, Y. He, "Maximizing Communication Efficiency for Large-scale Training via 0/1
    Adam", ICLR 2023, arXiv 2202.06009.

    Examples
    --------
    >>> model = DistributedDataParallel(nn.Linear(64, 64))
    >>> optimizer = compcoll.torch.ZeroOneAdam(model, lr=1e-3, freeze=1000, local_steps=500)
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> optimizer.step()
    """

    _kinds = (*CompressedAdam._kinds, "updates", "anchor", "parameters")
    _own = ("momentum", "updates", "parameters")
    _counters = (
        *CompressedAdam._counters,
        *("observations", "next_observation", "local", "next_average", "rates"),
    )

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        variance_updates: int = 16,
        freeze: int | None = None,
        local_after: int | None = None,
        local_steps: int = 32678,
        local_limit: int = 16,
        params: Parameters | None = None,
        codec: str | Codec | None = "onebit",
        algorithm: str | None = None,
        gradient_codec: str | Codec | None = None,
        group: Ranks | None = None,
        timeout: float | None = None,
        over: str = "auto",
        **codec_options: Any,
    ) -> None:
        given = {
            "variance_updates": variance_updates,
            "freeze": freeze,
            "local_after": local_after,
            "local_steps": local_steps,
            "local_limit": local_limit,
        }
        for name, value in given.items():
            optional = value is None and name in ("freeze", "local_after")
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidArgument(f"{name}={value!r}: a number of steps, 1 or more, is needed")
        self._variance_updates, self._freeze = variance_updates, freeze
        self._local_after = freeze + 1 if local_after is None and freeze is not None else local_after
        self._local_steps, self._local_limit = local_steps, local_limit
        super().__init__(
            *(model, lr, betas, eps, weight_decay, params, codec, algorithm, gradient_codec),
            *(group, timeout, over, codec_options),
            settings=", ".join(f"{name} {value}" for name, value in given.items()),
        )
        self.updates, self.anchor, self.parameters = (self._flat.zeros() for _ in range(3))
        self._updates, self._anchors = self._flat.views(self.updates), self._flat.views(self.anchor)
        self.observations = self.local = 0
        self.next_observation = self.next_average = 1
        self.rates = [0.0] * len(self.param_groups)

    @property
    def synchronized(self) -> bool:
        """Tell whether all ranks have the same parameters now."""
        return not self.local

    def state_dict(self) -> dict[str, Any]:
        self._flat.pack(self._parameters, self.parameters)
        return super().state_dict()

    def _advance(self) -> None:
        due = self.steps >= self.next_observation and (self._freeze is None or self.steps <= self._freeze)
        if due and not self.local:
            self._adamw_step(self.observations + 1)
            self._observed()
        else:
            self._local_step()
            if self.steps >= self.next_average:
                self._average()
                if due:
                    self._average_gradients()
                    self._observe_variance()
                    self._observed()
        if not self.local:
            self.next_average = self.steps + self._interval(self.steps + 1)

    def _observed(self) -> None:
        """The variance was updated: find when it will be next."""
        self.frozen_at = self.steps
        self.next_observation = self.steps + 2 ** (self.observations // self._variance_updates)
        self.observations += 1
        self._hold(self.observations)

    def _interval(self, step: int) -> int:
        """Steps from one average to the next, of which this is the first."""
        if self._local_after is None or step < self._local_after:
            return 1
        doublings = 1 + (step - self._local_after) // self._local_steps
        return min(2 ** min(doublings, 30), self._local_limit)

    def _local_step(self) -> None:
        """Move by this rank's own momentum, and add that up."""
        if not self.local:
            self._flat.pack(self._parameters, self.anchor)
        self.local += 1
        self.momentum.lerp_(self._gradient, 1 - self._betas[0])
        moved = [self._rate(group) for group in self.param_groups]
        number = 0
        for at, (group, rate) in enumerate(zip(self.param_groups, moved, strict=True)):
            kept = 1 - float(group["lr"]) * group["weight_decay"]
            for _ in group["params"]:
                self._anchors[number].mul_(kept)
                self._updates[number].mul_(kept).add_(self._momenta[number], alpha=rate)
                number += 1
            self.rates[at] = self.rates[at] * kept + rate
        self._move(self._denominators, moved)

    def _average(self) -> None:
        """Bring the ranks together where the mean of their updates leads. Collective."""
        self._exchange.mean(self.updates, self._communicator, self.account)
        self.updates.masked_fill_(self._dead, 0)
        self._put(self.anchor.addcdiv_(self.updates, self._denominator, value=-1))
        if not all(self.rates):  # no update tells the momentum where the learning rate was 0
            exact_mean(self.momentum, self._communicator, self.account)
        number = 0
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            for _ in group["params"]:
                if rate:
                    self._momenta[number].copy_(self._updates[number]).div_(rate)
                number += 1
        self._begin_interval()

    def _begin_interval(self) -> None:
        self.updates.zero_()
        self.local, self.rates = 0, [0.0] * len(self.param_groups)

    def _restored(self, alike: bool) -> None:
        if self.observations:
            self._hold(self.observations)
        if not alike:  # as by an exact average
            self._begin_interval()
            self.next_average = self.steps + 1
        self._put(self.parameters)
