"""The common parts of AdamW's compressed kin: the step on one vector of all parameters, and the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...codecs.base import Codec
from ...errors import InvalidArgument
from ...registry import as_codec
from ...sparse import Sparsifier
from ..account import Account
from ..states import residuals_of, state_of
from .exchange import CodedExchange, exact_mean
from .flat import Flat
from .named import check_groups, check_trained, fitted, groups_of, parameters_of, untrained
from .ranks import Ranks, any_rank, check_hook_free, check_together, join, keep_gradients, module_of, told_by
from .scaling import scaling_of

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def algorithm_for(codec: Codec | None, algorithm: str | None) -> str:
    """The allreduce to be taken: unless told, one that compresses whether that pays here or not."""
    if algorithm is not None:
        return algorithm
    return "sparse_ring" if isinstance(codec, Sparsifier) else "direct"


class CompressedAdam(torch.optim.Optimizer):
    """The base of `OneBitAdam` and `ZeroOneAdam`: AdamW on one vector of all parameters, and its state."""

    conserves: ClassVar[str] = "exact"
    """Whether values that were sent and residuals add up to those that were to be sent: "exact", "decay" or "none"."""
    _step_supports_amp_scaling = True
    """Read by `torch.amp.GradScaler`: see `compcoll.torch.optimizers.scaling`."""
    _kinds: tuple[str, ...] = ("momentum", "variance")
    """Vectors that are saved, the attributes of these names; of `_own` those that differ between the ranks."""
    _own: tuple[str, ...] = ()
    _counters: tuple[str, ...] = ("steps", "frozen_at", "begun")
    """Numbers that are saved, the attributes of these names."""

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
        over: str,
        codec_options: dict[str, Any],
        settings: str,
    ) -> None:
        _check(lr, betas, eps, weight_decay)
        chosen = as_codec(codec, codec_options)
        of_gradients = as_codec(gradient_codec, {}, "gradient_codec")
        if isinstance(of_gradients, Sparsifier):
            raise InvalidArgument(f"gradient_codec={of_gradients!r}: elements that it left out would have no variance")
        by_name = {name: p for name, p in module_of(model).named_parameters() if p.requires_grad}
        given = list(by_name.values() if params is None else params)
        super().__init__(given, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._module = module_of(model)
        self._parameters = parameters_of(self)
        names = {id(p): name for name, p in by_name.items()}
        if any(id(p) not in names for p in self._parameters):
            raise InvalidArgument("params has parameters that are none of the model's, or frozen there")
        self._trained = {id(p): names[id(p)] for p in self._parameters}
        self._check_groups()
        if (self._betas, self._eps) != (tuple(betas), eps):
            raise InvalidArgument("betas and eps are of all groups: they are arguments of their own")
        check_hook_free(model)
        self._flat = Flat({names[id(p)]: p for p in self._parameters})
        self.momentum, self.variance, self._gradient = (self._flat.zeros() for _ in range(3))
        self._momenta = self._flat.views(self.momentum)
        self._denominator = torch.empty(0)
        self._denominators: list[Tensor] = []
        self._dead = torch.empty(0)
        self.steps = self.frozen_at = 0
        self._resumed = False
        self._settings = f"{settings}, codec {chosen!r}, algorithm {algorithm_for(chosen, algorithm)}"
        self._settings += f", gradient_codec {of_gradients!r}"
        self._exchange = CodedExchange(chosen, algorithm_for(chosen, algorithm), True, self.momentum)
        # Under Adam what feedback brings later has the wrong weight: these losses are not kept.
        coded = None if of_gradients is None else CodedExchange(of_gradients, "direct", False, self._gradient)
        self._of_gradients = coded
        shapes = [f"{name}: {n}, {self._flat.dtype}" for name, n in self._flat.sizes.items()]
        groups = [f"lr, weight_decay: {each['lr']}, {each['weight_decay']}" for each in self.param_groups]
        lines = [f"{type(self).__name__}: betas {betas}, eps {eps}, {self._settings}, over {over}", *shapes, *groups]
        self._communicator = join(group, lines, timeout, over, algorithm_for(chosen, algorithm))
        self._owned = self._communicator is not group
        self._exchange.try_out(self._communicator)
        if coded is not None:
            coded.try_out(self._communicator)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            keep_gradients(model, f"compcoll {type(self).__name__}")
        else:
            self._start_alike()
        self.account = Account()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Average what is to be averaged of this step, and move the parameters. Collective.

        With a GradScaler all ranks skip a step in which the gradients of one overflow: ``scaler.step(optimizer)`` is
        collective, too.

        Parameters
        ----------
        closure : callable, optional
            Finds the loss and its gradients anew.
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
            before = self.account.wire_nbytes
            self._flat.pack((p.grad for p in self._parameters), self._gradient)
            if scaling is not None:
                self._gradient.div_(scaling.scale)
            self.steps += 1
            self._advance()
            self.account.steps += 1
            sent = self.account.wire_nbytes - before
            self.account.peak_step_nbytes = max(self.account.peak_step_nbytes, sent)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_flat"):
            raise InvalidArgument(f"{type(self).__name__} takes all its parameters when it is made")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Copy what is to be saved with the model, by every rank its own, or by `WholeState` as one."""
        vectors = {kind: self._flat.by_name(getattr(self, kind)) for kind in self._kinds}
        losses = self._exchange.losses
        kept = {} if losses is None else self._flat.by_name(torch.from_numpy(losses))
        state = state_of(self._communicator.rank, self._communicator.size, kept, **vectors)
        return state | {name: copy(getattr(self, name)) for name in self._counters} | {"groups": groups_of(self)}

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where an earlier run ended.

        Parameters
        ----------
        states : dict, or sequence of dict
            What this rank's `state_dict` gave; or all ranks' ones of then, whatever their number was: the mean over
            the ranks of what was lost is kept. After a state that lacks what codecs drew that round at random, as early
            ones do, they draw on from where they are. Values of parameters that are trained no more are dropped, with
            a warning.

        Raises
        ------
        InvalidArgument
            If they belong to another number of ranks, rank, optimizer, or model. Nothing is changed then. That all
            ranks go on from the same step is found out in the next `step`, which raises `CollectiveMismatch`.
        """
        rank, size = self._communicator.rank, self._communicator.size
        more = (*self._kinds, *self._counters, "groups")
        states = fitted(states, self._kinds, ("residuals",), self._flat.shapes, self._module)
        residuals = residuals_of(states, rank, size, self._flat.shapes, more, optional=("begun",))
        every = [states] if isinstance(states, Mapping) else sorted(states, key=lambda state: int(state["rank"]))
        for state in every:
            check_groups(state["groups"], len(self.param_groups))
        alike = every[0]["size"] == size
        mine = every[rank] if alike and len(every) > 1 else every[0]
        for kind in self._kinds:
            vector = getattr(self, kind)
            if alike or kind not in self._own:
                self._flat.load(mine[kind], vector)
            else:
                self._flat.load(_means([state[kind] for state in every]), vector)
        for name in (name for name in self._counters if name in mine):
            setattr(self, name, copy(mine[name]))
        for group, kept in zip(self.param_groups, mine["groups"], strict=True):
            group.update(deepcopy(kept))
        if self._exchange.losses is not None:
            self._flat.load(residuals, torch.from_numpy(self._exchange.losses))
        self._resumed = True
        self._restored(alike)

    def free(self) -> None:
        """Give back the communicator, when the model is trained no more. Collective; DDP keeps its hook."""
        if self._owned:
            self._communicator.free()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings})"

    def _advance(self) -> None:
        """Do a step with the gradients that are there."""
        raise NotImplementedError

    def _restored(self, alike: bool) -> None:
        """Find what follows from a state that was read, of as many ranks if they are alike."""

    def _check_groups(self) -> None:
        """Refuse what has become of the parameters and groups, if this optimizer cannot do it."""
        check_trained(self, self._trained)
        if len({(tuple(each["betas"]), each["eps"]) for each in self.param_groups}) > 1:
            raise InvalidArgument("betas and eps must be the same in all groups: lr and weight_decay may differ")

    def _start_alike(self) -> None:
        """Give all ranks rank 0's parameters and buffers."""
        values = self._flat.pack(self._parameters, self._flat.zeros())
        self._communicator.bcast(values.numpy(), 0, out=values.numpy(), codec=None)
        self._put(values)
        others = untrained(self._module, self._trained)
        told = told_by(0, self._communicator, {"values": [each.detach().cpu() for each in others]})
        for each, value in zip(others, told["values"], strict=True):
            each.detach().copy_(value)

    def _put(self, values: Tensor) -> None:
        """Set the parameters."""
        for parameter, view in zip(self._parameters, self._flat.views(values), strict=True):
            parameter.detach().copy_(view)

    @property
    def _betas(self) -> tuple[float, float]:
        """The present ones: schedulers such as OneCycleLR change them."""
        first, second = self.param_groups[0]["betas"]
        return float(first), float(second)

    @property
    def _eps(self) -> float:
        return float(self.param_groups[0]["eps"])

    @property
    def begun(self) -> int:
        """The number of collectives that began: what a state holds of codecs that round at random."""
        return self._communicator.begun

    @begun.setter
    def begun(self, number: int) -> None:
        self._communicator.begun = number

    def _average_gradients(self) -> None:
        """Have the gradients be their mean over the ranks. Collective."""
        if self._of_gradients is None:
            exact_mean(self._gradient, self._communicator, self.account)
        else:
            self._of_gradients.mean(self._gradient, self._communicator, self.account)

    def _adamw_step(self, updates: int) -> None:
        """AdamW's step by the mean of the gradients; ``updates`` of the variance are made with it."""
        self._average_gradients()
        self.momentum.lerp_(self._gradient, 1 - self._betas[0])
        self._observe_variance()
        self._move(self._flat.views(self._root(updates)), [self._rate(group) for group in self.param_groups])

    def _observe_variance(self) -> None:
        """Take the gradients' squares, of which the mean over the ranks is made already, into the variance."""
        self.variance.mul_(self._betas[1]).addcmul_(self._gradient, self._gradient, value=1 - self._betas[1])

    def _root(self, updates: int) -> Tensor:
        """The variance's root after so many updates, without the bias of its start, and epsilon."""
        return (self.variance.sqrt() / math.sqrt(1 - self._betas[1] ** updates)).add_(self._eps)

    def _hold(self, updates: int) -> None:
        """Divide by the present variance from now on. Elements that never had a gradient do not move."""
        self._dead = self.variance == 0
        self._denominator = self._root(updates).masked_fill_(self._dead, math.inf)
        self._denominators = self._flat.views(self._denominator)

    def _rate(self, group: Mapping[str, Any]) -> float:
        """A group's learning rate, over the bias of the momentum's start."""
        return float(group["lr"]) / (1 - self._betas[0] ** self.steps)

    def _move(self, denominators: Sequence[Tensor], rates: Sequence[float]) -> None:
        """Decay the parameters, and move them along the momentum."""
        number = 0
        for group, rate in zip(self.param_groups, rates, strict=True):
            kept = 1 - float(group["lr"]) * group["weight_decay"]
            for parameter in group["params"]:
                wide = parameter.detach() if parameter.dtype == self._flat.dtype else parameter.to(self._flat.dtype)
                momentum, root = (each[number].to(wide.device) for each in (self._momenta, denominators))
                wide.mul_(kept).addcdiv_(momentum, root, value=-rate)
                if wide.dtype != parameter.dtype:
                    parameter.copy_(wide)
                number += 1


def _means(arrays: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The means over the ranks of then of what each had for itself."""
    return {name: torch.stack([each[name].double() for each in arrays]).mean(0) for name in arrays[0]}


def _check(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", float(lr)), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise InvalidArgument(f"{name}={value!r}: it must be finite, and 0 or more")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InvalidArgument(f"betas={betas!r}: two numbers from 0 to below 1 are needed")
