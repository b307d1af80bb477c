"""Muon for the hidden layers' matrices, and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from osu_like_bench import UsageError

RATE = 0.02
"""Muon's learning rate: the best of 0.005, 0.01, 0.02 and 0.04 on the task text without compression."""


class MuonAndAdamW:
    """Steps two optimizers: `torch.optim.Muon` accepts matrices only, and does not suit embeddings and last layers.

    Parameters
    ----------
    model : torch.nn.Module
        The model. Matrices are its parameters of two dimensions, except those of embeddings and of the last linear
        layer.
    rate : float
        Learning rate of AdamW.
    decay : float
        Weight decay of both.

    Raises
    ------
    UsageError
        If the model has no such matrix.
    """

    def __init__(self, model: nn.Module, rate: float, decay: float) -> None:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        held = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} | {linear[-1].weight}
        parameters = list(model.parameters())
        matrices = [parameter for parameter in parameters if parameter.ndim == 2 and parameter not in held]
        if not matrices:
            raise UsageError("--optimizer muon needs matrices between embeddings and last layer: --task text")
        chosen = set(matrices)
        others = [parameter for parameter in parameters if parameter not in chosen]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=RATE, weight_decay=decay),
            torch.optim.AdamW(others, lr=rate, weight_decay=decay),
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of both."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        """Reset all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        """Update all parameters."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both, by the optimizers' names."""
        return {type(optimizer).__name__: optimizer.state_dict() for optimizer in self.optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of both."""
        for optimizer in self.optimizers:
            optimizer.load_state_dict(state[type(optimizer).__name__])
