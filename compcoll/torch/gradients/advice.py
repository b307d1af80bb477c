"""Advice from the studies on methods under an optimizer: docs/measurements/study-text.md."""

from __future__ import annotations

import math
import warnings

import torch

from ...codecs import Codec
from ...errors import InvalidArgument

_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
_MUCH = 0.9
"""Momentum of SGD from which on methods whose gradients come late were seen to lose."""

# What ended more than 2 % above uncompressed gradients.
_UNDER_ADAM = {
    "onebit": "it ended at 2.72 nats, and uncompressed gradients at 2.29",
    "topk": "1 % of the elements ended at 2.82 nats, and uncompressed gradients at 2.29",
    "variance": "it ended at 2.50 nats, and uncompressed gradients at 2.29",
    "minmax": "2 bits a value ended at 2.52 nats, and uncompressed gradients at 2.29",
    "zfp": "4 bits a value diverged",
}
_AT_MOST: dict[str, tuple[str, float]] = {"minmax": ("bits", 2), "zfp": ("rate", 4)}
"""Of methods that fail with few bits alone: the option that tells them, and the most that was seen to fail."""
_UNDER_MOMENTUM = {
    "onebit": "it ended at 3.17 nats, and uncompressed gradients at 2.45",
    "topk": "1 % of the elements ended at 2.70 nats, and uncompressed gradients at 2.45",
    "variance": "it ended at 2.56 nats, and uncompressed gradients at 2.45",
    "hybrid": "it ended at 2.93 nats, and uncompressed gradients at 2.45",
}
_warned: set[tuple[str, str]] = set()


def advise(codec: Codec | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn, once for each pair, of a codec of gradients that was measured not to go with an optimizer.

    Raises
    ------
    InvalidArgument
        If it is no optimizer.
    """
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer={optimizer!r}: the torch.optim.Optimizer of the model's parameters is needed")
    if codec is None:
        return
    kind = type(optimizer).__name__
    instead = "compcoll.torch.OneBitAdam, which compresses the momentum, or DiLoCo"
    if isinstance(optimizer, _ADAMS):
        option, most = _AT_MOST.get(codec.name, ("", math.inf))
        enough = (getattr(codec, option, None) or math.inf) > most
        measured = None if enough else _UNDER_ADAM.get(codec.name)
    elif max(group.get("momentum", 0.0) for group in optimizer.param_groups) >= _MUCH:
        measured = _UNDER_MOMENTUM.get(codec.name)
        kind, instead = f"{kind} with a momentum of {_MUCH:g} or more", "a smaller momentum, or compcoll.torch.DGC"
    else:
        measured = None
    if measured is None or (codec.name, kind) in _warned:
        return
    _warned.add((codec.name, kind))
    warnings.warn(
        f"codec={codec.name!r} on gradients does not go with {kind}: in the study of a small GPT {measured}. Take "
        f"{instead} (docs/measurements/study-text.md)",
        stacklevel=3,
    )
