"""Compressed gradients for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...codecs.base import Codec
from ...communicator import Communicator
from ...deprecated import renamed_attribute
from ...errors import InvalidArgument, UnsupportedDevice
from ...plan import choose
from ...sparse import VarianceFeedback
from ..agreement import check_alike
from ..buffers import HostArray, array_of, device_of
from ..groups.membership import IN_FLIGHT, check_group, communicators_of
from ..hooks import BucketHook, FilledBucket, check_hook_free
from ..job_queue import JobQueue
from ..policy import (
    Average,
    Codecs,
    codec_by_name,
    described,
    each_codec,
    has_sparse_gradient,
    log_choice,
    replaced,
    shown,
    try_codec,
)
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
from ..streams import JobStreams
from ..training_stats import TrainingStats
from .bucket import RESIDUAL, Bucket, Feedback, Kept, Residuals, average_sparse, maker_of
from .moments import Loss, back_propagate, observed, of_micro_batches, of_samples

SELECTIONS = ("parameter", "bucket")
"""Units in which a sparse codec selects elements."""


class GradientCompression:
    """Compressed averaging of one DistributedDataParallel model's gradients, as returned by `compress`.

    Attributes
    ----------
    stats : TrainingStats
        Bytes and calls so far. Assign a new TrainingStats to count from zero.
    exact : dict
        Whether a parameter's gradient stays exact, by name.
    error : BaseException or None
        The exception that the last backward pass raised while averaging; None if it succeeded.

    Examples
    --------
    >>> model = DistributedDataParallel(nn.Linear(64, 64))
    >>> compression = compcoll.torch.compress(model)
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> compression.stats.raw_nbytes  # of weights and biases
    16640
    """

    account = renamed_attribute("account", "stats")

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: Codecs,
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
        of_sparse = {id(p) for part in model.module.modules() if has_sparse_gradient(part) for p in part.parameters()}
        if self._device.type != "cpu" and of_sparse:
            raise UnsupportedDevice(f"sparse gradients on {self._device}: use the CPU, or sparse=False")
        self._codec, self._feedback, self._algorithm, self._model = codec, feedback, algorithm, model
        self._codecs = codec_by_name(codec, model.module, exact)
        self.exact = {name: each is None for name, each in self._codecs.items()}
        made = [make() for each in each_codec(codec) if (make := maker_of(each, feedback)) is not None]
        self._described_feedback = " and ".join(dict.fromkeys(map(repr, made))) or "None"
        self._lines = [
            f"codec {codec!r}, algorithm {algorithm}, feedback {self._described_feedback}, selection {selection}, "
            f"over {transport}",
            *described(parameters.items(), self.exact),
        ]
        self._timeout, self._over = timeout, transport
        self.stats = TrainingStats()
        self._by_parameter = selection == "parameter"
        self._some = next(iter(parameters.values())).detach()
        self._join(model.process_group)
        self._jobs = [JobQueue("gradients") for _ in range(IN_FLIGHT)]
        self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._shapes = {logical_name(name): parameter.shape for name, parameter in parameters.items()}
        self._dense = [name for name, p in parameters.items() if p.requires_grad and id(p) not in of_sparse]
        self._parameters = {name: parameters[name] for name in self._dense if not self.exact[name]}
        # Parameters that have each kind of feedback array.
        self._fed_back: dict[str, dict[str, nn.Parameter]] = {kind: {} for each in made for kind in each.arrays}
        for name, parameter in self._parameters.items():
            if (make := maker_of(self._codecs[name], feedback)) is not None:
                for kind in make().arrays:
                    self._fed_back[kind][name] = parameter
        self._streams = JobStreams()
        self._residuals = Residuals(self._jobs[0], self._streams, self._parameters.values(), tuple(self._fed_back))
        self._needs_moments = any(isinstance(each, VarianceFeedback) for each in made)
        self._moments: dict[str, HostArray] | None = None
        self._buckets: dict[int, Bucket] = {}
        self._steps = 0
        self._hook = BucketHook(
            *(model, f"compcoll {codec!r}", self._begin, self._start, self._end), start_sparse=self._start_sparse
        )
        if self._communicator.rank == 0:
            average = Average(self._communicator, parameters.keys(), model.bucket_bytes_cap)
            log_choice(each_codec(codec), self._codecs, algorithm, parameters, [average])

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group whose ranks average their gradients; initially the model's.

        Between two steps, all ranks of a smaller group can set it to this group, which must be a part of the old one.
        Their models must have the same buckets. Residuals are kept. To add ranks, wrap the model again and load the
        states from `state_dict`.
        """
        return self._group

    @group.setter
    def group(self, group: dist.ProcessGroup) -> None:
        self._join(check_group(group))

    @property
    def error(self) -> BaseException | None:
        return self._hook.error

    @property
    def _communicator(self) -> Communicator:
        return self._communicators[0]

    @property
    def codec(self) -> Codec | Mapping[str, Codec | None] | None:
        """The codec, or the mapping of codecs.

        Between two steps, all ranks may replace the codec by one of the same type with other options, and a mapping by
        one with the same patterns and types. For a warm-up:
        ``compression.codec = TopK(density=warmup_density(epoch))``.
        """
        return shown(self._codec)

    @codec.setter
    def codec(self, codec: str | Codec | Mapping[str, str | Codec | None]) -> None:
        self._codec = replaced(self._codec, codec)
        self._codecs.update(codec_by_name(self._codec, self._model.module, self.exact))
        if isinstance(self._codec, dict):  # other codecs may be equal now, which then share a collective
            self._buckets.clear()

    def observe(self, moments: Mapping[str, Tensor]) -> None:
        """Set the second moments by which a variance-based codec selects elements in the next backward pass.

        `backward` calls this method. Call it yourself only with second moments computed in another way.

        Parameters
        ----------
        moments : mapping
            ``Σ (∇f_z / B)²`` over this rank's B samples z, for each parameter that such a codec compresses, by name in
            the model. Each tensor has the parameter's shape. Values that are not finite count as 0, so the element is
            sent.

        Raises
        ------
        InvalidArgument
            If the codec needs no moments, or a parameter's moments are missing or have another shape.
        """
        if not self._needs_moments:
            raise InvalidArgument(f"{self._codec!r} does not use second moments: do not call observe()")
        self._moments = observed(moments, self._fed_back["variance"])

    def backward(self, loss: Loss, inputs: Tensor, targets: Tensor, micro_batches: int | None = None) -> Tensor:
        """Run a backward pass for variance-based codecs, in place of ``loss(model(inputs), targets).backward()``.

        By default, `torch.func` computes one gradient per sample, so the second moments are exact. This needs memory
        for all these gradients, and layers must not mix samples, as batch norms do. With ``micro_batches``, any model
        works; the second moments are then unbiased estimates.

        Parameters
        ----------
        loss : callable
            Returns the mean loss of outputs and targets.
        inputs, targets : Tensor
            One sample per row.
        micro_batches : int, optional
            Number of equal parts of the rows, 2 or more. By default, each sample is handled by itself.

        Returns
        -------
        Tensor
            The mean loss.

        Raises
        ------
        InvalidArgument
            If the codec needs no second moments, or the rows cannot be divided into ``micro_batches`` equal parts.
        """
        if not self._needs_moments:
            raise InvalidArgument(f"{self._codec!r} does not use second moments: call backward() of the loss")
        if micro_batches is None:
            found = of_samples(self._model.module, loss, inputs, targets)
        else:
            found = of_micro_batches(self._model.module, loss, inputs, targets, micro_batches)
        self.observe(found.second)
        back_propagate(self._model, inputs, found.gradients)
        return found.loss

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's residuals and other feedback state. Each rank saves its own with the model."""
        kept = self._residuals
        kept.settle()
        fetched = {
            kind: kept.carried.get(kind, {})
            | {
                logical_name(name): from_memory(self._streams.fetch(arrays[name]) if name in arrays else None, p)
                / kept.unit(kind)
                for name, p in self._fed_back[kind].items()
            }
            for kind, arrays in kept.arrays.items()
        }
        state = state_of(self._communicator.rank, self._communicator.size, fetched.pop(RESIDUAL, {}), **fetched)
        layout = [tuple(map(logical_name, names)) for names in self._hook.layout]
        return state | {BUCKETS: layout, STEPS: self._steps}

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue with the residuals of an earlier run.

        With the same number of ranks, the next step's gradients have the same bits as in the earlier run. This holds
        for states from the second step on, because DistributedDataParallel rebuilds its buckets after the first step.
        To use the earlier buckets, the first step sends nothing until all gradients are ready. Codecs with random
        rounding continue from the saved step number, or from the first step if an old state lacks it.

        Parameters
        ----------
        states : dict, or sequence of dict
            This rank's `state_dict`, or those of all ranks of the earlier run. With all of them, the number of ranks
            may change: the sum of the residuals over the ranks is kept, so no gradient is lost.

        Raises
        ------
        InvalidArgument
            If the states belong to another number of ranks, rank, or model.
        """
        rank, size, more = self._communicator.rank, self._communicator.size, tuple(self._fed_back)[1:]
        read = partial(residuals_of, states, rank, size, self._shapes, more, optional=OPTIONAL)
        found = {RESIDUAL: added(read(), read(BETWEEN)), **{kind: read(kind) for kind in more}}
        check_fed_back(found[RESIDUAL], feedback=bool(self._fed_back))
        names = {logical_name(name): name for name in self._dense}
        layout = layout_of(states, names)
        carried = {kind: found[kind] for kind in self._fed_back}
        held: Kept = {
            kind: {
                name: to_memory(carried[kind].pop(logical_name(name)), p)
                for name, p in parameters.items()
                if logical_name(name) in carried[kind]
            }
            for kind, parameters in self._fed_back.items()
        }
        self._residuals.restart(carried, loaded=True)  # later states include `carried`, too
        self._residuals.arrays.update(held)
        self._steps = (states if isinstance(states, Mapping) else states[0]).get(STEPS, 0)
        self._hook.restore(layout and [tuple(names[name] for name in bucket) for bucket in layout])
        self._buckets.clear()

    def __repr__(self) -> str:
        feedback = self._described_feedback
        return f"{type(self).__name__}({self._codec!r}, algorithm={self._algorithm!r}, feedback={feedback})"

    def reset(self) -> None:
        """Discard residuals and statistics. Do not call this during a backward pass."""
        self.stats, self._steps = TrainingStats(), 0
        self._residuals.restart({}, loaded=False)
        self._moments = None
        self._hook.restore(None)
        self._buckets.clear()

    def free(self) -> None:
        """Release threads and communicators after training. Collective."""
        self._residuals.scale.free()
        self._hook.remove()
        for jobs in self._jobs:
            jobs.close()
        for communicator in self._communicators:
            communicator.free()

    def _join(self, group: dist.ProcessGroup) -> None:
        """Check that a group's ranks have the same model and settings, and average in it from now on. Collective.

        There is one communicator for each bucket that can be in flight at the same time.
        """
        check_alike(group, self._device, self._lines)
        communicators = communicators_of(
            *(group, self._device, self._timeout, self._over), measured=self._algorithm == choose.AUTO
        )
        try:
            zero = self._some.new_zeros(1, dtype=torch.float32)
            communicators[0].allreduce(array_of(zero))
            for each in each_codec(self._codec):
                own = (p for name, p in self._model.module.named_parameters() if self._codecs[name] == each)
                dtypes = sorted({parameter.dtype for parameter in own}, key=str)
                zeros = [self._some.new_zeros(64, dtype=dtype) for dtype in dtypes]
                try_codec(communicators[0], map(array_of, zeros), each, self._algorithm, maker_of(each, self._feedback))
        except Exception:
            for communicator in communicators:
                communicator.free()
            raise
        self._group, self._communicators = group, communicators

    def _begin(self) -> None:
        """Begin a backward pass."""
        if self._needs_moments and self._moments is None:
            raise InvalidArgument(f"{self._codec!r} needs second moments: use backward() of the compression")
        self._steps += 1
        if self._fed_back:
            self._residuals.begin()

    def _end(self) -> None:
        self._moments = None

    def _start(self, bucket: FilledBucket) -> Future[Tensor]:
        """Queue the averaging of a bucket."""
        used = None if self._hook.used is None else frozenset(self._hook.used)
        job = partial(self._average, bucket, self._moments, 2 * len(self._sizes) * self._steps + bucket.before, used)
        return self._submit(bucket.number, job, bucket.memory)

    def _start_sparse(self, number: int, gradient: Tensor) -> Future[Tensor]:
        return self._submit(number, partial(self._average_sparse, gradient), gradient)

    def _submit(self, number: int, job: Callable[[Communicator], Tensor], gradients: Tensor) -> Future[Tensor]:
        # The bucket number selects the communicator, since all ranks must choose the same one.
        chosen = number % len(self._communicators)
        run = self._hook.guarded(partial(job, self._communicators[chosen]), gradients)
        return self._jobs[chosen].submit(run, self._streams.order(gradients)).get_future()

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
        may_be_skipped = bool(self._fed_back) and self._residuals.scale.possible
        if may_be_skipped:
            self._residuals.remember(bucket.names, self._fed_back)
        laid_out.average(gradients, communicator, self._algorithm, self.stats, unused)
        if may_be_skipped:
            self._residuals.watch(gradients.isfinite().all())
        return gradients

    def _average_sparse(self, gradient: Tensor, communicator: Communicator) -> Tensor:
        mean = average_sparse(gradient, communicator, self.stats)
        if self._fed_back and self._residuals.scale.possible:
            self._residuals.watch(mean.values().isfinite().all())
        return mean

    def _unused(self, communicator: Communicator, names: tuple[str, ...], used: Collection[str]) -> list[str]:
        """Find the compressed parameters that no rank used; DDP discards their means. Collective."""
        names = tuple(name for name in names if not self.exact[name])
        if not names or not self._fed_back:
            return []
        marks = np.array([name in used for name in names], np.uint8)
        anywhere = communicator.allreduce(marks, op="max")
        return [name for name, mark in zip(names, anywhere, strict=True) if not mark]

    def _laid_out(self, bucket: FilledBucket) -> Bucket:
        """Return the layout of a bucket, and make it if the bucket is new or its parameters changed."""
        known = self._buckets.get(bucket.number)
        if known is None or known.names != bucket.names:
            # DDP rebuilds its buckets after the first step. Residuals move with their parameters.
            sizes = [self._sizes[name] for name in bucket.names]
            known = self._buckets[bucket.number] = Bucket(
                *(bucket.names, sizes, bucket.memory, self._communicator, self._codecs),
                *(self._by_parameter, self._feedback, self._residuals.arrays),
            )
        return known
