"""Networks by their shapes, with a back-propagation that takes time, and computes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .networks import Layer


class _Back(torch.autograd.Function):  # type: ignore[misc]
    """Hands on what comes; back, gives given gradients after some time."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, seconds: float, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.seconds, ctx.gradients = seconds, gradients
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *came: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return came[0], None, None, *(gradient.clone() for gradient in ctx.gradients)


class Synthetic(nn.Module):  # type: ignore[misc]
    """A network of given layers. Each takes its share of the work; a device elsewhere would compute: it sleeps.

    Parameters
    ----------
    layers : sequence of Layer
        In the forward pass's order.
    forward_seconds, backward_seconds : float
        Of a step.
    """

    def __init__(self, layers: Sequence[Layer], *, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        shapes = [shape for layer in layers for shape in layer.shapes]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self._forward_seconds = forward_seconds
        work = sum(layer.work for layer in layers)
        self._seconds = [backward_seconds * layer.work / work for layer in layers]
        self._counts = [len(layer.shapes) for layer in layers]
        self._gradients: list[Tensor] = []

    def forward(self) -> Tensor:
        """A scalar; back-propagation from it gives every parameter the same random gradient in each step."""
        if not self._gradients:
            self._gradients = [torch.randn_like(parameter) for parameter in self.weights]
        time.sleep(self._forward_seconds)
        token = torch.zeros((), requires_grad=True)
        begin = 0
        for count, seconds in zip(self._counts, self._seconds, strict=True):
            end = begin + count
            token = _Back.apply(token, seconds, self._gradients[begin:end], *self.weights[begin:end])
            begin = end
        return token
