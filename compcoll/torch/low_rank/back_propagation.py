"""Hooks to which back-propagation hands its gradients: one by one, or in the buckets of DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import GradientsPending
from ..buffers import is_dense
from ..hook_errors import HookErrors
from ..states import Layout
from .averaging import Averaging
from .fusion import Buffer, Kind, fuse


class BucketHook:
    """A communication hook of DistributedDataParallel. All ranks have the same buckets in the same order.

    Parameters
    ----------
    averaging : Averaging
        Gets the gradients.
    kind : callable
        What the step that begins sends.
    model : DistributedDataParallel
        Takes the hook.
    name : str
        Of the hook, for messages.
    """

    def __init__(
        self, averaging: Averaging, kind: Callable[[], Kind], model: DistributedDataParallel, name: str
    ) -> None:
        self._averaging = averaging
        self._kind = kind
        self._gradients = {gradient.name: gradient for gradient in averaging.gradients}
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        # DDP discards means of parameters that no rank used, though it hands over their memory: these must be left out.
        # A parameter counts as used, as in DDP, from its first accumulation until the next averaging.
        self._some_unused = bool(model.find_unused_parameters or model.static_graph)
        self._used: set[str] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_note_use(self._used, name))
            for name, parameter in model.module.named_parameters()
            if self._some_unused and name in self._gradients
        ]
        self._buffers: dict[tuple[Kind, int], Buffer] = {}
        self._under_way: list[tuple[Future[Tensor], Tensor]] = []
        self._targets: dict[str, Tensor] = {}
        self._now = Kind.EXACT
        self.layout: Layout = []
        self._restored: Layout | None = None
        self.errors = HookErrors()

        def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            return self._start(bucket)

        hook.__qualname__ = name
        model.register_comm_hook(None, hook)

    def remove(self) -> None:
        """Take the hooks off parameters. DDP cannot lose its hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def restore(self, layout: Layout) -> None:
        """Have the next step's buffers hold what those of an earlier run did, though DDP's buckets are others."""
        self._restored = self.layout = layout

    def _start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        averaging = self._averaging
        if bucket.index() == 0:
            self.errors.begin()
            averaging.begin()
            self._under_way, self._targets, self._now = [], {}, self._kind()
            self.layout = []
        named = {self._names[id(parameter)]: values for parameter, values in _gradients_in(bucket)}
        self._targets |= named
        self.layout = [*self.layout, list(named)]
        moved: dict[str, Tensor] = {}
        if self._restored is None:
            self._send(bucket.index(), list(named), bucket.is_last())
        elif bucket.is_last():
            self.layout, self._restored, moved = self._restored, None, self._targets
            self._targets = {}
            for index, names in enumerate(self.layout):
                self._targets |= _side_by_side({name: moved[name] for name in names})
                self._send(index, names, index == len(self.layout) - 1)
        memory = bucket.buffer()
        future: Future[Tensor] = Future(devices=[memory.device] if memory.is_cuda else [])
        self._under_way.append((future, memory))
        if bucket.is_last():
            self.errors.instead(lambda: self._finish(moved), None)()
            for done, values in self._under_way:
                done.set_result(values)
            self.errors.end()
        return future

    def _finish(self, moved: Mapping[str, Tensor]) -> None:
        """Make means of the gradients of all buckets."""
        averaging = self._averaging
        averaging.wait()
        if self._some_unused:
            last = self._buffers[self._now, len(self.layout) - 1]
            used = dict(zip(self._gradients, last.get_flags(), strict=True))
            self._used.clear()
            self._targets = {name: values for name, values in self._targets.items() if used[name]}
        averaging.finish(self._targets)
        for name in moved:
            if name in self._targets:
                moved[name].copy_(self._targets[name])

    def _flags(self) -> list[bool]:
        return [name in self._used for name in self._gradients]

    def _send(self, index: int, names: Sequence[str], last: bool) -> None:
        flagged = self._some_unused and last
        buffer = self._buffers.get((self._now, index))
        if buffer is None or [gradient.name for gradient in buffer.gradients] != list(names):
            # DDP makes its buckets anew after the first step.
            gradients = [self._gradients[name] for name in names]
            device = self._targets[names[0]].device
            buffer = Buffer(gradients, self._now, device, len(self._gradients) if flagged else 0)
            self._buffers[self._now, index] = buffer
        self._averaging.take(buffer)
        for gradient in buffer.gradients:
            self._averaging.put(buffer, gradient, self._targets[gradient.name])
        self._averaging.send(self._flags if flagged else tuple)


