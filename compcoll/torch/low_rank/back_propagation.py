"""Hooks that receive gradients from back-propagation, one by one or in DistributedDataParallel's buckets."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...errors import GradientsPending
from .. import private
from ..buffers import is_dense
from ..hooks import BucketHook, FilledBucket, call_before_steps
from .averaging import Averaging
from .fusion import Buffer, Kind, fuse


class DDPGradients:
    """A DistributedDataParallel communication hook that uses the buckets as fusion buffers.

    Parameters
    ----------
    averaging : Averaging
        Receives the gradients.
    model : DistributedDataParallel
        Gets the hook.
    name : str
        Name of the hook, for messages.
    """

    def __init__(self, averaging: Averaging, model: DistributedDataParallel, name: str) -> None:
        self._averaging = averaging
        self._gradients = {gradient.name: gradient for gradient in averaging.gradients}
        self._parameters = dict(model.module.named_parameters())
        self._buffers: dict[tuple[Kind, int], Buffer] = {}
        self.hook = BucketHook(model, name, self._begin, self._start, self._end)
        self.remove = self.hook.remove

    @property
    def error(self) -> BaseException | None:
        """The first error of the last backward pass; None if there was none."""
        return self.hook.error

    def _begin(self) -> None:
        self._now = self._averaging.begin()
        self._under_way: list[tuple[Future[Tensor], Tensor]] = []
        self._targets: dict[str, Tensor] = {}

    def _start(self, bucket: FilledBucket) -> Future[Tensor]:
        for name, part in zip(bucket.names, self.hook.split(bucket.names, bucket.memory), strict=True):
            self._targets[name] = _shaped(part, self._parameters[name])
        buffer = self._buffers.get((self._now, bucket.number))
        if buffer is None or tuple(gradient.name for gradient in buffer.gradients) != bucket.names:
            # DDP rebuilds its buckets after the first step.
            flags = len(self._gradients) if self.hook.used is not None and bucket.last else 0
            gradients = [self._gradients[name] for name in bucket.names]
            buffer = self._buffers[self._now, bucket.number] = Buffer(gradients, self._now, bucket.memory.device, flags)
        self._averaging.take(buffer)
        for gradient in buffer.gradients:
            self._averaging.put(buffer, gradient, self._targets[gradient.name])
        self._averaging.send(self.hook.used or ())
        future: Future[Tensor] = Future(devices=[bucket.memory.device] if bucket.memory.is_cuda else [])
        self._under_way.append((future, bucket.memory))
        return future

    def _end(self) -> None:
        self.hook.guarded(self._finish, None)()
        for future, memory in self._under_way:
            future.set_result(memory)

    def _finish(self) -> None:
        """Overwrite the gradients of all buckets with their means."""
        used = self._averaging.wait()
        self._averaging.finish({n: values for n, values in self._targets.items() if used is None or n in used})


def _shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a view, in the parameter's shape, of the flat part of a bucket that holds its gradient.

    DDP stores a gradient with the parameter's strides if the parameter has neither gaps nor overlaps. It stores complex
    numbers as pairs.
    """
    if parameter.is_complex() and not part.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    return part.as_strided(parameter.shape, parameter.stride()) if is_dense(parameter) else part.view(parameter.shape)


