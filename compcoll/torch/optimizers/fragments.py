"""Fragments of a model, each with outer parameters, and a time of its own to be synchronised."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...communicator import Communicator
from ...errors import InvalidArgument
from ..account import Account
from ..arrays import HostArray
from ..handles import Handle
from .exchange import Exchange, exact_mean
from .flat import Flat


@dataclass(frozen=True)
class Schedule:
    """When fragments are averaged, and how much of their ranks' own they keep: the options of `DiLoCo` about that.

    Raises
    ------
    InvalidArgument
        If a number of steps or fragments is out of its range, two do not go together, or the share is none.
    """

    every: int
    warmup: int
    fragments: int
    delay: int
    alpha: float

    def __post_init__(self) -> None:
        for name, lowest in (("every", 1), ("warmup", 0), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidArgument(f"{name}={value!r}: a whole number, {lowest} or more, is needed")
        if self.fragments > self.every:
            raise InvalidArgument(
                f"fragments={self.fragments}: at most every={self.every}, one a step, can be sent in turn"
            )
        if self.delay >= self.every:
            raise InvalidArgument(
                f"delay={self.delay}: an average must end before the next of its fragment: below every={self.every}"
            )
        if not 0 <= self.alpha < 1:
            raise InvalidArgument(f"alpha={self.alpha!r}: a number from 0 to below 1 is needed")

    @classmethod
    def of(cls, every: int, warmup: int, fragments: int, delay: int, alpha: float | None) -> Schedule:
        """Make one whose share, unless given, is the paper's: 0.5 with a delay, and else none."""
        return cls(every, warmup, fragments, delay, (0.5 if delay else 0.0) if alpha is None else float(alpha))

    @property
    def phases(self) -> list[int]:
        """After which step of each round each fragment is sent."""
        return [self.every * (number + 1) // self.fragments % self.every for number in range(self.fragments)]


class UnderWay(NamedTuple):
    """An average of outer gradients that runs, or has ended and is still to be mixed in.

    Attributes
    ----------
    due : int
        The step after which it is mixed in.
    gradient : Tensor
        The outer gradient; the ranks' mean when the work has ended.
    work : Handle or None
        The average; its value is the bytes sent. None if it had ended when it was saved.
    losses : array or None
        What compression had lost before.
    """

    due: int
    gradient: Tensor
    work: Handle[int] | None
    losses: HostArray | None


class Fragment:
    """Some layers of a model, synchronised together.

    Parameters
    ----------
    parameters : mapping
        By name.
    phase : int
        After which step of each round it is sent.
    make : callable
        Makes the exchange of a vector.

    Attributes
    ----------
    parameters : dict
        This rank's, which the inner optimizer moves.
    outer : Tensor
        The parameters that all ranks have in common, as one vector in host memory.
    version : int
        How many outer steps it has made.
    sent : int
        The step at which its outer gradient was taken last; -1 if that is to be done again.
    under_way : UnderWay or None
        Its average that is not mixed in yet.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], phase: int, make: Callable[[Flat, Tensor], Exchange]
    ) -> None:
        self.parameters, self.phase = dict(parameters), phase
        self.flat = Flat(self.parameters)
        self.outer = self.flat.pack(self.parameters.values(), self.flat.zeros())
        self.exchange = make(self.flat, self.outer)
        self.version, self.sent = 0, -1
        self.under_way: UnderWay | None = None

    def gradient(self, step: int) -> Tensor:
        """Take the outer gradient of a step: the common parameters minus this rank's."""
        self.sent = step
        gradient = torch.empty_like(self.outer)
        views = zip(self.flat.views(self.outer), self.flat.views(gradient), strict=True)
        for parameter, (common, difference) in zip(self.parameters.values(), views, strict=True):
            own = parameter.detach()
            # In the parameter's precision: what `mix` rounded away is no step of this rank's.
            torch.sub(common.to(own.dtype).to(common.dtype), own.to(common), out=difference)
        return gradient

    def mix(self, alpha: float) -> None:
        """Set this rank's parameters to α of them and 1 - α of the common ones."""
        for parameter, common in zip(self.parameters.values(), self.flat.views(self.outer), strict=True):
            target = parameter.detach()
            if not alpha:
                target.copy_(common)
                continue
            own = target.to(common.dtype)  # itself, if it is of that type
            target.copy_(torch.lerp(common.to(target.device), own, alpha, out=own))

    def average_gradients(self, communicator: Communicator, account: Account, used: Container[str]) -> int:
        """Have the gradients of the parameters that some rank uses be the ranks' mean, exactly; returns the bytes sent.
        Collective.
        """
        mean = self.flat.pack((p.grad for p in self.parameters.values()), self.flat.zeros())
        nbytes = exact_mean(mean, communicator, account)
        for (name, parameter), values in zip(self.parameters.items(), self.flat.views(mean), strict=True):
            if name in used:
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = torch.empty_like(parameter)  # in its memory format, as fused steps want it
                parameter.grad.copy_(values)
        return nbytes

    def agree(self, communicator: Communicator) -> None:
        """Go on from the first rank's parameters. Collective."""
        values = self.outer.numpy()
        communicator.bcast(values, 0, out=values, codec=None)
        self.mix(0.0)

    def own(self) -> dict[str, Any]:
        """Copy this rank's parameters, by name."""
        return self.flat.by_name(self.flat.pack(self.parameters.values(), self.flat.zeros()))

    def lost(self) -> dict[str, Any]:
        """Give what compression has lost, by name; nothing if that is not kept."""
        return {} if self.exchange.losses is None else self.flat.by_name(torch.from_numpy(self.exchange.losses))

    def waiting(self) -> dict[str, Any]:
        """Give the mean that has come and is still to be mixed in, by name; nothing if there is none."""
        return {} if self.under_way is None else self.flat.by_name(self.under_way.gradient)

    def due(self, due: Mapping[str, int]) -> int | None:
        """Find when a mean that is still to be mixed in is due, of all that a state has; None if there is none.

        Raises
        ------
        InvalidArgument
            If they are means of other fragments.
        """
        found = {due.get(name) for name in self.flat.names}
        if len(found) > 1:
            raise InvalidArgument("this state has averages under way of other fragments than those here")
        return found.pop()

    def load(self, outer: Mapping[str, Tensor], parameters: Mapping[str, Tensor], losses: Mapping[str, Tensor]) -> None:
        """Take the common parameters and what was lost from a state, and this rank's parameters, if it has them."""
        self.flat.load(outer, self.outer)
        if self.exchange.losses is not None:
            self.flat.load(losses, torch.from_numpy(self.exchange.losses))
        self.mix(0.0)
        for name, parameter in self.parameters.items() if parameters else ():
            parameter.detach().copy_(parameters[name].reshape(parameter.shape))

    def resume(self, version: int, sent: int, due: int | None, waiting: Mapping[str, Tensor]) -> None:
        """Go on after so many outer steps, with a mean that is still to be mixed in if one is due."""
        self.version, self.sent = version, sent
        if due is not None:
            mean = torch.empty_like(self.outer)
            self.flat.load(waiting, mean)
            self.under_way = UnderWay(due, mean, None, None)

    def keep_losses(self) -> HostArray | None:
        """Copy what compression has lost."""
        return None if self.exchange.losses is None else self.exchange.losses.copy()

    def abandon(self) -> None:
        """Forget the average under way: what it has not brought is in the next outer gradient."""
        self.sent = -1
        if self.under_way is None:
            return
        work, losses = self.under_way.work, self.under_way.losses
        self.under_way = None
        if work is not None:
            with suppress(Exception):  # whose reason the caller knows, or will know at the next call
                work.wait()
            if losses is not None and self.exchange.losses is not None:
                self.exchange.losses[...] = losses


def strided(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Deal a model's layers out, every ``count``-th to the same fragment.

    A layer is what has the same name up to its first number, or before its first dot if it has none.

    Raises
    ------
    InvalidArgument
        If there are fewer layers than fragments.
    """
    layers: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        words = name.split(".")
        number = next((at for at, word in enumerate(words) if word.isdigit()), 0)
        layers.setdefault(".".join(words[: number + 1]), {})[name] = parameter
    if len(layers) < count:
        raise InvalidArgument(f"fragments={count}: the model has {len(layers)} layers, {', '.join(layers)}")
    dealt: list[dict[str, nn.Parameter]] = [{} for _ in range(count)]
    for at, layer in enumerate(layers.values()):
        dealt[at % count] |= layer
    return dealt


def check_inner(inner: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse an inner optimizer of other parameters than the model's.

    Raises
    ------
    InvalidArgument
        If it lacks one, or has others.
    """
    held = {id(p) for group in inner.param_groups for p in group["params"] if p.requires_grad}
    lacking = [name for name, p in parameters.items() if id(p) not in held]
    foreign = len(held - {id(p) for p in parameters.values()})
    if lacking or foreign:
        what = f"lacks {lacking[0]!r}" if lacking else f"has {foreign} that are not the model's"
        raise InvalidArgument(f"the inner optimizer must have all trainable parameters of the model, but it {what}")
