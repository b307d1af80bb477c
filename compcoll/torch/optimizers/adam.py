"""AdamW with compressed averages: 1-bit Adam and 0/1 Adam."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...codecs.base import Codec
from ...codecs.registry import as_codec
from ...deprecated import renamed_arguments, renamed_attribute
from ...errors import InvalidArgument
from ...plan import choose
from ...sparse import Sparsifier
from ..hooks import check_hook_free
from ..policy import check_whole, compressing
from ..states import state_of
from ..training_stats import TrainingStats
from .common import (
    Averager,
    Flat,
    Ranks,
    any_rank,
    average,
    broadcast_object,
    check_groups,
    check_together,
    check_trained,
    groups_of,
    join,
    keep_gradients,
    module_of,
    parameters_of,
    read_states,
    scaling_of,
    untrained,
)

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
_SETTLED = 0.96
"""1-bit Adam's warm-up ends if the variance's norm is at least this part of its norm ``1 / (1 - β2)`` steps before."""


class CompressedAdam(torch.optim.Optimizer):
    """Base class of `OneBitAdam` and `ZeroOneAdam`: AdamW on one vector of all parameters."""

    conserves: ClassVar[str] = "exact"
    """How the sent values plus the residuals relate to the values to send: "exact", "decay" or "none"."""
    _step_supports_amp_scaling = True
    """`torch.amp.GradScaler` reads this attribute: see `compcoll.torch.optimizers.common`."""
    _kinds: tuple[str, ...] = ("momentum", "variance")
    """Attributes that hold saved vectors. Those in `_own` differ between the ranks."""
    _own: tuple[str, ...] = ()
    _counters: tuple[str, ...] = ("steps", "frozen_at")
    """Attributes that hold saved numbers."""

    account = renamed_attribute("account", "stats")

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        params: Parameters | None,
        codec: str | Codec | None,
        algorithm: str | None,
        gradient_codec: str | Codec | None,
        group: Ranks | None,
        timeout: float | None,
        transport: str,
        codec_options: dict[str, Any],
        settings: str,
    ) -> None:
        _check(lr, betas, eps, weight_decay)
        chosen = as_codec(codec, codec_options)
        of_gradients = as_codec(gradient_codec, {}, "gradient_codec")
        if isinstance(of_gradients, Sparsifier):
            raise InvalidArgument(f"gradient_codec={of_gradients!r}: elements that it omits would have no variance")
        by_name = {name: p for name, p in module_of(model).named_parameters() if p.requires_grad}
        given = list(by_name.values() if params is None else params)
        super().__init__(given, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._module = module_of(model)
        self._parameters = parameters_of(self)
        names = {id(p): name for name, p in by_name.items()}
        if any(id(p) not in names for p in self._parameters):
            raise InvalidArgument("params contains parameters that are not in the model, or are frozen in it")
        self._trained = {id(p): names[id(p)] for p in self._parameters}
        self._check_groups()
        if (self._betas, self._eps) != (tuple(betas), eps):
            raise InvalidArgument("groups cannot have their own betas or eps: give these as arguments, for all groups")
        check_hook_free(model)
        self._flat = Flat({names[id(p)]: p for p in self._parameters})
        self.momentum, self.variance, self._gradient = (self._flat.zeros() for _ in range(3))
        self._denominator = self._dead = torch.empty(0)
        self.steps = self.frozen_at = 0
        self._resumed = False
        algorithm = compressing(chosen) if algorithm is None else algorithm
        self._settings = f"{settings}, codec {chosen!r}, algorithm {algorithm}, gradient_codec {of_gradients!r}"
        self._averager = Averager(chosen, algorithm, True, self.momentum)
        # Under Adam, a residual added in a later step has the wrong weight, so gradients have no feedback.
        algorithm_of_gradients = choose.AUTO if of_gradients is None else "direct"
        self._gradient_averager = Averager(of_gradients, algorithm_of_gradients, False, self._gradient)
        shapes = [f"{name}: {n}, {self._flat.dtype}" for name, n in self._flat.sizes.items()]
        groups = [f"lr, weight_decay: {each['lr']}, {each['weight_decay']}" for each in self.param_groups]
        lines = [
            f"{type(self).__name__}: betas {betas}, eps {eps}, {self._settings}, over {transport}",
            *shapes,
            *groups,
        ]
        self._communicator = join(group, lines, timeout, transport, algorithm)
        self._owned = self._communicator is not group
        self._averager.try_out(self._communicator)
        self._gradient_averager.try_out(self._communicator)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            keep_gradients(model, f"compcoll {type(self).__name__}")
        else:
            self._start_alike()
        self.stats = TrainingStats()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform a step's averages and update the parameters. Collective.

        With a GradScaler, ``scaler.step(optimizer)`` is collective, too. If the gradients of any rank overflow, all
        ranks skip the step.

        Parameters
        ----------
        closure : callable, optional
            Recomputes the loss and its gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch.compiler.disable
    def _step(self) -> None:
        with scaling_of(self) as scaling:
            self._check_groups()
            if self._resumed:
                check_together(self._communicator, f"{type(self).__name__} goes on from a state of step {self.steps}")
                self._resumed = False
            if scaling is not None and any_rank(self._communicator, [scaling.overflowed])[0]:
                return
            before = self.stats.wire_nbytes
            self._flat.pack((p.grad for p in self._parameters), self._gradient)
            if scaling is not None:
                self._gradient.div_(scaling.scale)
            self.steps += 1
            self._advance()
            self.stats.steps += 1
            sent = self.stats.wire_nbytes - before
            self.stats.peak_step_nbytes = max(self.stats.peak_step_nbytes, sent)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_flat"):
            raise InvalidArgument(
                f"{type(self).__name__} takes no parameter group later: pass all groups when you make the optimizer"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save with the model. Each rank saves its own, or `GatheredState` saves one for all."""
        vectors = {kind: self._flat.by_name(getattr(self, kind)) for kind in self._kinds}
        residual = self._averager.residual
        kept = {} if residual is None else self._flat.by_name(torch.from_numpy(residual))
        state = state_of(self._communicator.rank, self._communicator.size, kept, **vectors)
        return (
            state
            | {name: copy(getattr(self, name)) for name in self._counters}
            | {"begun": self._communicator.sequence_number, "groups": groups_of(self)}
        )

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue an earlier run.

        Parameters
        ----------
        states : dict, or sequence of dict
            This rank's `state_dict`, or those of all ranks of the earlier run. With all of them, the number of ranks
            may change: the sum of the residuals over the ranks is kept. Codecs with random rounding continue from the
            saved position, or from the current one if an old state lacks it. Values of parameters that are no longer
            trained are dropped with a warning.

        Raises
        ------
        InvalidArgument
            If the states belong to another number of ranks, rank, optimizer, or model. Nothing is changed in this case.
            If the ranks' states are of different steps, the next `step` raises `CollectiveMismatch`.
        """
        rank, size = self._communicator.rank, self._communicator.size
        every, residuals = read_states(
            *(states, rank, size, self._kinds, ("residuals",), (*self._counters, "begun", "groups")),
            *(self._flat.shapes, self._module),
        )
        for state in every:
            check_groups(state["groups"], len(self.param_groups))
        alike, mine = every[0]["size"] == size, every[rank % len(every)]
        for kind in self._kinds:
            arrays = mine[kind] if alike or kind not in self._own else _means([state[kind] for state in every])
            self._flat.load(arrays, getattr(self, kind))
        for name in self._counters:
            setattr(self, name, copy(mine[name]))
        self._communicator.sequence_number = mine.get("begun", self._communicator.sequence_number)
        for group, kept in zip(self.param_groups, mine["groups"], strict=True):
            group.update(deepcopy(kept))
        if self._averager.residual is not None:
            self._flat.load(residuals, torch.from_numpy(self._averager.residual))
        self._resumed = True
        self._restored(alike)

    def free(self) -> None:
        """Release the communicator after training. Collective. DDP keeps its hook."""
        if self._owned:
            self._communicator.free()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings})"

    def _advance(self) -> None:
        """Perform a step with the packed gradients."""
        raise NotImplementedError

    def _restored(self, alike: bool) -> None:
        """Recompute values derived from a loaded state. ``alike`` is True if the number of ranks is the same."""

    def _check_groups(self) -> None:
        """Reject changes to the parameters or groups that this optimizer does not support."""
        check_trained(self, self._trained)
        if len({(tuple(each["betas"]), each["eps"]) for each in self.param_groups}) > 1:
            raise InvalidArgument("betas and eps must be the same in all groups: lr and weight_decay may differ")

    def _start_alike(self) -> None:
        """Copy rank 0's parameters and buffers to all ranks. Collective."""
        values = self._flat.pack(self._parameters)
        self._communicator.bcast(values.numpy(), 0, out=values.numpy(), codec=None)
        self._put(values)
        others = untrained(self._module, self._trained)
        common = broadcast_object(0, self._communicator, {"values": [each.detach().cpu() for each in others]})
        for each, value in zip(others, common["values"], strict=True):
            each.detach().copy_(value)

    def _put(self, values: Tensor) -> None:
        """Set the parameters from a vector."""
        for parameter, view in zip(self._parameters, self._flat.views(values), strict=True):
            parameter.detach().copy_(view)

    @property
    def _betas(self) -> tuple[float, float]:
        """The current betas: schedulers such as OneCycleLR change them."""
        first, second = self.param_groups[0]["betas"]
        return float(first), float(second)

    @property
    def _eps(self) -> float:
        return float(self.param_groups[0]["eps"])

    def _adamw_step(self, updates: int) -> None:
        """Perform an AdamW step with the mean gradients. It updates the variance for the ``updates``-th time."""
        self._observe_variance()
        self.momentum.lerp_(self._gradient, 1 - self._betas[0])
        self._move(self._root(updates))

    def _observe_variance(self) -> None:
        """Replace the gradients by their mean over the ranks, and update the variance with its squares. Collective."""
        self._gradient_averager.average(self._gradient, self._communicator, self.stats)
        self.variance.mul_(self._betas[1]).addcmul_(self._gradient, self._gradient, value=1 - self._betas[1])

    def _root(self, updates: int) -> Tensor:
        """Return the bias-corrected root of the variance after a number of updates, plus epsilon."""
        return (self.variance.sqrt() / math.sqrt(1 - self._betas[1] ** updates)).add_(self._eps)

    def _hold(self, updates: int) -> None:
        """Fix the denominator at the current variance. Elements that never had a gradient do not move."""
        self._dead = self.variance == 0
        self._denominator = self._root(updates).masked_fill_(self._dead, math.inf)

    def _rates(self) -> list[float]:
        """Return each group's learning rate, divided by the momentum's bias correction."""
        return [float(group["lr"]) / (1 - self._betas[0] ** self.steps) for group in self.param_groups]

    def _decays(self) -> list[float]:
        """Return each group's factor by which weight decay multiplies the parameters in a step."""
        return [1 - float(group["lr"]) * group["weight_decay"] for group in self.param_groups]

    def _each(self, values: Sequence[float]) -> list[float]:
        """Repeat each group's value for each of its parameters."""
        return [value for group, value in zip(self.param_groups, values, strict=True) for _ in group["params"]]

    def _move(self, denominator: Tensor) -> None:
        """Apply weight decay, and move the parameters along the momentum."""
        views = (self._flat.views(self.momentum), self._flat.views(denominator))
        steps = (self._each(self._decays()), self._each(self._rates()))
        for parameter, momentum, root, kept, rate in zip(self._parameters, *views, *steps, strict=True):
            own = parameter.detach()
            wide = own.to(self._flat.dtype)  # the same tensor if the type matches
            wide.mul_(kept).addcdiv_(momentum.to(own.device), root.to(own.device), value=-rate)
            if wide is not own:
                own.copy_(wide)


