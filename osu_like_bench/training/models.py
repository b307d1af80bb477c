"""Models for training: a small convolutional net, a small GPT, and a perceptron of any size. For well-known networks,
the shapes of their parameters, and a model with these shapes that computes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
"""Number of tokens of `GPT`, which are bytes."""


def convolutional(channels: int, classes: int, *, width: int = 32, reductions: int = 1) -> nn.Module:
    """Make a convolutional net that classifies small square images.

    Parameters
    ----------
    channels, classes : int
        Channels of an image, and number of classes.
    width : int
        Channels after the first convolution; doubled with every reduction.
    reductions : int
        How often height and width are halved.
    """
    layers: list[nn.Module] = []
    for level in range(reductions + 1):
        out = width << level
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU()]
        layers += [nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU()]
        if level < reductions:
            layers.append(nn.MaxPool2d(2))
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, classes))


class _Block(nn.Module):  # type: ignore[misc]
    """A transformer block: causal attention, then a perceptron; the output of each is added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm_perceptron = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attended(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.norm_perceptron(x))


class GPT(nn.Module):  # type: ignore[misc]
    """A decoder-only transformer on bytes.

    Parameters
    ----------
    context : int
        Maximum length of an input.
    layers, width, heads : int
        Number of blocks, features of a position, and attention heads.
    """

    def __init__(self, context: int = 128, *, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte, of shape (batch, length, 256), for bytes of shape (batch, length)."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.out(self.norm(self.blocks(x)))
        return logits


def perceptron(parameters: int, *, layers: int = 6, features: int = 64, classes: int = 10) -> nn.Module:
    """Make a perceptron with square hidden layers.

    Parameters
    ----------
    parameters : int
        Approximate number of parameters.
    layers : int
        Number of square layers.
    features, classes : int
        Sizes of the input and the output.
    """
    ends = features + classes + layers + 1
    width = max(round((math.sqrt(ends**2 + 4 * layers * parameters) - ends) / (2 * layers)), 1)
    hidden = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), *hidden, nn.Linear(width, classes))


def count(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


class Layer(NamedTuple):
    """A matrix or convolution, with its bias and norm.

    Attributes
    ----------
    shapes : list of tuple of int
        Shapes of the parameters.
    work : int
        Multiplications of the forward pass for an image or a token.
    """

    shapes: list[tuple[int, ...]]
    work: int

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def _resnet(*blocks: int) -> Iterator[Layer]:
    """Yield the layers of a ResNet of bottlenecks, with a norm after each convolution.

    See He et al., "Deep Residual Learning for Image Recognition", table 1. As in torchvision, the 3 × 3 convolution of
    a stage's first bottleneck halves height and width.
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
    """Yield the layers of BERT (Devlin et al., section 3): embeddings, encoder layers, pooler."""
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
"""Functions that return a network's layers, in the order of the forward pass."""


class _Back(torch.autograd.Function):  # type: ignore[misc]
    """An identity function whose backward pass sleeps, then returns fixed gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, seconds: float, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.seconds, ctx.gradients = seconds, gradients
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *came: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return came[0], None, None, *(gradient.clone() for gradient in ctx.gradients)


class Synthetic(nn.Module):  # type: ignore[misc]
    """A network that sleeps instead of computing, as if another device computed. Each layer sleeps in proportion to its
    work.

    Parameters
    ----------
    layers : sequence of Layer
        The layers, in the order of the forward pass.
    forward_seconds, backward_seconds : float
        Seconds that the two passes of a step take.
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
        """Return a scalar. Its back-propagation gives each parameter a random gradient, the same in every step."""
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
