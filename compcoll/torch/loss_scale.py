"""The loss scale of automatic mixed precision, which multiplies gradients and their residuals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import InvalidArgument
from . import private
from .hooks import call_before_steps


class LossScale:
    """Finds the `torch.amp.GradScaler` that scales the loss of some parameters; users need not name it.

    A scaler stores which optimizers it steps. So the first step of an optimizer of these parameters shows which scaler
    it is, or that there is none. Until then, the common scale of the scalers in use in this process is assumed.

    Parameters
    ----------
    parameters : iterable of Tensor
        Parameters whose gradients are scaled.

    Attributes
    ----------
    unit : float
        Loss scale by which stored values, such as residuals, are multiplied; 1 without a scaler.

    Raises
    ------
    InvalidArgument
        By the optimizer's ``step()``, if its first step shows that a loaded state was added to gradients of another
        scale than assumed.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        # Before the first step: all scalers in use. After it: the one that scales these gradients, if any.
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] | None = None
        self._certain = False
        self._step: tuple[object, ...] = ()
        self.restart(loaded=False)
        self._hook = call_before_steps(self._at_step)

    @property
    def possible(self) -> bool:
        """Whether a scaler may skip the optimizer's step for the current gradients."""
        return bool(self._scalers)

    @property
    def ended(self) -> bool:
        """Whether the scaler has made or skipped the optimizer's step of the last backward pass."""
        now = self._steps()
        return len(now) != len(self._step) or any(a is not b for a, b in zip(now, self._step, strict=True))

    def restart(self, *, loaded: bool) -> None:
        """Restart without stored values, or with those of a loaded state, which are unscaled."""
        self.unit, self._loaded, self._begun = 1.0, loaded, False

    def begin(self) -> float:
        """Begin a backward pass; return the factor that converts stored values to the unit of its gradients.

        Raises
        ------
        InvalidArgument
            If that unit is not known yet, and a state was loaded.
        """
        now = self._now()
        self._step = self._steps()
        if now is None and self._loaded:
            raise InvalidArgument(
                "several GradScalers with different scales are in use. Only the optimizer's first step shows which of "
                "them scales this loss, but the residuals of the loaded state are needed before. Give all scalers the "
                "same scale first: scaler.update(new_scale=...)"
            )
        self._begun = True
        before, self.unit = self.unit, self.unit if now is None else now
        return self.unit / before

    def _steps(self) -> tuple[object, ...]:
        """Return objects that identify the optimizer's current step; the scaler replaces them when the step is over."""
        scalers = [scaler for each in self._scalers or () if (scaler := each()) is not None]
        return tuple(private.scaler_states(scaler) for scaler in scalers)  # `update` makes a new one

    def free(self) -> None:
        """Stop observing optimizer steps."""
        self._hook.remove()

    def _now(self) -> float | None:
        """Return the scale of the current gradients: 1 without a scaler, None if the candidates' scales differ."""
        if self._scalers is None:
            self._scalers = [weakref.ref(scaler) for scaler in _scalers() if private.has_scaled(scaler)]
        scales = {float(scaler.get_scale()) for each in self._scalers if (scaler := each()) is not None} or {1.0}
        return scales.pop() if len(scales) == 1 else None

    def _at_step(self, optimizer: torch.optim.Optimizer) -> None:
        own = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if self._parameters.isdisjoint(own):
            return
        gone = any(scaler() is None for scaler in self._scalers or ())
        if self._certain and not gone:
            return
        first, self._certain = not self._certain, True
        stepping = [scaler for scaler in _scalers() if id(optimizer) in private.scaler_states(scaler)]
        self._scalers = list(map(weakref.ref, stepping[:1]))
        taken, found = self.unit, self._now()
        if not (first and self._begun) or found is None or found == taken:
            return
        self.unit = found
        if self._loaded:
            raise InvalidArgument(
                f"the residuals of the loaded state were multiplied by the scale of {taken:g} of another GradScaler in "
                f"this process, but these gradients were scaled by {found:g}: load the state again; the next steps "
                "use the right scale"
            )


def _scalers() -> list[torch.amp.GradScaler]:
    """Return all GradScalers of this process that are enabled."""
    kinds: list[type] = [torch.amp.GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    found = [each for each in gc.get_referrers(*kinds) if type(each) in kinds]  # an object refers to its class
    return [scaler for scaler in found if scaler.is_enabled()]