def _note_use(used: set[str], name: str) -> Callable[[Tensor], None]:
    """Make a hook that holds nothing but a set: parameters outlive their wrapper."""

    def note(parameter: Tensor) -> None:
        used.add(name)

    return note


def _gradients_in(bucket: dist.GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """View the gradients in a bucket's memory, each with its parameter.

    DDP stores a gradient with the strides of its parameter, if that has neither gaps nor overlaps, and complex numbers
    as pairs. `GradBucket.gradients` knows of neither: only its offsets are right.
    """
    memory = bucket.buffer()
    for parameter, found in zip(bucket.parameters(), bucket.gradients(), strict=True):
        paired = parameter.is_complex() and not memory.is_complex()
        values = torch.view_as_complex(memory.view(-1, 2)) if paired else memory
        offset = values.storage_offset() + found.storage_offset() - memory.storage_offset()
        strides = parameter.stride() if is_dense(parameter) else found.stride()
        yield parameter, values.as_strided(parameter.shape, strides, offset)


def _side_by_side(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy dense gradients, as a bucket of DDP's holds them: a product's last bits depend on where a matrix begins."""
    whole = torch.cat([each.as_strided((each.numel(),), (1,)) for each in gradients.values()])
    copies: dict[str, Tensor] = {}
    offset = 0
    for name, each in gradients.items():
        copies[name] = whole.as_strided(each.size(), each.stride(), offset)
        offset += each.numel()
    return copies


class GradientHooks:
    """Hooks on parameters: a gradient is put into its buffer as soon as it is there, and full buffers are sent while
    back-propagation goes on, in an order that is the same on all ranks; at its end all gradients are means.

    Parameters
    ----------
    averaging, kind
        As of `BucketHook`.
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
        self,
        averaging: Averaging,
        kind: Callable[[], Kind],
        model: nn.Module,
        group: dist.ProcessGroup,
        nbytes: float,
        *,
        overlap: bool,
    ) -> None:
        self.enabled = True
        self._averaging = averaging
        self._kind = kind
        self._nbytes = nbytes
        self._overlap = overlap
        parameters = dict(model.named_parameters())
        self._parameters = {gradient.name: parameters[gradient.name] for gradient in averaging.gradients}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._gradients = {gradient.name: gradient for gradient in averaging.gradients}
        self._layouts: dict[Kind, list[Buffer]] = {}
        self._homes: dict[str, Buffer] = {}
        self._ready: set[str] = set()
        self._used: set[str] = set()
        self._under_way = False
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
                f"back-propagation added to the gradient of {name!r} after it was sent: with reentrant checkpoints, "
                "give overlap=False"
            )
        self._ready.add(name)
        self._averaging.put(buffer, self._gradients[name], parameter.grad)
        if self._overlap:
            self._averaging.send(self._flags)

    def _begin(self) -> None:
        self.errors.begin()
        kind = self._kind()
        if kind not in self._layouts:
            # Memory for exact steps is not kept beyond them.
            self._layouts.pop(Kind.EXACT, None)
            gradients, device = self._averaging.gradients, next(iter(self._parameters.values())).device
            self._layouts[kind] = fuse(gradients, kind, self._nbytes, device, flagged=True)
        self._averaging.begin()
        for buffer in self._layouts[kind]:
            self._last = buffer
            self._averaging.take(buffer)
            for gradient in buffer.gradients:
                self._homes[gradient.name] = buffer
        self._ready = set()
        self._under_way = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _flags(self) -> list[bool]:
        return [name in self._used for name in self._gradients]

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
            if name not in self._ready:
                averaging.put(self._homes[name], gradient, self._parameters[name].grad)
        averaging.send(self._flags)
        averaging.wait()
        targets: dict[str, Tensor] = {}
        for (name, parameter), used in zip(self._parameters.items(), self._last.get_flags(), strict=True):
            if used:
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
