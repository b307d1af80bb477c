"""What a GradScaler hands to an optimizer that decides itself which steps to skip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidArgument

SUPPORTED = "_step_supports_amp_scaling"
"""The attribute by which `torch.amp.GradScaler` sees that it must not skip an optimizer's steps itself: a rank alone
would skip them. It sets ``found_inf`` and ``grad_scale`` then, while ``step()`` runs, and deletes them afterwards.
"""


class Scaling(NamedTuple):
    """What a GradScaler found.

    Attributes
    ----------
    overflowed : bool
        Whether a gradient of this rank holds Inf or NaN.
    scale : float
        What the gradients are still to be divided by.
    """

    overflowed: bool
    scale: float


@contextmanager
def scaling_of(optimizer: torch.optim.Optimizer) -> Iterator[Scaling | None]:
    """Read what the GradScaler that calls ``step()`` has found; None without a scaler.

    After an error the scaler deletes nothing, and would multiply its next scale by what is left: it is deleted here.
    """
    found = getattr(optimizer, "found_inf", None)
    scale = getattr(optimizer, "grad_scale", None)
    try:
        yield None if found is None else Scaling(bool(float(found)), 1.0 if scale is None else float(scale))
    except BaseException:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        raise


def unscale(parameters: Iterable[Tensor], scale: float) -> None:
    """Divide the parameters' gradients by a scale.

    Raises
    ------
    InvalidArgument
        If one is of float16, in which small gradients would be lost, as `torch.amp.GradScaler.unscale_` refuses it.
    """
    if scale == 1.0:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise InvalidArgument("gradients of float16 cannot be unscaled: keep parameters in float32 under autocast")
    for gradient in gradients:
        (gradient._values() if gradient.is_sparse else gradient).div_(scale)
