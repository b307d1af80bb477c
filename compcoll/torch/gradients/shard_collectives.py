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
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from ...communicator import Communicator
from ...errors import InvalidArgument
from ...feedback import ErrorFeedback
from ..arrays import Array
from ..buffers import COMPRESSIBLE
from ..job_queue import Work
from ..linear import linear
from ..states import draw_as_begun, logical_name, loss_dtype

if TYPE_CHECKING:
    from .shards import ShardCompression


class Column(NamedTuple):
    """The place of a parameter in each rank's row of what a module sends.

    Attributes
    ----------
    shape : torch.Size
        Of the whole parameter; what its columns hold beyond is padding.
    dim : int
        Along which it is sharded.
    """

    name: str
    begin: int
    end: int
    shape: torch.Size
    dim: int
    parameter: Tensor
    exact: bool

    def to_rows(self, values: Tensor, ranks: int) -> Tensor:
        """Lay values of the parameter's shape out like its gradient: a row for each rank."""
        padded = values.new_zeros(ranks * (self.end - self.begin))
        padded[: values.numel()] = torch.cat(values.chunk(ranks, self.dim)).reshape(-1)
        return padded.view(ranks, -1)

    def own(self, values: Tensor, shards: Communicator) -> Tensor:
        """Copy values of the parameter's shape, with zeros where they are not in this rank's row."""
        rows = self.to_rows(values, shards.size)
        own = torch.zeros_like(rows)
        own[shards.rank] = rows[shards.rank]
        return self.from_rows(own)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Give what `to_rows` laid out its shape again."""
        flat = rows.reshape(-1)[: self.shape.numel()]
        if not self.dim:
            return flat.view(self.shape)
        lengths = list(self.shape)
        lengths[self.dim] //= len(rows)
        return torch.cat([row.view(lengths) for row in flat.view(len(rows), -1)], self.dim)


class Columns:
    """The columns of some parameters, side by side.

    Parameters
    ----------
    parameters : sequence
        PyTorch's of a module that is sharded.
    names : mapping
        Of the model's parameters, by identity.
    exact : mapping
        Whether a parameter is exact, by name.
    """

    def __init__(self, parameters: Sequence[Any], names: Mapping[int, str], exact: Mapping[str, bool]) -> None:
        self.all: list[Column] = []
        offset = 0
        for parameter in parameters:
            end = offset + parameter.padded_sharded_param_size.numel()
            shard, name = parameter.sharded_param, names[id(parameter.sharded_param)]
            place = (parameter._orig_size, parameter.fsdp_placement.dim)
            self.all.append(Column(logical_name(name), offset, end, *place, shard, exact[name]))
            offset = end
        self.width = offset
        held = [np.arange(c.begin, c.end) for c in self.all if c.exact]
        self._exact: Any = np.concatenate(held) if held else np.empty(0, np.int64)

    @property
    def compressed(self) -> list[Column]:
        """Those that are not exact."""
        return [column for column in self.all if not column.exact]

    def exact(self, width: int, tensor: Tensor) -> Any:
        """Indices of columns that stay exact; None for all."""
        if width != self.width or tensor.dtype not in COMPRESSIBLE or len(self._exact) == width:
            return None
        if tensor.is_cuda and not isinstance(self._exact, Tensor):
            self._exact = tensor.new_tensor(self._exact, dtype=torch.int64)
        return self._exact


class _Allocating:
    """The base of what PyTorch is given as a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory, as PyTorch's interface asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Before(NamedTuple):
    """What a collective kept before a step: values, the columns in which they lie, and what was loaded meanwhile."""

    kept: Array
    laid_out: Sequence[Column]
    restored: dict[str, Tensor]


def _places(columns: Sequence[Column]) -> list[tuple[str, int, int]]:
    return [(c.name, c.begin, c.end) for c in columns]


