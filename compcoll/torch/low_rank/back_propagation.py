"""Hooks to which back-propagation hands its gradients: one by one, or in the buckets of DistributedDataParallel."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import GradientsPending
from ..buffers import is_dense
from ..hooks import BucketHook, FilledBucket, HookErrors
from .averaging import Averaging
from .fusion import Buffer, Kind, fuse


class DDPGradients:
    """The buckets of DistributedDataParallel as fusion buffers.

    Parameters
    ----------
    averaging : Averaging
        Gets the gradients.
    model : DistributedDataParallel
        Takes the hook.
    name : str
        Of the hook, for messages.
    """

    def __init__(self, averaging: Averaging, model: DistributedDataParallel, name: str) -> None:
        self._averaging = averaging
        self._gradients = {gradient.name: gradient for gradient in averaging.gradients}
        self._parameters = dict(model.module.named_parameters())
        self._buffers: dict[tuple[Kind, int], Buffer] = {}
        self.hook = BucketHook(model, name, self._begin, self._start, self._end)
        self.errors, self.remove = self.hook.errors, self.hook.remove

    def _begin(self) -> None:
        self._now = self._averaging.begin()
        self._under_way: list[tuple[Future[Tensor], Tensor]] = []
        self._targets: dict[str, Tensor] = {}

    def _start(self, bucket: FilledBucket) -> Future[Tensor]:
        for name, part in zip(bucket.names, self.hook.split(bucket.names, bucket.memory), strict=True):
            self._targets[name] = _shaped(part, self._parameters[name])
        buffer = self._buffers.get((self._now, bucket.number))
        if buffer is None or tuple(gradient.name for gradient in buffer.gradients) != bucket.names:
            # DDP makes its buckets anew after the first step.
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
        self.errors.instead(self._finish, None)()
        for future, memory in self._under_way:
            future.set_result(memory)

    def _finish(self) -> None:
        """Make means of the gradients of all buckets."""
        used = self._averaging.wait()
        self._averaging.finish({n: values for n, values in self._targets.items() if used is None or n in used})


def _shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """View the flat part of a bucket's memory that holds a parameter's gradient in the parameter's shape.

    DDP stores a gradient with the strides of its parameter, if that has neither gaps nor overlaps, and complex numbers
    as pairs.
    """
    if parameter.is_complex() and not part.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    return part.as_strided(parameter.shape, parameter.stride()) if is_dense(parameter) else part.view(parameter.shape)


class GradientHooks:
    """Hooks on parameters: a gradient is put into its buffer as soon as it is there, and full buffers are sent while
    back-propagation goes on, in an order that is the same on all ranks; at its end all gradients are means.

    Parameters
    ----------
    averaging
        As of `DDPGradients`.
    model : torch.nn.Module
        Its parameters and buffers become those of rank 0.
    group : torch.distributed.ProcessGroup
        The ranks.
    nbytes : float
        Uncompressed bytes of a fusion buffer.
    overlap : bool
        Whether to send before back-propagation has ended.

    Attributes
    ----------
    enabled : bool
        Whether gradients are averaged, rather than accumulated.
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
        self.errors = HookErrors()
        root = dist.get_global_rank(group, 0)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                # Backends send memory as it lies, which may be in another order on another rank.
                values = tensor.detach().contiguous()
                dist.broadcast(values, root, group=group)
                if not tensor.is_contiguous():
                    once = tuple(slice(None if stride else 1) for stride in tensor.stride())  # of expanded dimensions
                    tensor[once].copy_(values[once])
        me = weakref.ref(self)

        def check_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
            hooks = me()
            if hooks is not None:
                hooks._check_step(optimizer)

        self._handles = [p.register_post_accumulate_grad_hook(self.put) for p in self._parameters.values()]
        self._handles.append(model.register_forward_pre_hook(self._forget_interrupted))
        self._handles.append(register_optimizer_step_pre_hook(check_step))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def put(self, parameter: Tensor) -> None:
        """Take a gradient that is there; called by back-propagation."""
        name = self._names[id(parameter)]
        # What is accumulated without being averaged is part of the next average, even if that pass does not use it.
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
        self.errors.begin()
        kind = self._averaging.begin()
        if kind not in self._layouts:
            # Memory for exact steps is not kept beyond them.
            self._layouts.pop(Kind.EXACT, None)
            gradients, device = self._averaging.gradients, next(iter(self._parameters.values())).device
            self._layouts[kind] = fuse(gradients, kind, self._nbytes, device, flagged=True)
        for buffer in self._layouts[kind]:
            self._averaging.take(buffer)
            for gradient in buffer.gradients:
                self._homes[gradient.name] = buffer
        self._under_way = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """Average what is there: back-propagation calls this at its end, and raises what this does."""
        try:
            self._finish()
        except Exception as error:
            self.errors.error = error
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
        """Forget, before a forward pass, the last back-propagation if an error ended it before it came to its end."""
        if self._under_way and torch._C._current_graph_task_id() == -1:
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
    """Find the hooks that take a parameter's gradient already, if any do."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    owners = (getattr(hook, "__self__", None) for hook in hooks.values())
    return next((owner for owner in owners if isinstance(owner, GradientHooks)), None)
