"""The compressed collectives of one FSDP2 module: parameters gathered, gradients scattered and averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ...communicator import Communicator
from ...errors import InvalidArgument
from ...feedback import ErrorFeedback
from ..arrays import Array
from ..buffers import COMPRESSIBLE
from ..job_queue import Work
from ..linear import linear
from ..states import Residuals, draw_as_begun, nothing_lost

if TYPE_CHECKING:
    from .shards import ShardCompression


class _Column(NamedTuple):
    """The place of a parameter in each rank's row of what a module sends.

    Attributes
    ----------
    size : int
        Elements of the whole parameter; what its columns hold beyond is padding.
    """

    name: str
    begin: int
    end: int
    size: int
    dtype: torch.dtype


def columns_of(parameters: Sequence[Any], names: Mapping[int, str]) -> list[_Column]:
    """Find the columns of a module's parameters, side by side."""
    columns: list[_Column] = []
    offset = 0
    for parameter in parameters:
        end = offset + parameter.padded_sharded_param_size.numel()
        shard, size = parameter.sharded_param, parameter._orig_size.numel()
        columns.append(_Column(names[id(shard)], offset, end, size, shard.dtype))
        offset = end
    return columns


class _Rows:
    """The base of both collectives, which knows a module's rows.

    Parameters
    ----------
    owner : ShardCompression
        Of the model.
    columns : list of _Column
        Of the module's parameters, side by side.
    """

    def __init__(self, owner: ShardCompression, columns: list[_Column]) -> None:
        self.owner = owner
        self.columns = columns
        held = [np.arange(c.begin, c.end) for c in columns if owner.exact[c.name]]
        self._held: Any = np.concatenate(held) if held else np.empty(0, np.int64)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory, as PyTorch's interface asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def exact_columns(self, width: int, tensor: Tensor) -> Any:
        """Indices of columns that stay exact; None for all, also if parameters lack that had no gradient."""
        if width != self.columns[-1].end or tensor.dtype not in COMPRESSIBLE or len(self._held) == width:
            return None
        if tensor.is_cuda and not isinstance(self._held, Tensor):
            self._held = tensor.new_tensor(self._held, dtype=torch.int64)
        return self._held


class Lossy(_Rows):
    """The base of those whose losses are fed back.

    Parameters
    ----------
    owner, columns
        As of `_Rows`.
    communicator : Communicator
        Of the ranks that add up.
    rows : int
        How many ranks' rows are added: all those of the shards, or one.
    feedback : bool
        Whether losses are fed back.
    """

    def __init__(
        self, owner: ShardCompression, columns: list[_Column], communicator: Communicator, rows: int, *, feedback: bool
    ) -> None:
        super().__init__(owner, columns)
        self._communicator, self._rows = communicator, rows
        self._feedback = ErrorFeedback() if feedback else None
        self._restored: Residuals = {}

    def size_of(self, column: _Column) -> int:
        """Elements of a parameter that are added."""
        return column.size if self._rows > 1 else min(column.size, column.end - column.begin)

    def residuals(self) -> Residuals:
        """Copy what was lost, by name."""
        if self._feedback is None:
            return {}
        if self._feedback.residual is None:
            return {c.name: nothing_lost(self.size_of(c), c.dtype) for c in self._compressed()} | self._restored
        place = self.owner.place
        rows = place.fetched(place.losses(self._feedback.residual)).reshape(self._rows, -1)
        return {c.name: rows[:, c.begin : c.end].reshape(-1)[: self.size_of(c)] for c in self._compressed()}

    def restore(self, residuals: Residuals) -> None:
        """Go on with what was lost."""
        restored = {c.name: residuals[c.name] for c in self._compressed() if c.name in residuals}
        if self._feedback is not None:
            self._feedback.reset()
            self._restored = restored
        elif restored:
            raise InvalidArgument("this state has losses to feed back, but compress() was called with feedback=False")

    def _prepare(self, rows: Array) -> None:
        """Lay out restored losses like the gradients."""
        if self._feedback is None or not self._restored:
            return
        place = self.owner.place
        self._communicator.prepare_feedback(self._feedback, rows.reshape(-1))
        kept = place.losses(self._feedback.residual).reshape(rows.shape)
        for c in self._compressed():
            if c.name in self._restored:
                lost = self._restored[c.name]
                padded = np.zeros(kept.shape[0] * (c.end - c.begin), lost.dtype)
                padded[: self.size_of(c)] = lost
                place.put(padded.reshape(kept.shape[0], -1), kept[:, c.begin : c.end])
        self._restored = {}

    def _add(
        self, collective: Callable[..., Any], values: Array, op: str, out: Array, least: float, *, exactly: bool
    ) -> None:
        """Add values by a collective of the communicator's, of which each rank must send at least that part."""
        owner = self.owner
        if exactly:
            # Halves are summed in float32: exactly, as far as a half shows.
            with np.errstate(over="ignore"):
                out[...] = collective(owner.place.wide(values), op=op, codec=None)
        else:
            draw_as_begun(self._feedback, self._communicator)
            collective(values, op=op, out=out, feedback=self._feedback, codec=owner.codec, algorithm=owner.algorithm)
        owner.count(self._communicator, least)

    def _compressed(self) -> list[_Column]:
        return [c for c in self.columns if not self.owner.exact[c.name]]


