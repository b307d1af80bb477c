"""Compressed gradients of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..codecs.base import Codec
from ..devices.host import HostDevice
from ..errors import CollectiveMismatch, HookTaken, InvalidArgument
from ..feedback import ErrorFeedback
from ..stats import Stats
from .account import Account
from .buffers import array_of
from .engine import Engine
from .membership import check_alike, communicator_of
from .states import residuals_of, state_of

Array = npt.NDArray[Any]

_SEPARATE_NBYTES = 1 << 16
"""Exact gradients of this size or more split what is compressed; smaller ones travel along as zeros."""


class GradientCompression:
    """The compressed averaging of one model's gradients: what `compress` returns.

    Attributes
    ----------
    account : Account
        What was sent so far. Replace it by a new one to count from zero.
    exact : dict
        Whether a parameter's gradient stays exact, by name.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: Codec | None,
        algorithm: str,
        exact: Mapping[str, bool],
        *,
        feedback: bool,
    ) -> None:
        if model._comm_hooks:
            hook_there = getattr(model._comm_hooks[0][0], "__qualname__", "?")
            raise HookTaken(f"this model has the communication hook {hook_there!r} already: DDP takes one, once")
        parameters = dict(model.module.named_parameters())
        device = next(iter(parameters.values())).device
        communicator = communicator_of(model.process_group, device)
        try:
            check_alike(
                communicator,
                [
                    f"codec {codec!r}, algorithm {algorithm}, feedback {feedback}",
                    *(
                        f"{name}: {list(p.shape)} of {p.dtype}, {'exact' if exact[name] else 'compressed'}"
                        for name, p in parameters.items()
                    ),
                ],
            )
        except CollectiveMismatch:
            communicator.free()
            raise
        self.account = Account()
        self.exact = {name: codec is None or kept for name, kept in exact.items()}
        self._codec = codec
        self._algorithm = algorithm
        self._communicator = communicator
        self._engine = Engine("compcoll-gradients")
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._residuals: dict[str, Array] | None = {} if feedback and codec is not None else None
        self._buckets: dict[int, _Bucket] = {}

        def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            return self._start(bucket)

        hook.__qualname__ = f"compcoll {codec!r}"
        model.register_comm_hook(None, hook)

    def state_dict(self) -> dict[str, Any]:
        """What this rank's compression has lost so far, to be saved with the model: every rank's own."""
        return state_of(self._communicator.rank, self._communicator.size, self._residuals or {})

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on with the losses of an earlier run.

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
        sizes = {name: shape.numel() for name, shape in self._shapes.items() if not self.exact[name]}
        restored = residuals_of(states, self._communicator.rank, self._communicator.size, sizes)
        if self._residuals is not None:
            self._residuals = restored
            self._buckets.clear()
        elif restored:
            raise InvalidArgument("this state has losses to feed back, but compress() was called with feedback=False")

    def __repr__(self) -> str:
        feedback = self._residuals is not None
        return f"GradientCompression({self._codec!r}, algorithm={self._algorithm!r}, feedback={feedback})"

    def reset(self) -> None:
        """Forget what was lost and what was counted. Not during a backward pass."""
        self.account = Account()
        if self._residuals is not None:
            self._residuals = {}
            self._buckets.clear()

    def free(self) -> None:
        """Give back thread and communicator, when the model is trained no more. Collective."""
        self._engine.close()
        self._communicator.free()

    def _start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Put a bucket's averaging in the line."""
        gradients = bucket.buffer()
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        known = self._buckets.get(bucket.index())
        if known is None or known.names != names:
            # DDP makes its buckets anew after the first step; what was lost goes with the parameters.
            sizes = [gradient.numel() for gradient in bucket.gradients()]
            known = _Bucket(names, sizes, array_of(gradients).dtype, self.exact, self._residuals)
            self._buckets[bucket.index()] = known
        laid_out = known

        def average() -> Tensor:
            self._average(laid_out, array_of(gradients))
            return gradients

        return self._engine.submit(average).get_future()

    def _average(self, bucket: _Bucket, values: Array) -> None:
        """Average a bucket's gradients in place. In the engine's thread."""
        communicator, codec, algorithm = self._communicator, self._codec, self._algorithm
        exact = bucket.lift(values)
        requests = []
        for begin, end, feedback in bucket.spans:
            part = values[begin:end]
            request = communicator.iallreduce(
                part, op="mean", out=part, feedback=feedback, codec=codec, algorithm=algorithm
            )
            requests.append(request)
        for request in requests:
            request.wait()
            self._count(request.stats)
        if exact is not None:
            # The ranks are together by now, and MPI's blocking call is much faster than its nonblocking one.
            communicator.allreduce(exact, op="mean", out=exact, codec=None)
            self._count(communicator.stats)
        bucket.put_back(values)

    def _count(self, stats: Stats | None) -> None:
        assert stats is not None
        self.account.add(stats, 2 * (self._communicator.size - 1) / self._communicator.size)