class GradientHooks:
    """Hooks on parameters that average gradients while back-propagation continues.

    Each gradient is put into its buffer when it is ready. Full buffers are sent in the same order on all ranks. When
    back-propagation ends, all gradients are means.

    Parameters
    ----------
    averaging : Averaging
        Receives the gradients.
    model : torch.nn.Module
        Its parameters and buffers become those of rank 0.
    group : torch.distributed.ProcessGroup
        The ranks.
    nbytes : float
        Uncompressed size of a fusion buffer in bytes.
    overlap : bool
        Whether to send buffers before back-propagation ends.

    Attributes
    ----------
    enabled : bool
        Whether gradients are averaged, rather than accumulated.
    error : BaseException or None
        The error of the last backward pass; None if there was none.
    """

    def __init__(
        self, averaging: Averaging, model: nn.Module, group: dist.ProcessGroup, nbytes: float, *, overlap: bool
    ) -> None:
        self.enabled, self._under_way = True, False
        self._averaging, self._nbytes, self._overlap = averaging, nbytes, overlap
        parameters = dict(model.named_parameters())
        self._parameters = {gradient.name: parameters[gradient.name] for gradient in averaging.gradients}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._gradients = {gradient.name: gradient for gradient in averaging.gradients}
        self._layouts: dict[Kind, list[Buffer]] = {}
        self._homes: dict[str, Buffer] = {}
        self._used: set[str] = set()
        self.error: BaseException | None = None
        root = dist.get_global_rank(group, 0)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                # Backends send memory in storage order, which may differ between ranks.
                values = tensor.detach().contiguous()
                dist.broadcast(values, root, group=group)
                if not tensor.is_contiguous():
                    once = tuple(slice(None if stride else 1) for stride in tensor.stride())  # index 0 of expanded dims
                    tensor[once].copy_(values[once])
        self._handles = [p.register_post_accumulate_grad_hook(self.put) for p in self._parameters.values()]
        self._handles.append(model.register_forward_pre_hook(self._forget_interrupted))
        self._handles.append(call_before_steps(self._check_step))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def put(self, parameter: Tensor) -> None:
        """Put a ready gradient into its buffer; back-propagation calls this."""
        name = self._names[id(parameter)]
        # Accumulated gradients are part of the next average, even if that pass does not use their parameters.
        self._used.add(name)
        if not self.enabled:
            return
        if not self._under_way:
            self._begin()
        buffer = self._homes[name]
        if buffer.sent:
            raise GradientsPending(
                f"the gradient of {name!r} changed after it was sent: with reentrant checkpoints, give overlap=False"
            )
        self._averaging.put(buffer, self._gradients[name], parameter.grad)
        if self._overlap:
            self._averaging.send(self._used)

    def _begin(self) -> None:
        self.error = None
        kind = self._averaging.begin()
        if kind not in self._layouts:
            # Exact steps come first, so their buffers are not needed again.
            self._layouts.pop(Kind.EXACT, None)
            gradients, device = self._averaging.gradients, next(iter(self._parameters.values())).device
            self._layouts[kind] = fuse(gradients, kind, self._nbytes, device, flagged=True)
        for buffer in self._layouts[kind]:
            self._averaging.take(buffer)
            for gradient in buffer.gradients:
                self._homes[gradient.name] = buffer
        self._under_way = True
        private.at_end_of_backward(self._end)

    def _end(self) -> None:
        """Average the gradients; back-propagation calls this at its end, and propagates its exceptions."""
        try:
            self._finish()
        except Exception as error:
            self.error = error
            raise

    def _finish(self) -> None:
        averaging = self._averaging
        for name, gradient in self._gradients.items():
            if name in self._homes[name].due:
                averaging.put(self._homes[name], gradient, self._parameters[name].grad)
        averaging.send(self._used)
        used, targets = averaging.wait() or (), dict[str, Tensor]()
        for name, parameter in self._parameters.items():
            if name in used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                targets[name] = parameter.grad
        averaging.finish(targets)
        self._used.clear()
        self._under_way = False

    def _forget_interrupted(self, model: nn.Module, arguments: Any) -> None:
        """Before a forward pass, discard a back-propagation that an error interrupted."""
        if self._under_way and private.backward_pass() == -1:
            self._averaging.wait()
            self._under_way = False

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._under_way:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._names:
                    raise GradientsPending(
                        f"an optimizer's step uses the gradient of {self._names[id(parameter)]!r}, which is not "
                        "averaged yet: step after backward() has returned, not in hooks on gradients"
                    )


def hooks_of(parameter: Tensor) -> GradientHooks | None:
    """Return the hooks that already average a parameter's gradient; None if there are none."""
    owners = (getattr(hook, "__self__", None) for hook in private.gradient_hooks(parameter))
    return next((owner for owner in owners if isinstance(owner, GradientHooks)), None)
