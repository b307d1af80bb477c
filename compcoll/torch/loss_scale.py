"""The scale of a loss (automatic mixed precision): which GradScaler has it, and what it is now."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class LossScale:
    """Finds the `torch.amp.GradScaler` that scales the loss of some parameters, without being told.

    A scaler keeps which optimizers it steps. So the first step of an optimizer of these parameters tells which scaler
    it is, or that there is none. Until then the only scaler in use in this process is taken for it.

    Parameters
    ----------
    parameters : iterable of Tensor
        Those whose gradients are scaled.

    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self._looked = self._certain = self._several = False
        here = weakref.ref(self)  # the hook is PyTorch's, and may live longer

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (scale := here()) is not None:
                scale._at_step(optimizer)

        self._hook = register_optimizer_step_pre_hook(hook)

    @property
    def possible(self) -> bool:
        """Whether a scaler may skip the step of the gradients of now."""
        return self._several or self._scaler is not None

    def now(self) -> float:
        """Find the scale of the gradients of now: 1 without a scaler."""
        if not self._looked:
            self._looked = True
            used = [scaler for scaler in _scalers() if scaler._scale is not None]
            self._several = len(used) > 1
            self._scaler = weakref.ref(used[0]) if len(used) == 1 else None
        scaler = None if self._scaler is None else self._scaler()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def free(self) -> None:
        """Look at no more steps of optimizers."""
        self._hook.remove()

    def _at_step(self, optimizer: torch.optim.Optimizer) -> None:
        own = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if self._parameters.isdisjoint(own):
            return
        gone = self._scaler is not None and self._scaler() is None
        if self._certain and not gone:
            return
        self._looked = self._certain = True
        self._several = False
        stepping = (weakref.ref(scaler) for scaler in _scalers() if id(optimizer) in scaler._per_optimizer_states)
        self._scaler = next(stepping, None)


def _scalers() -> list[torch.amp.GradScaler]:
    """All GradScalers of this process that are enabled."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler)]
    return [scaler for scaler in found if scaler.is_enabled()]