class _Bucket:
    """How the gradients of a bucket of DDP's travel.

    Parameters
    ----------
    names : tuple of str
        Of its parameters, in their order.
    sizes : sequence of int
        Their elements; their gradients lie one behind the other.
    dtype : numpy.dtype
        Element type.
    exact : mapping
        Whether a parameter is exact, by name.
    residuals : dict or None
        What was lost, by name of the parameter; from now on views into memory that belongs to the bucket.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        sizes: Sequence[int],
        dtype: np.dtype[Any],
        exact: Mapping[str, bool],
        residuals: dict[str, Array] | None,
    ) -> None:
        self.names = names
        self.spans: list[tuple[int, int, ErrorFeedback | None]] = []
        self._holes: list[tuple[int, int]] = []
        compressed: list[tuple[str, int, int]] = []
        offset = 0
        for name, size in zip(names, sizes, strict=True):
            part = (name, offset, offset + size)
            offset += size
            if not exact[name]:
                compressed.append(part)
                continue
            self._holes.append(part[1:])
            if size * dtype.itemsize >= _SEPARATE_NBYTES:
                self._add_span(compressed, dtype, residuals)
                compressed = []
        self._add_span(compressed, dtype, residuals)
        # Halves are summed in float32: exactly, as far as a half shows.
        wide = dtype if dtype.itemsize > 2 else np.dtype(np.float32)
        held = sum(end - begin for begin, end in self._holes)
        self._whole = held == offset and wide == dtype
        self._exact = np.empty(0 if self._whole else held, wide)

    def _add_span(
        self, parts: list[tuple[str, int, int]], dtype: np.dtype[Any], residuals: dict[str, Array] | None
    ) -> None:
        if not parts:
            return
        begin, end = parts[0][1], parts[-1][2]
        if residuals is None:
            self.spans.append((begin, end, None))
            return
        feedback = ErrorFeedback()
        kept = feedback.prepare(end - begin, dtype.name, HostDevice.zeros_residual)
        for name, first, last in parts:
            part = kept[first - begin : last - begin]
            if name in residuals:
                part[...] = residuals[name]
            residuals[name] = part
        self.spans.append((begin, end, feedback))

    def lift(self, values: Array) -> Array | None:
        """The exact gradients, if there are any; taken out of their places, which are left zero, unless all are."""
        if self._whole:
            return values
        offset = 0
        for begin, end in self._holes:
            self._exact[offset : offset + end - begin] = values[begin:end]
            values[begin:end] = 0
            offset += end - begin
        return self._exact if offset else None

    def put_back(self, values: Array) -> None:
        """Store the exact gradients' averages in their places."""
        if self._whole:
            return
        offset = 0
        with np.errstate(over="ignore"):
            for begin, end in self._holes:
                values[begin:end] = self._exact[offset : offset + end - begin]
                offset += end - begin
