"""Compressed gradients of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ...codecs.base import Codec
from ...collectives import choose
from ...communicator import Communicator
from ...errors import HookTaken, InvalidArgument, UnsupportedDevice
from ...sparse import Sparsifier, VarianceFeedback
from ..account import Account
from ..arrays import HostArray, arrays_on, device_of
from ..groups.membership import IN_FLIGHT, check_group, communicators_of
from ..hook_errors import HookErrors
from ..job_queue import JobQueue
from ..loss_scale import LossScale
from ..membership import check_alike
from ..policy import has_sparse_gradient
from ..states import (
    BETWEEN,
    BUCKETS,
    OPTIONAL,
    STEPS,
    Layout,
    added,
    from_memory,
    layout_of,
    logical_name,
    residuals_of,
    state_of,
    to_memory,
)
from .bucket import Bucket, Feedback, Kept, Remembered, average_sparse, maker_of
from .moments import Loss, back_propagate, moments_of, observed

_RESIDUAL = "residual"
_POWERS = {"variance": 2}
"""The power of the loss's scale by which arrays that feedback keeps are larger, where it is not 1."""
SELECTIONS = ("parameter", "bucket")
"""The pieces of gradients of which a sparse method selects elements."""


class GradientCompression:
    """The compressed averaging of one model's gradients: what `compress` returns.

    Attributes
    ----------
    account : Account
        What was sent so far. Replace it by a new one to count from zero.
    exact : dict
        Whether a parameter's gradient stays exact, by name.
    error : BaseException or None
        What ended the averaging of the last backward pass, which raised it; None if that went well.

    Examples
    --------
    >>> model = DistributedDataParallel(nn.Linear(64, 64))
    >>> compression = compcoll.torch.compress(model, codec="zfp", rate=8)
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> compression.account.raw_nbytes  # of weights and biases
    16640
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: Codec | None,
        algorithm: str,
        exact: Mapping[str, bool],
        *,
        feedback: Feedback,
        selection: str,
        timeout: float | None = None,
        over: str = "auto",
    ) -> None:
        if selection not in SELECTIONS:
            raise InvalidArgument(f"selection={selection!r} is not one of {', '.join(SELECTIONS)}")
        if model._comm_hooks:
            hook_there = getattr(model._comm_hooks[0][0], "__qualname__", "?")
            raise HookTaken(f"this model has the communication hook {hook_there!r} already: DDP takes one, once")
        parameters = dict(model.module.named_parameters())
        device = device_of(parameters.values())
        self._place = arrays_on(device)
        if device.type != "cpu" and any(map(has_sparse_gradient, model.module.modules())):
            raise UnsupportedDevice(f"sparse gradients on {device}: only those on the CPU, or sparse=False, will do")
        make = maker_of(codec, feedback)
        told = None if make is None else make()
        self._lines = [
            f"codec {codec!r}, algorithm {algorithm}, feedback {told!r}, selection {selection}, over {over}",
            *(
                f"{name}: {list(p.shape)} of {p.dtype}, {'exact' if exact[name] else 'compressed'}"
                for name, p in parameters.items()
            ),
        ]
        self._device, self._timeout, self._over = device, timeout, over
        self.account = Account()
        self.exact = {name: codec is None or kept for name, kept in exact.items()}
        self._codec = codec
        self._algorithm = algorithm
        self._by_parameter = selection == "parameter" and isinstance(codec, Sparsifier)
        self._make, self._some = make, next(iter(parameters.values())).detach()
        self._dtypes = sorted({p.dtype for name, p in parameters.items() if not self.exact[name]}, key=str)
        self._communicators = self._join(model.process_group)
        self._group: dist.ProcessGroup = model.process_group
        self._jobs = [JobQueue("gradients") for _ in range(IN_FLIGHT)]
        self._model = model
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        of_sparse = {id(p) for part in model.module.modules() if has_sparse_gradient(part) for p in part.parameters()}
        self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._shapes = {logical_name(name): parameter.shape for name, parameter in parameters.items()}
        self._dense = [name for name, p in parameters.items() if p.requires_grad and id(p) not in of_sparse]
        self._parameters = {name: parameters[name] for name in self._dense if not self.exact[name]}
        self._arrays = () if told is None else told.arrays
        self._kept: Kept = {kind: {} for kind in self._arrays}
        self._carried: dict[str, dict[str, Tensor]] = {}
        self._needs_moments = isinstance(told, VarianceFeedback)
        self._moments: dict[str, HostArray] | None = None
        self._buckets: dict[int, Bucket] = {}
        self._layout: list[tuple[str, ...]] = []
        self._restored: Layout | None = None
        self._waiting: list[tuple[Future[Tensor], Tensor]] = []
        self._steps = 0
        self._loss_scale = LossScale(self._parameters.values())
        self._finite: list[Tensor] = []
        self._remembered = Remembered(self._place)
        self._used: set[str] | None = None
        self._noting: list[RemovableHandle] = []
        if model.find_unused_parameters or model.static_graph:
            self._used = used = set[str]()
            self._noting = [parameters[name].register_hook(partial(_note, used, name)) for name in self._dense]
        self._errors = HookErrors()

        def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            return self._start(bucket)

        hook.__qualname__ = f"compcoll {codec!r}"
        model.register_comm_hook(None, hook)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group whose ranks average their gradients: at first the model's. Between two steps another may be
        set, by all its ranks: some of those before, whose models have the same buckets. What compression lost is kept.
        With ranks that are new, wrap the model again, and load the states of `state_dict`.
        """
        return self._group

    @group.setter
    def group(self, group: dist.ProcessGroup) -> None:
        self._communicators = self._join(check_group(group))
        self._group = group

    @property
    def error(self) -> BaseException | None:
        return self._errors.error

    @property
    def _communicator(self) -> Communicator:
        return self._communicators[0]

    @property
    def codec(self) -> Codec | None:
        """The codec. Between two steps another of the same kind may be set, alike on all ranks: a warm-up's
        ``compression.codec = TopK(density=warmup_density(epoch))``.
        """
        return self._codec

    @codec.setter
    def codec(self, codec: Codec) -> None:
        if type(codec) is not type(self._codec):
            raise InvalidArgument(f"codec={codec!r}: it can be replaced by one of the same kind, here {self._codec!r}")
        self._codec = codec

    def observe(self, moments: Mapping[str, Tensor]) -> None:
        """Take the second moments of the coming backward pass, which the methods by variance decide by.

        `backward` calls this; it is for second moments that were found otherwise.

        Parameters
        ----------
        moments : mapping
            For each compressed parameter, by name in the model, ``Σ (∇f_z / B)²`` over this rank's B samples z: a
            tensor of its shape. What is not finite counts as 0, so that the element is sent.

        Raises
        ------
        InvalidArgument
            If the codec needs none, or a parameter's are not there or of another shape.
        """
        if not self._needs_moments:
            raise InvalidArgument(f"{self._codec!r} decides by no second moments: there is nothing to observe")
        self._moments = observed(moments, self._parameters)

    def backward(self, loss: Loss, inputs: Tensor, targets: Tensor, micro_batches: int | None = None) -> Tensor:
        """Find the mean gradient of a mini-batch and its samples' second moments, and have the gradient averaged: all
        that ``loss(model(inputs), targets).backward()`` would do, for the methods by variance.

        Exactly, by `torch.func`, one gradient for each sample: as much memory, and no layers that mix samples, such as
        batch norms. Or from micro-batches, for any model: the second moments are then estimated without bias.

        Parameters
        ----------
        loss : callable
            Of outputs and targets: their mean loss.
        inputs, targets : Tensor
            One sample a row.
        micro_batches : int, optional
            2 or more, equal parts of the rows; by default every sample by itself.

        Returns
        -------
        Tensor
            The mean loss.

        Raises
        ------
        InvalidArgument
            If the codec needs no second moments, or the rows cannot be divided so.
        """
        if not self._needs_moments:
            raise InvalidArgument(f"{self._codec!r} decides by no second moments: call backward() of the loss")
        found = moments_of(self._model.module, loss, inputs, targets, micro_batches)
        self.observe(found.second)
        back_propagate(self._model, inputs, found.gradients)
        return found.loss

    def state_dict(self) -> dict[str, Any]:
        """Copy what this rank's compression has lost so far, and what else its feedback keeps: to be saved with the
        model, by every rank its own.
        """
        self._settle()
        fetched: dict[str, dict[str, Tensor]] = {}
        for kind, kept in self._kept.items():
            unit = self._loss_scale.unit ** _POWERS.get(kind, 1)
            fetched[kind] = self._carried.get(kind, {}) | {
                logical_name(name): from_memory(self._place.fetched(kept[name]) if name in kept else None, p) / unit
                for name, p in self._parameters.items()
            }
        state = state_of(self._communicator.rank, self._communicator.size, fetched.pop(_RESIDUAL, {}), **fetched)
        layout = [tuple(map(logical_name, names)) for names in self._restored or self._layout]
        return state | {BUCKETS: layout, STEPS: self._steps}

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on with the losses of an earlier run.

        With as many ranks as then, the gradients of the next step have the bits that they would have had there, if the
        state is of the second step or a later one: DistributedDataParallel makes its buckets anew after the first. So
        that they have, a first step waits for all gradients before any is sent. Codecs that round at random draw by
        the number of the step; of a state that lacks it, as early ones do, as from the first step on.

        Parameters
        ----------
        states : dict, or sequence of dict
            What this rank's `state_dict` gave; or all ranks' ones of then, whatever their number was: the sum over the
            ranks is kept, and so no gradient is lost when the number of ranks changes.

        Raises
        ------
        InvalidArgument
            If they belong to another number of ranks, rank, or model.
        """
        rank, size, more = self._communicator.rank, self._communicator.size, self._arrays[1:]
        read = partial(residuals_of, states, rank, size, self._shapes, more, optional=OPTIONAL)
        found = {_RESIDUAL: added(read(), read(BETWEEN)), **{kind: read(kind) for kind in more}}
        if found[_RESIDUAL] and self._make is None:
            raise InvalidArgument("this state has losses to feed back, but compress() was called with feedback=False")
        names = {logical_name(name): name for name in self._dense}
        layout = layout_of(states, names)
        self._restored = layout and [[names[name] for name in bucket] for bucket in layout]
        self._steps = (states if isinstance(states, Mapping) else states[0]).get(STEPS, 0)
        own = {logical_name(name): (name, p) for name, p in self._parameters.items()}
        for kind in self._arrays:  # of what is frozen or exact now, it is kept for later
            self._kept[kind] = {own[n][0]: to_memory(each, own[n][1]) for n, each in found[kind].items() if n in own}
            self._carried[kind] = {name: each for name, each in found[kind].items() if name not in own}
        self._loss_scale.restart(loaded=True)
        self._finite, self._layout, self._remembered = [], [], Remembered(self._place)
        self._buckets.clear()

    def __repr__(self) -> str:
        feedback = None if self._make is None else self._make()
        return f"{type(self).__name__}({self._codec!r}, algorithm={self._algorithm!r}, feedback={feedback!r})"

    def reset(self) -> None:
        """Forget what was lost and what was counted. Not during a backward pass."""
        self.account, self._steps = Account(), 0
        self._loss_scale.restart(loaded=False)
        self._finite, self._remembered = [], Remembered(self._place)
        self._kept = {kind: {} for kind in self._arrays}
        self._carried = {}
        self._moments = self._restored = None
        self._buckets.clear()

    def free(self) -> None:
        """Give back threads and communicators, when the model is trained no more. Collective."""
        self._loss_scale.free()
        for noting in self._noting:
            noting.remove()
        for jobs in self._jobs:
            jobs.close()
        for communicator in self._communicators:
            communicator.free()

    def _join(self, group: dist.ProcessGroup) -> list[Communicator]:
        """Make communicators of a group's ranks, which have models and settings like these: for each bucket that is
        under way at once, one. Collective.
        """
        check_alike(group, self._device, self._lines)
        communicators = communicators_of(
            *(group, self._device, self._timeout, self._over), measured=self._algorithm == choose.AUTO
        )
        try:
            self._try(communicators[0])
        except Exception:
            for communicator in communicators:
                communicator.free()
            raise
        return communicators

    def _try(self, communicator: Communicator) -> None:
        """Refuse what the hook would."""
        algorithm = self._algorithm
        if algorithm == choose.AUTO:  # which would not compress so little
            algorithm = "sparse_ring" if isinstance(self._codec, Sparsifier) else "direct"
        zeros = self._some.new_zeros(1, dtype=torch.float32)
        communicator.allreduce(self._place.array(zeros))
        for dtype in self._dtypes:
            zeros = self._some.new_zeros(64, dtype=dtype)
            communicator.allreduce(
                self._place.array(zeros),
                op="mean",
                feedback=None if self._make is None else self._make(),
                codec=self._codec,
                algorithm=algorithm,
            )

    def _start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Put a bucket's averaging in the line."""
        gradients, number = bucket.buffer(), bucket.index()
        moments = self._moments
        if self._needs_moments and moments is None:
            raise InvalidArgument(f"{self._codec!r} needs second moments: use backward() of the compression")
        if number == 0:
            self._errors.begin()
            self._layout, self._waiting = [], []
            self._steps += 1
            if self._make is not None:
                self._settle()
                self._multiply(self._loss_scale.begin())
        future: Future[Tensor]
        # By its number, which is alike on all ranks, not by which communicator is free.
        which = number % len(self._communicators)
        communicator, jobs = self._communicators[which], self._jobs[which]
        if gradients.is_sparse:  # of one parameter
            job = partial(self._average_sparse, gradients, communicator)
            future = self._place.submit(jobs, self._errors.instead(job, gradients), gradients).get_future()
        else:
            names = tuple(map(self._names.__getitem__, map(id, bucket.parameters())))
            first = self._first_draw(self._layout)
            self._layout.append(names)
            used = None if self._used is None else frozenset(self._used)
            if self._restored is None:
                job = partial(self._average, communicator, number, names, gradients, moments, first, used)
                future = self._place.submit(jobs, self._errors.instead(job, gradients), gradients).get_future()
            else:
                future = Future(devices=[gradients.device] if gradients.is_cuda else [])
                self._waiting.append((future, gradients))
        if bucket.is_last():
            self._moments = None
            if self._restored is not None:
                self._average_as_restored(self._restored, moments)
            self._errors.end()
            if self._used is not None:
                self._used.clear()
        return future

    def _average(
        self,
        communicator: Communicator,
        number: int,
        names: tuple[str, ...],
        gradients: Tensor,
        moments: dict[str, HostArray] | None,
        first: int,
        used: Collection[str] | None,
    ) -> Tensor:
        communicator.begun = first
        laid_out = self._laid_out(number, names, gradients)
        if moments is not None:
            laid_out.observe(moments)
        unused = [] if used is None else self._unused(communicator, names, used)
        may_be_skipped = self._make is not None and self._loss_scale.possible
        if may_be_skipped:
            self._remembered.remember(names, self._kept)
        laid_out.average(gradients, communicator, self._codec, self._algorithm, self.account, unused)
        if may_be_skipped:
            self._finite.append(gradients.isfinite().all())
        return gradients

    def _average_sparse(self, gradients: Tensor, communicator: Communicator) -> Tensor:
        mean = average_sparse(gradients, communicator, self.account)
        if self._make is not None and self._loss_scale.possible:
            self._finite.append(mean.values().isfinite().all())
        return mean

    def _unused(self, communicator: Communicator, names: tuple[str, ...], used: Collection[str]) -> list[str]:
        """Find the compressed parameters that no rank has used: DistributedDataParallel throws their means away."""
        names = tuple(name for name in names if not self.exact[name])
        if not names or self._make is None:
            return []
        marks = np.array([name in used for name in names], np.uint8)
        anywhere = communicator.allreduce(marks, op="max")
        return [name for name, mark in zip(names, anywhere, strict=True) if not mark]

    def _settle(self) -> None:
        """Undo what the last step changed if not all its means are finite: a GradScaler skips such a step. All ranks
        have the same means, so all do so or none.
        """
        if not self._finite:
            return

        def restore() -> None:
            if not all(map(bool, self._finite)):
                self._remembered.restore(self._kept)

        self._place.run(self._jobs[0], restore)
        if self._loss_scale.ended:
            self._finite = []
            self._remembered.forget()

    def _multiply(self, ratio: float) -> None:
        """Have what is kept in another unit."""
        if ratio == 1.0:
            return

        def multiply() -> None:
            for kind, kept in self._kept.items():
                for array in kept.values():
                    array *= ratio ** _POWERS.get(kind, 1)

        self._place.run(self._jobs[0], multiply)

    def _first_draw(self, before: Layout) -> int:
        """Find the number from which on a bucket's collectives draw: those of other buckets and steps have others."""
        return 2 * len(self._sizes) * self._steps + sum(len(names) + 1 for names in before)

    def _average_as_restored(self, layout: Layout, moments: dict[str, HostArray] | None) -> None:
        """Average what waits in the buckets that the run had from which this one goes on."""
        memories = [memory for _, memory in self._waiting]
        used = None if self._used is None else frozenset(self._used)

        def average() -> None:
            parts = {
                name: part
                for names, memory in zip(self._layout, memories, strict=True)
                for name, part in zip(names, memory.split([self._sizes[name] for name in names]), strict=True)
            }
            for number, names in enumerate(map(tuple, layout)):
                whole = torch.cat([parts[name] for name in names])
                first = self._first_draw(layout[:number])
                self._average(self._communicator, number, names, whole, moments, first, used)
                for name, part in zip(names, whole.split([self._sizes[name] for name in names]), strict=True):
                    parts[name].copy_(part)

        self._place.submit(self._jobs[0], self._errors.instead(average, None), *memories).wait()
        self._layout, self._restored = [tuple(names) for names in layout], None
        for future, memory in self._waiting:
            future.set_result(memory)
        self._waiting = []

    def _laid_out(self, number: int, names: tuple[str, ...], gradients: Tensor) -> Bucket:
        """Tell how the gradients of a bucket travel."""
        known = self._buckets.get(number)
        if known is None or known.names != names:
            # DDP makes its buckets anew after the first step; what was lost goes with the parameters.
            known = Bucket(
                names,
                [self._sizes[name] for name in names],
                gradients,
                self._place,
                self._communicator,
                self.exact,
                self._by_parameter,
                self._make,
                self._kept,
            )
            self._buckets[number] = known
        return known


def _note(used: set[str], name: str, gradient: Tensor | None) -> None:
    """Note that back-propagation came to a parameter."""
    if gradient is not None:
        used.add(name)
