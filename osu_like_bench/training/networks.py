"""Well-known networks by the shapes of their parameters, and a model of such shapes that computes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Layer(NamedTuple):
    """A matrix or convolution, and what belongs to it.

    Attributes
    ----------
    shapes : list of tuple of int
        Of its parameters.
    work : int
        Multiplications of the forward pass for an image or a token.
    """

    shapes: list[tuple[int, ...]]
    work: int

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def _resnet(*blocks: int) -> Iterator[Layer]:
    """He et al., "Deep Residual Learning for Image Recognition", table 1: bottlenecks; norms after each convolution.

    As in torchvision, the 3 × 3 convolution of a stage's first bottleneck halves height and width.
    """

    def convolution(out: int, into: int, size: int, height: int) -> Layer:
        return Layer([(out, into, size, size), (out,), (out,)], out * into * size**2 * height**2)

    yield convolution(64, 3, 7, 112)
    into, before = 64, 56
    for stage, count in enumerate(blocks):
        width, height = 64 << stage, 56 >> stage
        for block in range(count):
            yield convolution(width, into, 1, before)
            yield convolution(width, width, 3, height)
            yield convolution(4 * width, width, 1, height)
            if block == 0:
                yield convolution(4 * width, into, 1, height)
            into, before = 4 * width, height
    yield Layer([(1000, into), (1000,)], 1000 * into)


def _bert(layers: int, width: int) -> Iterator[Layer]:
    """Devlin et al., "BERT", section 3: embeddings, encoder layers, pooler."""
    norm = [(width,), (width,)]

    def linear(out: int, into: int, *more: tuple[int, ...]) -> Layer:
        return Layer([(out, into), (out,), *more], out * into)

    for rows in (30522, 512):
        yield Layer([(rows, width)], 0)
    yield Layer([(2, width), *norm], 0)
    for _ in range(layers):
        for _ in range(3):
            yield linear(width, width)
        yield linear(width, width, *norm)
        yield linear(4 * width, width)
        yield linear(width, 4 * width, *norm)
    yield linear(width, width)


NETWORKS: Mapping[str, Callable[[], list[Layer]]] = {
    "resnet50": lambda: list(_resnet(3, 4, 6, 3)),
    "resnet152": lambda: list(_resnet(3, 8, 36, 3)),
    "bert-base": lambda: list(_bert(12, 768)),
    "bert-large": lambda: list(_bert(24, 1024)),
}
"""Functions that list a network's layers, in the order in which the forward pass uses them."""


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
