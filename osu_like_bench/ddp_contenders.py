"""Ways to reduce the gradients of a DistributedDataParallel model, by name. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll.codecs import Codec
from compcoll.registry import get_codec
from compcoll.torch.low_rank.averaging import Power, Product
from compcoll.torch.low_rank.fusion import Buffer, Wait

from .errors import UsageError

_ONE_BUCKET_MB = 1 << 20


def _options(text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in text.split(":") if text else ():
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"{part!r}: options are written as name=value, such as rate=8")
        try:
            options[name] = float(value) if not value.isdigit() else int(value)
        except ValueError:
            options[name] = value == "True" if value in ("True", "False") else value
    return options


def codec_of(text: str) -> Codec:
    """Make the codec that is written as its name and options, such as ``minmax:bits=4:block=512``."""
    name, _, options = text.partition(":")
    return get_codec(name, **_options(options))


def _bf16(group: dist.ProcessGroup) -> tuple[Any, Any]:
    # DDP refuses the hook by its name where there is no NCCL, though gloo adds bfloat16 well.
    def hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        return default_hooks.bf16_compress_hook(state, bucket)

    return group, hook


def _powersgd(hook: Any, group: dist.ProcessGroup, rank: int = 1) -> tuple[Any, Any]:
    return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2), hook


HOOKS: Mapping[str, Callable[..., tuple[Any, Any]]] = {
    "fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "bf16": _bf16,
    "powersgd": partial(_powersgd, powerSGD_hook.powerSGD_hook),
    "batched_powersgd": partial(_powersgd, powerSGD_hook.batched_powerSGD_hook),
    "quantization": lambda group: (group, quantization_hooks.quantization_pertensor_hook),
}
"""PyTorch's own hooks: each takes a group and options, and makes a state and a hook."""


def _exact(model: nn.Module, **given: Any) -> Any:
    """S-SGD by the same hooks and buffers: no step is compressed."""
    return compcoll.torch.ACPSGD(model, rank=1, exact_steps=1 << 62, **given)


class _LateRights(Power):
    """Power-SGD whose right factors all leave when back-propagation has ended: what sending them earlier gains."""

    def _start(self, buffer: Buffer) -> Wait:
        return buffer.start(self.sums, self.account, self.ranks)

    def _products(self, buffers: Sequence[Buffer]) -> tuple[list[Product], list[Buffer]]:
        waits = []
        for buffer in buffers:
            if (right := self._right_of(buffer)) is not None:
                self._fill(right, buffer)
                waits.append(right.start(self.sums, self.account, self.ranks))
        for wait in waits:
            wait()
        return super()._products(buffers)


class _LatePowerSGD(compcoll.torch.PowerSGD):
    _method = _LateRights


LOW_RANK: Mapping[str, Callable[..., Any]] = {
    "acpsgd": compcoll.torch.ACPSGD,
    "powersgd": compcoll.torch.PowerSGD,
    "powersgd-late": _LatePowerSGD,
    "ssgd": _exact,
}
"""compcoll's hooks on parameters, or on DistributedDataParallel with ``ddp=True``; each takes its options."""


@dataclass(frozen=True)
class Contender:
    """A way to reduce gradients, as the command line names it."""

    name: str
    compresses: bool
    make: Callable[[nn.Module, dist.ProcessGroup, float], tuple[nn.Module, Any]]


def parse(text: str, *, feedback: bool, algorithm: str) -> list[Contender]:
    """Contenders by name.

    Parameters
    ----------
    text : str
        Separated by commas: one of `LOW_RANK`, ``gloo``, ``gloo+HOOK`` with one of `HOOKS`, ``compcoll``,
        ``compcoll+CODEC``, ``group`` and ``group+CODEC`` (over gloo, whoever started the ranks); options behind colons,
        such as ``compcoll+minmax:bits=4:block=512`` or ``acpsgd:rank=4``.
    feedback, algorithm
        Of compcoll's, as `compcoll.torch.compress` takes them.
    """
    return [_contender(name.strip(), feedback, algorithm) for name in text.split(",")]


def _contender(name: str, feedback: bool, algorithm: str) -> Contender:
    base, plus, rest = name.partition("+")
    method, _, options = base.partition(":")
    if method in LOW_RANK and not plus:
        return _low_rank(name, LOW_RANK[method], _options(options))
    if base in ("compcoll", "group"):
        over = "auto" if base == "compcoll" else "group"
        codec = codec_of(rest) if plus else None

        def compress(model: nn.Module, group: dist.ProcessGroup, bucket: float) -> tuple[nn.Module, Any]:
            wrapped = _wrapped(model, group, bucket)
            return wrapped, compcoll.torch.compress(wrapped, codec, feedback=feedback, algorithm=algorithm, over=over)

        return Contender(name, codec is not None, compress)
    if name == "backend":
        return Contender(name, False, _on_backend)
    if base != "gloo" or (plus and rest.partition(":")[0] not in HOOKS):
        raise UsageError(
            f"there is no contender {name!r}: {', '.join(LOW_RANK)}, gloo, gloo+{', gloo+'.join(HOOKS)}, backend, "
            "compcoll, group, or compcoll+CODEC and group+CODEC such as compcoll+zfp:rate=8"
        )
    return _gloo(name, rest)


def _gloo(name: str, hook: str) -> Contender:
    """DDP on gloo, with one of `HOOKS` and its options if there is any."""
    chosen, _, options = hook.partition(":")
    given = _options(options)

    def hooked(model: nn.Module, group: dist.ProcessGroup, bucket: float) -> tuple[nn.Module, Any]:
        # With several buckets in flight, PowerSGD's collectives meet others' on gloo.
        wrapped = _wrapped(model, group, _ONE_BUCKET_MB if chosen.endswith("powersgd") else bucket)
        if hook:
            try:
                wrapped.register_comm_hook(*HOOKS[chosen](group, **given))
            except TypeError as error:
                raise UsageError(f"{name}: {error}") from error
        return wrapped, None

    return Contender(name, bool(hook), hooked)


def _on_backend(model: nn.Module, group: dist.ProcessGroup, bucket: float) -> tuple[nn.Module, Any]:
    """Let DDP itself reduce on a process group of compcoll's, without compression."""
    return _wrapped(model, dist.new_group(backend="compcoll"), bucket), None


def _low_rank(name: str, method: Callable[..., Any], given: dict[str, Any]) -> Contender:
    wrap = given.pop("ddp", False)

    def make(model: nn.Module, group: dist.ProcessGroup, bucket: float) -> tuple[nn.Module, Any]:
        # compcoll counts in MiB, PyTorch, too.
        own = {} if wrap else {"buffer_mb": bucket}
        model = _wrapped(model, group, bucket) if wrap else model
        try:
            return model, method(model, **(own | given))
        except TypeError as error:
            raise UsageError(f"{name}: {error}") from error

    return Contender(name, method is not _exact, make)


def _wrapped(model: nn.Module, group: dist.ProcessGroup, bucket: float) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket, gradient_as_bucket_view=True)
