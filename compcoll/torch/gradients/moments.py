"""Mean and second moments of per-sample gradients, for variance-based codecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from ...errors import InvalidArgument
from ..buffers import HostArray, array_of

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function that returns the mean loss of a model's outputs and targets, one sample per row."""


class Moments(NamedTuple):
    """Moments over the B samples z of a mini-batch.

    Attributes
    ----------
    loss : Tensor
        The mean loss.
    gradients : dict
        ``Σ ∇f_z / B``, by parameter name.
    second : dict
        ``Σ (∇f_z / B)²``, or an estimate of it, by parameter name.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor]
    second: Mapping[str, Tensor]


def observed(moments: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, HostArray]:
    """Copy the parameters' second moments to flat host arrays, in memory order as in DDP's buckets.

    Raises
    ------
    InvalidArgument
        If a parameter's moments are missing or have another shape.
    """
    found = {}
    for name, parameter in parameters.items():
        if name not in moments or moments[name].shape != parameter.shape:
            shape = list(moments[name].shape) if name in moments else "none"
            raise InvalidArgument(f"second moments of {name!r} need the shape {list(parameter.shape)}: got {shape}")
        kept = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        kept.copy_(torch.nan_to_num(moments[name], nan=0.0, posinf=0.0))
        here = kept.detach().cpu()  # array_of() views its memory, so it must stay alive
        found[name] = array_of(here).copy()
    return found


def of_samples(module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Moments:
    """Compute exact moments from the gradients of all single samples, in one batch."""
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def loss_of_one(parameters: Mapping[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(module, parameters, (x.unsqueeze(0),))
        return loss(outputs, target.unsqueeze(0))

    # Each sample needs its own random numbers, for dropout.
    each = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    with sdpa_kernel(SDPBackend.MATH):  # vmap runs the faster attention kernels one sample at a time
        gradients, losses = each(parameters, inputs, targets)
    count = len(inputs)
    second = {name: _wide(each).square().sum(0) / count**2 for name, each in gradients.items()}
    return Moments(losses.mean(), {name: each.mean(0) for name, each in gradients.items()}, second)


def _wide(values: Tensor) -> Tensor:
    """Convert 16-bit floats to float32; keep other types."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def of_micro_batches(module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, count: int) -> Moments:
    """Estimate the moments from the gradients of ``count`` equal parts of a mini-batch.

    The mini-batch has B samples, and each part b. Averaged over all ways to divide the mini-batch, the variance s² of
    the parts' gradients is 1/b of the variance of the samples' gradients. So the mean square of the samples' gradients
    is ``s² b (B - 1) / B`` plus the square of their mean. With one sample in each part, this is exact.
    """
    samples = len(inputs)
    if count < 2 or samples % count:
        raise InvalidArgument(f"micro_batches={count!r} must be 2 or more, and divide the {samples} samples")
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    means: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    total = torch.zeros(())
    for number, (x, target) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True), start=1):
        part = loss(module(x), target)
        total = total + part.detach() / count
        found = torch.autograd.grad(part, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is None and name not in means:
                continue
            # B. P. Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products", 1962.
            gradient = torch.zeros_like(means[name]) if gradient is None else _wide(gradient)
            mean = means.setdefault(name, torch.zeros_like(gradient))
            away = gradient - mean
            mean += away / number
            squares[name] = squares.get(name, torch.zeros_like(gradient)) + away * (gradient - mean)
    factor = (samples - 1) / (count * (count - 1))  # b (B - 1) / B; s² is the sum of squares / (count - 1)
    second = {name: (squares[name] * factor + mean.square()) / samples for name, mean in means.items()}
    unused = {name: torch.zeros_like(p) for name, p in parameters.items() if name not in means}
    return Moments(total, means, second | unused)


def back_propagate(model: DistributedDataParallel, inputs: Tensor, gradients: Mapping[str, Tensor]) -> None:
    """Run a backward pass that gives the parameters known gradients, so that DistributedDataParallel averages them.

    The forward pass is replaced by a function with these gradients.
    """
    module = model.module
    hidden = module.__dict__.get("forward")

    def forward(*_: object) -> Tensor:
        pairs = ((parameter, gradients[name]) for name, parameter in module.named_parameters() if name in gradients)
        return torch.stack([(p * gradient.to(p.dtype)).sum().float() for p, gradient in pairs]).sum()

    module.forward = forward
    try:
        model(inputs).backward()
    finally:
        if hidden is None:
            del module.forward
        else:
            module.forward = hidden
