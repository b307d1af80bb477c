"""Hooks of the backward pass: DistributedDataParallel's buckets, and errors that ``backward()`` raises unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..errors import HookTaken, InvalidArgument
from . import private
from .states import Layout

Value = TypeVar("Value")


def check_hook_free(model: object) -> None:
    """Check that a DistributedDataParallel model has no communication hook yet.

    Raises
    ------
    HookTaken
        If it has one.
    """
    if isinstance(model, DistributedDataParallel) and private.communication_hooks(model):
        there = getattr(private.communication_hooks(model)[0], "__qualname__", "?")
        raise HookTaken(
            f"this model already has the communication hook {there!r}, and DDP accepts only one: keep the object that "
            "compress() returned instead of calling it again, or wrap the module in DistributedDataParallel anew"
        )


def check_hooks_run(model: nn.Module) -> None:
    """Check that PyTorch calls a model's communication hooks, and calls them as usual.

    Raises
    ------
    InvalidArgument
        If it does not.
    """
    reason = ""
    if private.uses_python_reducer(model):
        reason = 'optimize_ddp="python_reducer" calls communication hooks without buckets; make the model without it'
    elif isinstance(model, private.ReplicateModule):
        reason = "replicate() has no reduce-scatter; wrap the model in DistributedDataParallel"
    elif isinstance(model, FSDPModule) and private.compiles_backward():
        reason = "with torch._dynamo.config.compiled_autograd FSDP2 does not reduce gradients; turn it off"
    if reason:
        raise InvalidArgument(f"{type(model).__name__} cannot be compressed: {reason}")


def register_hook(
    model: DistributedDataParallel, start: Callable[[dist.GradBucket], Future[Tensor]], name: str
) -> None:
    """Register a function as a model's communication hook, under a name for error messages."""

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        return start(bucket)

    hook.__qualname__ = name
    model.register_comm_hook(None, hook)


def call_before_steps(method: Callable[[torch.optim.Optimizer], None]) -> RemovableHandle:
    """Call a method before each step of any optimizer, as long as the method's object lives."""
    here = WeakMethod(method)

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if (call := here()) is not None:
            call(optimizer)

    return register_optimizer_step_pre_hook(hook)


class FilledBucket(NamedTuple):
    """Gradients in one contiguous buffer, to be averaged in place.

    Attributes
    ----------
    number : int
        Index of the bucket in its backward pass; the same on all ranks.
    names : tuple of str
        Names of its parameters.
    memory : torch.Tensor
        Their gradients, flat, each in the order of its parameter's memory.
    before : int
        Number of buckets before it in its pass, plus the number of their parameters.
    last : bool
        Whether it is the last bucket of its pass.
    """

    number: int
    names: tuple[str, ...]
    memory: Tensor
    before: int
    last: bool