class Lossy(_Allocating):
    """The base of those whose losses are fed back.

    Parameters
    ----------
    owner : ShardCompression
        Of the model.
    known : Columns
        Of all the module's parameters.
    communicator : Communicator
        Of the ranks that add up.
    rows : range
        Of which ranks' rows gradients are added: all those of the shards, or this rank's own.
    feedback : bool
        Whether losses are fed back.
    """

    unit = 1.0
    """How many times larger values are here than in the gradient that an optimizer gets, but for the loss's scale."""

    def __init__(
        self, owner: ShardCompression, known: Columns, communicator: Communicator, rows: range, *, feedback: bool
    ) -> None:
        self.owner, self.known = owner, known
        self._laid_out: Sequence[Column] = ()
        self._communicator, self._rows = communicator, rows
        self._feedback = ErrorFeedback() if feedback else None
        self._restored: dict[str, Tensor] = {}
        self._before: _Before | None = None

    def residuals(self) -> dict[str, Tensor]:
        """Copy what was lost, by name, of each parameter in its shape; zeros but in the rows that are added here."""
        if self._feedback is None:
            return {}
        found = {
            c.name: torch.zeros(c.shape, dtype=loss_dtype(c.parameter.dtype))
            for c in self.known.compressed
            if c.parameter.requires_grad
        }
        return found | self._by_name(self._kept(), self._laid_out) | self._restored

    def restore(self, residuals: Mapping[str, Tensor]) -> None:
        """Go on with what was lost."""
        if self._feedback is not None:
            self._feedback.reset()
            self._laid_out = ()
            self._restored = {c.name: residuals[c.name] for c in self.known.compressed if c.name in residuals}
        elif residuals:
            raise InvalidArgument("this state has losses to feed back, but compress() was called with feedback=False")

    def remember(self) -> None:
        """Copy what is kept before the first backward pass of an optimizer's step, for `undo`."""
        if self._before is None:
            kept = self._kept()
            copied = None if kept is None else self.owner.place.copy(kept)
            self._before = _Before(copied, self._laid_out, dict(self._restored))

    def undo(self) -> None:
        """Have what is kept as it was then."""
        if (before := self._before) is None or (kept := self._kept()) is None:
            return
        if _places(before.laid_out) != _places(self._laid_out):  # in the pass behind that others had gradients
            self.restore(self._by_name(before.kept, before.laid_out) | before.restored)
        elif before.kept is None:
            kept[...] = 0
        else:
            self.owner.place.put(before.kept, kept)

    def forget(self) -> None:
        """Begin another step."""
        self._before = None

    def _by_name(self, kept: Array, laid_out: Sequence[Column]) -> dict[str, Tensor]:
        """Copy what is kept of parameters that are laid out so."""
        if kept is None:
            return {}
        rows, found = torch.from_numpy(self.owner.place.fetched(kept)).view(len(self._rows), -1), {}
        for c in laid_out:
            whole = rows.new_zeros(self.owner.communicator.size, c.end - c.begin)
            whole[self._rows.start : self._rows.stop] = rows[:, c.begin : c.end]
            found[c.name] = c.from_rows(whole) / (self.unit * self.owner.loss_scale.unit)
        return found

    def multiply(self, factor: float) -> None:
        """Have what is kept in other units."""
        if (kept := self._kept()) is not None:
            kept *= factor

    def _kept(self) -> Array:
        if self._feedback is None or self._feedback.residual is None:
            return None
        return self.owner.place.losses(self._feedback.residual)

    def _prepare(self, columns: Columns, rows: Array) -> None:
        """Lay out what was lost of the parameters that have gradients now like these."""
        if self._feedback is None:
            return
        now = columns.compressed
        if _places(now) != _places(self._laid_out):
            self.restore({name: lost for name, lost in self.residuals().items() if lost.any()})
            self._laid_out = now
        wanted = [c for c in now if c.name in self._restored]
        if not wanted:
            return
        place = self.owner.place
        self._communicator.prepare_feedback(self._feedback, rows.reshape(-1))
        kept = self._kept().reshape(rows.shape)
        for c in wanted:
            lost = c.to_rows(self._restored.pop(c.name), self.owner.communicator.size)[self._rows]
            lost = (lost * (self.unit * self.owner.loss_scale.unit)).numpy()
            place.put(lost.astype(kept.dtype) if isinstance(kept, np.ndarray) else lost, kept[:, c.begin : c.end])

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


