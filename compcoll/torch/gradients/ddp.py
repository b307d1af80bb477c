"""Compressed gradients of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...codecs.base import Codec
from ...communicator import Communicator
from ...deprecated import renamed_attribute
from ...errors import InvalidArgument, UnsupportedDevice
from ...plan import choose
from ...sparse import Sparsifier, VarianceFeedback
from ..arrays import HostArray, arrays_on, device_of
from ..groups.membership import IN_FLIGHT, check_group, communicators_of
from ..hooks import BucketHook, FilledBucket, check_hook_free
from ..job_queue import JobQueue
from ..membership import check_alike
from ..policy import described, has_sparse_gradient, try_codec
from ..states import (
    BETWEEN,
    BUCKETS,
    OPTIONAL,
    STEPS,
    added,
    check_fed_back,
    from_memory,
    layout_of,
    logical_name,
    residuals_of,
    state_of,
    to_memory,
)
from ..training_stats import TrainingStats
from .bucket import Bucket, Feedback, average_sparse, maker_of
from .moments import Loss, back_propagate, observed, of_micro_batches, of_samples
from .residuals import RESIDUAL, Residuals

SELECTIONS = ("parameter", "bucket")
"""The pieces of gradients of which a sparse method selects elements."""


class GradientCompression:
    """The compressed averaging of one model's gradients: what `compress` returns.

    Attributes
    ----------
    stats : TrainingStats
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
    >>> compression.stats.raw_nbytes  # of weights and biases
    16640
    """

    account = renamed_attribute("account", "stats")

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
        transport: str = "auto",
    ) -> None:
        if selection not in SELECTIONS:
            raise InvalidArgument(f"selection={selection!r} is not one of {', '.join(SELECTIONS)}")
        check_hook_free(model)
        parameters = dict(model.module.named_parameters())
        self._device = device_of(parameters.values())
        self._place = arrays_on(self._device)
        of_sparse = {id(p) for part in model.module.modules() if has_sparse_gradient(part) for p in part.parameters()}
        if self._device.type != "cpu" and of_sparse:
            raise UnsupportedDevice(f"sparse gradients on {self._device}: use the CPU, or sparse=False")
        self._make = maker_of(codec, feedback)
        made = None if self._make is None else self._make()
        self._lines = [
            f"codec {codec!r}, algorithm {algorithm}, feedback {made!r}, selection {selection}, over {transport}",
            *described(parameters.items(), exact),
        ]
        self._timeout, self._over = timeout, transport
        self.stats = TrainingStats()
        self.exact = {name: codec is None or kept for name, kept in exact.items()}
        self._codec, self._algorithm, self._model = codec, algorithm, model
        self._by_parameter = selection == "parameter" and isinstance(codec, Sparsifier)
        self._some = next(iter(parameters.values())).detach()
        self._dtypes = sorted({p.dtype for name, p in parameters.items() if not self.exact[name]}, key=str)
        self._group: dist.ProcessGroup = model.process_group
        self._communicators = self._join(self._group)
        self._jobs = [JobQueue("gradients") for _ in range(IN_FLIGHT)]
        self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._shapes = {logical_name(name): parameter.shape for name, parameter in parameters.items()}
        self._dense = [name for name, p in parameters.items() if p.requires_grad and id(p) not in of_sparse]
        self._parameters = {name: parameters[name] for name in self._dense if not self.exact[name]}
        self._kinds = () if made is None else made.arrays
        self._residuals = Residuals(self._place, self._jobs[0], self._parameters.values(), self._kinds)
        self._needs_moments = isinstance(made, VarianceFeedback)
        self._moments: dict[str, HostArray] | None = None
        self._buckets: dict[int, Bucket] = {}
        self._steps = 0
        self._hook = BucketHook(
            *(model, f"compcoll {codec!r}", self._begin, self._start, self._end), start_sparse=self._start_sparse
        )

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
        return self._hook.errors.error

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
        if micro_batches is None:
            found = of_samples(self._model.module, loss, inputs, targets)
        else:
            found = of_micro_batches(self._model.module, loss, inputs, targets, micro_batches)
        self.observe(found.second)
        back_propagate(self._model, inputs, found.gradients)
        return found.loss

    def state_dict(self) -> dict[str, Any]:
        """Copy what this rank's compression has lost so far, and what else its feedback keeps: to be saved with the
        model, by every rank its own.
        """
        kept = self._residuals
        kept.settle()
        fetched = {
            kind: kept.carried.get(kind, {})
            | {
                logical_name(name): from_memory(self._place.fetched(arrays[name]) if name in arrays else None, p)
                / kept.unit(kind)
                for name, p in self._parameters.items()
            }
            for kind, arrays in kept.arrays.items()
        }
        state = state_of(self._communicator.rank, self._communicator.size, fetched.pop(RESIDUAL, {}), **fetched)
        layout = [tuple(map(logical_name, names)) for names in self._hook.layout]
        return state | {BUCKETS: layout, STEPS: self._steps}

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on with the residuals of an earlier run.

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
        rank, size, more = self._communicator.rank, self._communicator.size, self._kinds[1:]
        read = partial(residuals_of, states, rank, size, self._shapes, more, optional=OPTIONAL)
        found = {RESIDUAL: added(read(), read(BETWEEN)), **{kind: read(kind) for kind in more}}
        check_fed_back(found[RESIDUAL], feedback=self._make is not None)
        names = {logical_name(name): name for name in self._dense}
        layout = layout_of(states, names)
        own = {logical_name(name): (name, p) for name, p in self._parameters.items()}
        kept = {kind: found[kind] for kind in self._kinds}
        carried = {kind: {n: each for n, each in arrays.items() if n not in own} for kind, arrays in kept.items()}
        self._residuals.restart(carried, loaded=True)  # of what is frozen or exact now, it is kept for later
        for kind, arrays in kept.items():
            held = {own[n][0]: to_memory(each, own[n][1]) for n, each in arrays.items() if n in own}
            self._residuals.arrays[kind].update(held)
        self._steps = (states if isinstance(states, Mapping) else states[0]).get(STEPS, 0)
        self._hook.restore(layout and [tuple(names[name] for name in bucket) for bucket in layout])
        self._buckets.clear()

    def __repr__(self) -> str:
        feedback = None if self._make is None else self._make()
        return f"{type(self).__name__}({self._codec!r}, algorithm={self._algorithm!r}, feedback={feedback!r})"

    def reset(self) -> None:
        """Forget what was lost and what was counted. Not during a backward pass."""
        self.stats, self._steps = TrainingStats(), 0
        self._residuals.restart({}, loaded=False)
        self._moments = None
        self._hook.restore(None)
        self._buckets.clear()

    def free(self) -> None:
        """Give back threads and communicators, when the model is trained no more. Collective."""
        self._residuals.scale.free()
        self._hook.remove()
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
            communicators[0].allreduce(self._place.array(self._some.new_zeros(1, dtype=torch.float32)))
            zeros = (self._place.array(self._some.new_zeros(64, dtype=dtype)) for dtype in self._dtypes)
            try_codec(communicators[0], zeros, self._codec, self._algorithm, self._make)
        except Exception:
            for communicator in communicators:
                communicator.free()
            raise
        return communicators

    def _begin(self) -> None:
        """Begin a backward pass."""
        if self._needs_moments and self._moments is None:
            raise InvalidArgument(f"{self._codec!r} needs second moments: use backward() of the compression")
        self._steps += 1
        if self._make is not None:
            self._residuals.begin()

    def _end(self) -> None:
        self._moments = None

    def _start(self, bucket: FilledBucket) -> Future[Tensor]:
        """Put a bucket's averaging in the line."""
        used = None if self._hook.used is None else frozenset(self._hook.used)
        job = partial(self._average, bucket, self._moments, 2 * len(self._sizes) * self._steps + bucket.before, used)
        # By its number, which is alike on all ranks, not by which communicator is free.
        return self._submit(bucket.number, partial(job, self._communicator_of(bucket.number)), bucket.memory)

    def _start_sparse(self, number: int, gradient: Tensor) -> Future[Tensor]:
        return self._submit(number, partial(self._average_sparse, gradient, self._communicator_of(number)), gradient)

    def _submit(self, number: int, job: Callable[[], Tensor], gradients: Tensor) -> Future[Tensor]:
        jobs = self._jobs[number % len(self._communicators)]
        return self._place.submit(jobs, self._hook.errors.instead(job, gradients), gradients).get_future()

    def _communicator_of(self, number: int) -> Communicator:
        return self._communicators[number % len(self._communicators)]

    def _average(
        self,
        bucket: FilledBucket,
        moments: dict[str, HostArray] | None,
        first: int,
        used: Collection[str] | None,
        communicator: Communicator,
    ) -> Tensor:
        communicator.sequence_number = first
        gradients = bucket.memory
        laid_out = self._laid_out(bucket)
        if moments is not None:
            laid_out.observe(moments)
        unused = [] if used is None else self._unused(communicator, bucket.names, used)
        may_be_skipped = self._make is not None and self._residuals.scale.possible
        if may_be_skipped:
            self._residuals.remember(bucket.names, self._kinds)
        laid_out.average(gradients, communicator, self._codec, self._algorithm, self.stats, unused)
        if may_be_skipped:
            self._residuals.watch(gradients.isfinite().all())
        return gradients

    def _average_sparse(self, gradient: Tensor, communicator: Communicator) -> Tensor:
        mean = average_sparse(gradient, communicator, self.stats)
        if self._make is not None and self._residuals.scale.possible:
            self._residuals.watch(mean.values().isfinite().all())
        return mean

    def _unused(self, communicator: Communicator, names: tuple[str, ...], used: Collection[str]) -> list[str]:
        """Find the compressed parameters that no rank has used: DistributedDataParallel throws their means away."""
        names = tuple(name for name in names if not self.exact[name])
        if not names or self._make is None:
            return []
        marks = np.array([name in used for name in names], np.uint8)
        anywhere = communicator.allreduce(marks, op="max")
        return [name for name, mark in zip(names, anywhere, strict=True) if not mark]

    def _laid_out(self, bucket: FilledBucket) -> Bucket:
        """Find how the gradients of a bucket travel."""
        known = self._buckets.get(bucket.number)
        if known is None or known.names != bucket.names:
            # DDP makes its buckets anew after the first step; residuals go with the parameters.
            sizes = [self._sizes[name] for name in bucket.names]
            known = self._buckets[bucket.number] = Bucket(
                *(bucket.names, sizes, bucket.memory, self._place, self._communicator),
                *(self.exact, self._by_parameter, self._make, self._residuals.arrays),
            )
        return known