class OneBitAdam(CompressedAdam):
    """AdamW that averages its momentum in compressed form: 1-bit Adam. Collective.

    During the warm-up, this is AdamW with averaged gradients, exact by default. When the variance has settled, it is
    frozen. From then on, each rank updates the common momentum with its own gradient, ``β1 m + (1 - β1) g``, and sends
    it compressed, with its residual. The mean is compressed once more, with feedback of its own, and becomes m on all
    ranks. The momentum is linear in the gradients, but Adam's step is not. So with Adam and a codec of low precision,
    compress the momentum, not the gradients.

    After ``backward()``, each rank keeps its own gradients, also with DistributedDataParallel, whose communication hook
    this optimizer takes. So ``no_sync()`` has no effect, and gradients can be accumulated freely.

    Parameters
    ----------
    model : torch.nn.Module
        DistributedDataParallel, or any other module. The parameters of another module become those of rank 0.
    lr, betas, eps, weight_decay
        As for `torch.optim.AdamW`.
    warmup : int or "auto"
        Number of initial AdamW steps, 1 or more. ``"auto"`` ends the warm-up by the paper's criterion: the learning
        rate no longer rises, and the sum of the variance is at least 0.96 of its value ``1 / (1 - β2)`` steps before.
    params : iterable, optional
        Parameters of the model, or groups of them with their own ``lr`` and ``weight_decay``. Default: all.
    codec : str or Codec, optional
        Codec of the momentum, as for `compcoll.allreduce`. None averages it exactly.
    algorithm : str, optional
        Algorithm of that allreduce. Default: ``"direct"``, or ``"sparse_ring"`` for sparsifiers. ``"auto"`` compresses
        only where this saves time.
    gradient_codec : str or Codec, optional
        Codec, without feedback, of the mean gradients from which the variance is computed. None averages them exactly.
        Sparsifiers are rejected. Elements whose means all decode to 0 never move after the warm-up.
    group : ProcessGroup or Communicator, optional
        The ranks: by default the default process group. A communicator must not be used for anything else.
    timeout, transport
        As for `compcoll.torch.compress`.
    **codec_options
        Configuration of a codec given by name.

    Attributes
    ----------
    steps : int
        Number of steps so far.
    frozen_at : int
        Step after which the variance was frozen; 0 before.
    momentum, variance : Tensor
        One-dimensional, of all parameters one after another, in host memory.
    stats : TrainingStats
        Bytes and calls so far. Assign a new TrainingStats to count from zero.

    Raises
    ------
    InvalidArgument
        If an option is invalid, parameters are not the model's, or the codec's residuals would grow without bound.
    HookTaken
        If DistributedDataParallel has a communication hook already.
    CollectiveMismatch
        If models, settings, torch versions or torch instruction sets differ between ranks.
    NotUnderMPI, MPIMissing, ThreadsUnavailable
        As for `compcoll.torch.compress`.

    Notes
    -----
    The frozen variance and the momentum are bias-corrected by ``1 - β^t``, so nothing jumps when the warm-up ends. The
    paper needs no correction, because its warm-up is long.

    After the warm-up, the new momentum plus all ranks' new residuals equals the mean of the ranks' own momenta plus the
    earlier residuals, up to rounding, in all elements that move.

    A parameter without a gradient counts as having a zero gradient, as after ``zero_grad(set_to_none=False)``.

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

    @renamed_arguments(over="transport")
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
        transport: str = "auto",
        **codec_options: Any,
    ) -> None:
        if warmup != "auto":
            check_whole("warmup", warmup, 1)
        self._warmup = warmup
        self.norms: list[float] = []
        self.highest_rate = 0.0
        super().__init__(
            *(model, lr, betas, eps, weight_decay, params, codec, algorithm, gradient_codec),
            *(group, timeout, transport, codec_options),
            settings=f"warmup {warmup}",
        )

    def _advance(self) -> None:
        if self.frozen_at:
            self.momentum.lerp_(self._gradient, 1 - self._betas[0])
            self._averager.average(self.momentum, self._communicator, self.stats)
            self.momentum.masked_fill_(self._dead, 0)
            self._move(self._denominator)
            return
        self._adamw_step(self.steps)
        if self.steps == self._warmup or (self._warmup == "auto" and self._settled()):
            self.frozen_at = self.steps
            self._hold(self.frozen_at)

    def _restored(self, alike: bool) -> None:
        if self.frozen_at:
            self._hold(self.frozen_at)

    def _settled(self) -> bool:
        """Return whether the variance has settled on all ranks. Collective."""
        span = math.ceil(1 / (1 - self._betas[1]) - 1e-9)
        norms = deque(self.norms, span + 1)
        norms.append(float(self.variance.sum(dtype=torch.float64)))
        self.norms = list(norms)
        rate = max(float(group["lr"]) for group in self.param_groups)
        rising, self.highest_rate = rate > self.highest_rate, max(rate, self.highest_rate)
        found = not rising and len(norms) > span and norms[-1] >= _SETTLED * norms[0]
        # All ranks must agree: sums may differ in their last bits between ranks with different thread counts.
        return bool(self._communicator.allreduce(np.array([int(found)]), op="min", codec=None)[0])


class ZeroOneAdam(CompressedAdam):
    """AdamW with local steps between compressed averages: 0/1 Adam. Collective.

    The mean gradients update the variance in the first steps, then in every second step, every fourth and so on,
    ``variance_updates`` times at each interval, and not after the step ``freeze``. In all other steps, each rank moves
    by its own momentum and accumulates the update, ``u ← u + lr m``. At intervals, the ranks average u in compressed
    form, with feedback for each rank's u and for the mean. All ranks then continue from their last common parameters,
    moved by the mean of u, with the momentum that corresponds to it. From the step ``local_after`` on, the interval
    between averages doubles every ``local_steps`` steps, up to ``local_limit``.

    Between two averages, the parameters differ between ranks: see `synchronized`. `state_dict` includes them.

    Parameters
    ----------
    model, lr, betas, eps, weight_decay, params, codec, algorithm, gradient_codec, group, timeout, transport
        As for `OneBitAdam`.
    variance_updates : int
        Updates of the variance at each interval. Default: 16.
    freeze : int, optional
        Last step that may update the variance. By default the updates only become rarer.
    local_after : int, optional
        First step that may be local. Default: the step after ``freeze``, or none.
    local_steps : int
        Steps until the interval doubles. Default: 32678, as in the paper's longest run.
    local_limit : int
        Largest interval. Default: 16.
    **codec_options
        As for `OneBitAdam`.

    Attributes
    ----------
    steps, momentum, variance, stats
        As for `OneBitAdam`.
    frozen_at : int
        Step of the latest update of the variance.

    Raises
    ------
    InvalidArgument, HookTaken, CollectiveMismatch, NotUnderMPI, MPIMissing, ThreadsUnavailable
        As for `OneBitAdam`.

    Notes
    -----
    A due update of the variance waits for the next average, when the ranks' parameters are equal. Weight decay also
    shrinks u, so that an exact average gives the mean of the ranks' parameters.

    The mean of u that moves the parameters plus all ranks' new residuals equals the mean of the ranks' own u plus the
    earlier residuals, up to rounding, in all elements that move.

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
    _counters = (*CompressedAdam._counters, "observations", "next_observation", "local", "next_average", "rates")

    @renamed_arguments(over="transport")
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
        transport: str = "auto",
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
            if value is not None or name not in ("freeze", "local_after"):
                check_whole(name, value, 1)
        self._variance_updates, self._freeze = variance_updates, freeze
        self._local_after = freeze + 1 if local_after is None and freeze is not None else local_after
        self._local_steps, self._local_limit = local_steps, local_limit
        super().__init__(
            *(model, lr, betas, eps, weight_decay, params, codec, algorithm, gradient_codec),
            *(group, timeout, transport, codec_options),
            settings=", ".join(f"{name} {value}" for name, value in given.items()),
        )
        self.updates, self.anchor, self.parameters = (self._flat.zeros() for _ in range(3))
        self.observations = self.local = 0
        self.next_observation = self.next_average = 1
        self.rates = [0.0] * len(self.param_groups)

    @property
    def synchronized(self) -> bool:
        """Whether all ranks have the same parameters now."""
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
                    self._observe_variance()
                    self._observed()
        if not self.local:
            self.next_average = self.steps + self._interval(self.steps + 1)

    def _observed(self) -> None:
        """Record an update of the variance, and schedule the next one."""
        self.frozen_at = self.steps
        self.next_observation = self.steps + 2 ** (self.observations // self._variance_updates)
        self.observations += 1
        self._hold(self.observations)

    def _interval(self, step: int) -> int:
        """Return the number of steps until the next average, including the given step."""
        if self._local_after is None or step < self._local_after:
            return 1
        doublings = 1 + (step - self._local_after) // self._local_steps
        return min(2 ** min(doublings, 30), self._local_limit)

    def _local_step(self) -> None:
        """Move by this rank's own momentum, and accumulate the update."""
        if not self.local:
            self._flat.pack(self._parameters, self.anchor)
        self.local += 1
        self.momentum.lerp_(self._gradient, 1 - self._betas[0])
        rates, decays = self._rates(), self._decays()
        views = map(self._flat.views, (self.anchor, self.updates, self.momentum))
        for anchor, update, momentum, kept, rate in zip(*views, self._each(decays), self._each(rates), strict=True):
            anchor.mul_(kept)
            update.mul_(kept).add_(momentum, alpha=rate)
        self.rates = [sum_ * kept + rate for sum_, kept, rate in zip(self.rates, decays, rates, strict=True)]
        self._move(self._denominator)

    def _average(self) -> None:
        """Move all ranks from their last common parameters by the mean of their updates. Collective."""
        self._averager.average(self.updates, self._communicator, self.stats)
        self.updates.masked_fill_(self._dead, 0)
        self._put(self.anchor.addcdiv_(self.updates, self._denominator, value=-1))
        if not all(self.rates):  # with a learning rate of 0, the update does not contain the momentum
            average(self.momentum, self._communicator, self.stats)
        views = map(self._flat.views, (self.momentum, self.updates))
        for momentum, update, rate in zip(*views, self._each(self.rates), strict=True):
            if rate:
                momentum.copy_(update).div_(rate)
        self._begin_interval()

    def _begin_interval(self) -> None:
        self.updates.zero_()
        self.local, self.rates = 0, [0.0] * len(self.param_groups)

    def _restored(self, alike: bool) -> None:
        if self.observations:
            self._hold(self.observations)
        if not alike:  # the loaded means equal an exact average, so all ranks agree
            self._begin_interval()
            self.next_average = self.steps + 1
        self._put(self.parameters)


def _means(arrays: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average the ranks' own arrays over the ranks of the earlier run."""
    return {name: torch.stack([each[name].double() for each in arrays]).mean(0) for name in arrays[0]}


def _check(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", float(lr)), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise InvalidArgument(f"{name}={value!r}: it must be finite, and 0 or more")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InvalidArgument(f"betas={betas!r}: two numbers from 0 to below 1 are needed")
