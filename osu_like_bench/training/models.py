"""Small models of three kinds: a convolutional net, a GPT, and a perceptron of any size."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
"""Tokens of `GPT`: bytes."""


def convolutional(channels: int, classes: int, *, width: int = 32, reductions: int = 1) -> nn.Module:
    """A convolutional net for small square images.

    Parameters
    ----------
    channels, classes : int
        Of the images, and to tell apart.
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
    """Attention to earlier positions, then a perceptron; each added to its input."""

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
        Most positions of an input.
    layers, width, heads : int
        Blocks, features of a position, and attention heads.
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
        """Logits of each next byte: (batch, length) to (batch, length, 256)."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.out(self.norm(self.blocks(x)))
        return logits


def perceptron(parameters: int, *, layers: int = 6, features: int = 64, classes: int = 10) -> nn.Module:
    """A perceptron with square hidden layers of about as many parameters as asked for.

    Parameters
    ----------
    parameters : int
        How many.
    layers : int
        Square layers.
    features, classes : int
        Of the input and the output.
    """
    ends = features + classes + layers + 1
    width = max(round((math.sqrt(ends**2 + 4 * layers * parameters) - ends) / (2 * layers)), 1)
    hidden = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), *hidden, nn.Linear(width, classes))


def count(model: nn.Module) -> int:
    """Parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