class BucketHook:
    """The communication hook with which a method averages a model's gradients; all ranks have the same buckets.

    Parameters
    ----------
    model : DistributedDataParallel
        Model that gets the hook.
    name : str
        Name of the hook, for error messages.
    begin : callable
        Called at the beginning of a backward pass.
    start : callable
        Starts to average a bucket in place, and returns a future that completes with it.
    end : callable
        Called when the last bucket was started.
    start_sparse : callable, optional
        Starts to average a sparse gradient.

    Attributes
    ----------
    error : BaseException or None
        The first error of the last pass; None if there was none.
    layout : Layout
        The buckets of the last pass.
    used : set of str or None
        Parameters that got a gradient since the last averaging; None if PyTorch assumes that all do. DDP's buckets
        contain unused parameters, too; DDP discards the means of those that no rank used.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        name: str,
        begin: Callable[[], None],
        start: Callable[[FilledBucket], Future[Tensor]],
        end: Callable[[], None],
        start_sparse: Callable[[int, Tensor], Future[Tensor]] | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.layout: Layout = []
        self.used: set[str] | None = None
        self._begin, self._start, self._end, self._start_sparse = begin, start, end, start_sparse
        self._restored: Layout | None = None
        self._waiting: list[tuple[Future[Tensor], FilledBucket]] = []
        self._parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._handles = []
        if model.find_unused_parameters or model.static_graph:
            self.used = used = set[str]()  # hooks refer only to this set, since parameters may outlive the model
            for each, parameter in self._parameters.items():
                self._handles.append(parameter.register_post_accumulate_grad_hook(lambda _, name=each: used.add(name)))
        register_hook(model, self._average, name)

    def remove(self) -> None:
        """Remove the hooks of parameters. DDP's communication hook cannot be removed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def restore(self, layout: Layout | None) -> None:
        """Average the next pass in the buckets of an earlier run, which may differ from DDP's. None cancels that."""
        self._restored, self.layout = layout, layout or []

    def split(self, names: tuple[str, ...], memory: Tensor) -> list[Tensor]:
        """Return a flat view of each given parameter's part of a bucket's memory."""
        pairs = [self._parameters[name].is_complex() and not memory.is_complex() for name in names]
        sizes = [self._parameters[name].numel() * (2 if pair else 1) for name, pair in zip(names, pairs, strict=True)]
        return list(memory.split(sizes))

    def guarded(self, job: Callable[[], Value], value: Value) -> Callable[[], Value]:
        """Wrap a job so that it returns ``value`` instead of raising an error, which the pass raises at its end.

        If a future that a hook returns to DistributedDataParallel fails, ``backward()`` raises a RuntimeError with the
        error's text. So the future completes normally, and the original error is raised after DDP has ended the pass.
        DDP also runs hooks outside of a pass, for a rank that has joined: there, the job raises its error.
        """
        in_pass = private.backward_pass() != -1

        def run() -> Value:
            try:
                return job()
            except Exception as error:
                self.error = self.error or error
                if not in_pass:
                    raise
                return value

        return run

    def _raise_at_end(self) -> None:
        """Raise the pass's error, if any, at the end of the pass. The last hook calls this."""
        if private.backward_pass() != -1:
            # DDP ends the pass in a callback that runs after the outer callback here, and before the inner one.
            private.at_end_of_backward(lambda: private.at_end_of_backward(self._raise))

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _average(self, given: dist.GradBucket) -> Future[Tensor]:
        number, memory = given.index(), given.buffer()
        if number == 0:
            self.error = None
            self._waiting = []
            if self._restored is None:
                self.layout = []
            self._begin()
        if memory.is_sparse:  # such a bucket has one parameter
            assert self._start_sparse is not None
            future = self._start_sparse(number, memory)
        else:
            names = tuple(self._names[id(parameter)] for parameter in given.parameters())
            before = [] if self._restored else self.layout
            bucket = FilledBucket(number, names, memory, _numbers(before), given.is_last())
            if self._restored is None:
                self.layout = [*self.layout, names]
                future = self._start(bucket)
            else:
                future = Future(devices=[memory.device] if memory.is_cuda else [])
                self._waiting.append((future, bucket))
        if given.is_last():
            if self._restored is None:
                self._end()
            else:
                self._average_as_restored(self._restored)
            if self.used is not None:
                self.used.clear()
            self._raise_at_end()
        return future

    def _average_as_restored(self, layout: Layout) -> None:
        """Average all gradients in the buckets of the run that this run continues."""
        parts = {
            name: part
            for _, bucket in self._waiting
            for name, part in zip(bucket.names, self.split(bucket.names, bucket.memory), strict=True)
        }
        wholes = [torch.cat([parts[name] for name in names]) for names in layout]
        started = []
        for number, (names, whole) in enumerate(zip(layout, wholes, strict=True)):
            last = number == len(layout) - 1
            started.append(self._start(FilledBucket(number, tuple(names), whole, _numbers(layout[:number]), last)))
        self._end()
        for future, names, whole in zip(started, layout, wholes, strict=True):
            future.wait()
            for name, part in zip(names, self.split(tuple(names), whole), strict=True):
                parts[name].copy_(part)
        self.restore(None)
        self.layout = layout
        for future, bucket in self._waiting:
            future.set_result(bucket.memory)
        self._waiting = []


def _numbers(layout: Layout) -> int:
    return sum(len(names) + 1 for names in layout)