class GatheredParameters(_Rows, AllGather):
    """Gathers a module's parameters.

    Attributes
    ----------
    lost : float or array
        The square of the relative error of what this rank sent last.
    """

    lost: Any = 0.0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        owner, communicator = self.owner, self.owner.communicator
        codec, width = owner.parameters, input_tensor.numel()
        exact = None if codec is None else self.exact_columns(width, input_tensor)

        def gather() -> None:
            own = owner.place.copy(owner.place.array(input_tensor))  # PyTorch gives a part of the output
            out = owner.place.array(output_tensor).reshape(communicator.size, width)
            if exact is None:
                communicator.allgather(own, out=out, codec=None)
                owner.count(communicator, communicator.size - 1)
                return
            kept = own[exact]
            own[exact] = 0
            communicator.allgather(own, out=out, codec=codec, algorithm=owner.algorithm)
            owner.count(communicator, communicator.size - 1)
            sent = owner.place.wide(own)
            lost = sent - owner.place.wide(out[communicator.rank])
            self.lost = (lost * lost).sum() / (sent * sent).sum().clip(1e-30)
            if len(kept):
                out[:, exact] = communicator.allgather(kept, codec=None)
                owner.count(communicator, communicator.size - 1)

        return owner.start(gather, not async_op, output_tensor, input_tensor)


class ScatteredGradients(Lossy, ReduceScatter):
    """Adds up a module's gradients; each rank keeps its row."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        owner, communicator, place = self.owner, self._communicator, self.owner.place
        width = output_tensor.numel()
        exact = None if owner.codec is None else self.exact_columns(width, input_tensor)
        reduction = linear(op)
        if reduction.factor is not None:
            input_tensor.mul_(reduction.factor)
        least = (communicator.size - 1) / communicator.size
        add = partial(self._add, communicator.reduce_scatter, op=reduction.name, least=least)

        def scatter() -> None:
            rows = place.array(input_tensor).reshape(communicator.size, width)
            out = place.array(output_tensor)
            if exact is None:
                add(rows, out=out, exactly=True)
                return
            self._prepare(rows)
            kept = rows[:, exact]
            rows[:, exact] = 0
            add(rows.reshape(-1), out=out, exactly=False)
            if len(exact):
                memory = output_tensor.new_empty(len(exact))
                got = place.array(memory)
                add(kept, out=got, exactly=True)
                out[exact] = got

        return owner.start(scatter, not async_op, output_tensor, input_tensor)


class AveragedReplicas(Lossy):
    """Averages a module's row of gradients over its replicas."""

    def __call__(self, tensor: Tensor, op: Any) -> None:
        owner, communicator, place = self.owner, self._communicator, self.owner.place
        exact = None if owner.codec is None else self.exact_columns(tensor.numel(), tensor)
        reduction = linear(op)
        if reduction.factor is not None:
            tensor.mul_(reduction.factor)
        least = 2 * (communicator.size - 1) / communicator.size
        add = partial(self._add, communicator.allreduce, op=reduction.name, least=least)

        def average() -> None:
            own = place.array(tensor)
            if exact is None:
                add(own, out=own, exactly=True)
                return
            self._prepare(own.reshape(1, -1))
            kept = own[exact]
            own[exact] = 0
            add(own, out=own, exactly=False)
            if len(exact):
                add(kept, out=kept, exactly=True)
                own[exact] = kept

        owner.start(average, True, tensor)