class GatheredParameters(_Allocating, AllGather):
    """Gathers a module's parameters.

    Parameters
    ----------
    owner : ShardCompression
        Of the model.
    columns : Columns
        Of all the module's parameters.

    Attributes
    ----------
    lost : float or array
        The square of the relative error of what this rank sent last.
    """

    lost: Any = 0.0

    def __init__(self, owner: ShardCompression, columns: Columns) -> None:
        self.owner, self.columns = owner, columns

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        owner, communicator = self.owner, self.owner.communicator
        codec, width = owner.parameters, input_tensor.numel()
        exact = None if codec is None else self.columns.exact(width, input_tensor)

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
    """Adds up a module's gradients; each rank keeps its row.

    Parameters
    ----------
    owner, known, feedback
        As of `Lossy`.
    group : FSDPParamGroup
        PyTorch's, of the module's parameters.

    Attributes
    ----------
    averaged : AveragedReplicas or None
        What comes after, between replicas.
    present : Columns
        Of the parameters that have gradients in the step that comes next.
    """

    present: Columns

    def __init__(self, owner: ShardCompression, group: Any, known: Columns, *, feedback: bool) -> None:
        shards = owner.communicator
        super().__init__(owner, known, shards, range(shards.size), feedback=feedback)
        self.present = known
        self.averaged: AveragedReplicas | None = None
        self._group = group

    def _units(self, gradients: Tensor) -> tuple[float, float]:
        """Find the units here, and between replicas: of halves and float64, PyTorch divides a part after the sums."""
        group = self._group
        replicas = group._all_reduce_process_group if self.owner.between is not None else None
        _, after, _, between = _get_gradient_divide_factors(
            *(group._reduce_scatter_process_group, replicas, gradients.dtype, gradients.device.type),
            *(group.gradient_divide_factor, group.force_sum_reduction_for_comms),
        )
        divided = 1.0 if after is None else float(after)
        return divided * (self.owner.replicas if linear(between).name == "mean" else 1), divided

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        owner, communicator, place = self.owner, self._communicator, self.owner.place
        width, columns = output_tensor.numel(), self.present
        self.unit, between = self._units(input_tensor)
        if self.averaged is not None:
            self.averaged.unit = between
        exact = None if owner.codec is None else columns.exact(width, input_tensor)
        skippable = owner.begin(self)
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
            self._prepare(columns, rows)
            if skippable:
                self.remember()
            self._give_own(rows, reduction.name)
            kept = rows[:, exact]
            rows[:, exact] = 0
            add(rows.reshape(-1), out=out, exactly=False)
            if len(exact):
                memory = output_tensor.new_empty(len(exact))
                got = place.array(memory)
                add(kept, out=got, exactly=True)
                out[exact] = got

        job = partial(owner.watch, scatter, output_tensor) if skippable else scatter
        return owner.start(job, not async_op, output_tensor, input_tensor)

    def _give_own(self, rows: Array, op: str) -> None:
        """Add what is kept of this rank's own row to it. It is not encoded, so nothing would take this out: it is there
        if a state is of other shards.
        """
        if (kept := self._kept()) is None:
            return
        rank, size = self._communicator.rank, self._communicator.size
        own = kept.reshape(rows.shape)[rank]
        if own.any():
            rows[rank] = self.owner.place.wide(rows[rank]) + own * (size if op == "mean" else 1)
            own[...] = 0


class AveragedReplicas(Lossy):
    """Averages a module's row of gradients over its replicas.

    Parameters
    ----------
    scattered : ScatteredGradients
        What comes before.
    communicator, feedback
        As of `Lossy`.
    """

    def __init__(self, scattered: ScatteredGradients, communicator: Communicator, *, feedback: bool) -> None:
        rank = scattered.owner.communicator.rank
        rows = range(rank, rank + 1)
        super().__init__(scattered.owner, scattered.known, communicator, rows, feedback=feedback)
        self._scattered = scattered
        scattered.averaged = self

    def __call__(self, tensor: Tensor, op: Any) -> None:
        owner, communicator, place = self.owner, self._communicator, self.owner.place
        columns, skippable = self._scattered.present, owner.begin(self)
        exact = None if owner.codec is None else columns.exact(tensor.numel(), tensor)
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
            self._prepare(columns, own.reshape(1, -1))
            if skippable:
                self.remember()
            kept = own[exact]
            own[exact] = 0
            add(own, out=own, exactly=False)
            if len(exact):
                add(kept, out=kept, exactly=True)
                own[exact] = kept

        owner.start(partial(owner.watch, average, tensor) if skippable else average, True, tensor)
