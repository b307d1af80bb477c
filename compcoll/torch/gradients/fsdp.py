"""Compressed collectives of one FSDP2 model (`torch.distributed.fsdp.fully_shard`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ...codecs.base import Codec
from ...communicator import Communicator
from ...deprecated import renamed_attribute
from ...errors import HookTaken, InvalidArgument
from ...feedback import ErrorFeedback
from ...plan import choose
from ...transports.serialization import packed, unpacked
from .. import private
from ..agreement import check_alike, gathered
from ..buffers import Array, array_of, check_device, copy_of, residual_of, wide
from ..groups.membership import communicator_of
from ..handles import CompletedWork
from ..job_queue import JobQueue, Work
from ..linear import linear
from ..policy import Average, Codecs, codec_by_name, described, each_codec, log_choice, replaced, shown, try_codec
from ..states import (
    BEGUN,
    BETWEEN,
    MESHES,
    OPTIONAL,
    REPLICAS,
    RESIDUALS,
    Place,
    added,
    check_fed_back,
    chosen_from,
    count_calls_with,
    logical_name,
    of_mesh,
    place_of,
    residual_dtype,
    residuals_of,
    state_of,
)
from ..streams import JobStreams
from ..training_stats import TrainingStats
from .bucket import RESIDUAL, Part, Residuals, adopt, side_by_side
from .columns import Columns, clear_columns, gather_columns, scatter_columns


class Mesh:
    """The communicators of a module's mesh.

    Parameters
    ----------
    shards : Communicator
        Communicator of the ranks over which the module is sharded.
    between : Communicator or None
        Communicator of the ranks that hold replicas of this rank's shards, if there are any.

    Attributes
    ----------
    communicators : dict
        Communicator of each reduction of gradients, by its kind.
    place : Place
        This rank's place in the mesh.
    """

    def __init__(self, shards: Communicator, between: Communicator | None) -> None:
        self.shards = shards
        self.communicators = {RESIDUAL: shards} if between is None else {RESIDUAL: shards, BETWEEN: between}
        # States number the ranks replica by replica.
        replicas, replica = (1, 0) if between is None else (between.size, between.rank)
        self.place = Place(replica * shards.size + shards.rank, replicas * shards.size, replicas)


class Reduction:
    """Compressed reduce-scatter or allreduce of a module's gradients, with feedback.

    Parameters
    ----------
    owner : ShardCompression
        The model's compression.
    mesh : Mesh
        The module's mesh.
    known : Columns
        Columns of all the module's parameters.
    kind : str
        `RESIDUAL` for the reduce-scatter among the shards, or `BETWEEN` for the allreduce between replicas.

    Attributes
    ----------
    unit : float
        Ratio of the values and residuals of this reduction to the optimizer's gradient, without the loss scale.
    """

    def __init__(self, owner: ShardCompression, mesh: Mesh, known: Columns, kind: str) -> None:
        self.owner, self.mesh, self.known, self.kind, self.unit = owner, mesh, known, kind, 1.0
        self._communicator, self._scatters = mesh.communicators[kind], kind == RESIDUAL
        shards = mesh.shards
        self._rows = range(shards.size) if self._scatters else range(shards.rank, shards.rank + 1)
        self._feedback: dict[int, tuple[Any, ErrorFeedback]] = {}  # with its layout, by the codec's number

    @property
    def _arrays(self) -> dict[str, Array]:
        return self.owner.residuals.arrays[self.kind]

    def residuals(self) -> dict[str, Tensor]:
        """Copy the residuals by parameter name, in the parameters' shapes; zeros outside the rows reduced here."""
        found: dict[str, Tensor] = {}
        for c in self.known.compressed if self.owner.feeds_back else ():
            if c.name in self._arrays:
                kept = torch.from_numpy(self.owner.streams.fetch(self._arrays[c.name]))
                whole = kept.new_zeros(self.mesh.shards.size, c.end - c.begin)
                whole[self._rows.start : self._rows.stop] = kept
                found[c.name] = c.from_rows(whole) / (self.unit * self.owner.residuals.scale.unit)
            elif c.parameter.requires_grad:
                found[c.name] = torch.zeros(c.shape, dtype=residual_dtype(c.parameter.dtype))
        return found

    def rearrange(self) -> None:
        """Let the next reduction move the residuals to new feedback."""
        self._feedback.clear()

    def restore(self, residuals: Mapping[str, Tensor]) -> None:
        """Replace the residuals by those of a saved state."""
        self.rearrange()
        for c in self.known.compressed:
            if c.name in residuals:
                rows = c.to_rows(residuals[c.name], self.mesh.shards.size)[self._rows]
                self._arrays[c.name] = (rows * self.unit).to(residual_dtype(c.parameter.dtype)).numpy()

    def reduce(
        self, values: Tensor, result: Tensor, op: Any, columns: Columns, unit: float, *, wait: bool
    ) -> Work | None:
        """Reduce the ranks' gradients.

        Parameters
        ----------
        values : Tensor
            This rank's gradients, in rows. Overwritten.
        result : Tensor
            The output row. It may share memory with ``values``.
        op
            PyTorch's reduction operation.
        columns : Columns
            Columns of the parameters that have gradients.
        unit : float
            Unit of ``values``, as in the attribute of this name.
        wait : bool
            If True, the reduction has completed, or is ordered in its stream, on return. If False, return a handle.
        """
        owner = self.owner
        codecs = columns.codecs(result.numel(), values)
        skippable = owner.begin(self)
        reduction = linear(op)
        if reduction.factor is not None:
            values.mul_(reduction.factor)

        def job() -> None:
            rows, out = array_of(values).reshape(len(self._rows), -1), array_of(result)
            if not codecs:
                self._add(rows, reduction.name, out, None)
                return
            if owner.feeds_back:
                self._rescale(unit)
            if exact := columns.of(None):
                kept = gather_columns(rows, exact)
                clear_columns(rows, exact)
            for codec in codecs:
                self._add_coded(codec, columns, rows, reduction.name, result, skippable=skippable)
            if exact:
                got = result.new_empty(kept.shape[-1])
                self._add(kept, reduction.name, array_of(got), None)
                scatter_columns(array_of(got), exact, out)

        return owner.start(partial(owner.watch, job, result) if skippable else job, wait, result, values)

    def _rescale(self, unit: float) -> None:
        """Bring all residuals to the gradients' unit."""
        if unit != self.unit:
            for c in self.known.compressed:
                if c.name in self._arrays:
                    array = self._arrays[c.name]
                    array *= unit / self.unit
            self.unit = unit

    def _add_coded(
        self, codec: Codec, columns: Columns, rows: Array, op: str, result: Tensor, *, skippable: bool
    ) -> None:
        """Reduce a codec's columns: a copy of them, or the whole rows if no other codec has any."""
        own, out = columns.of(codec), array_of(result)
        if whole := len(own) == len(columns.compressed):
            places = [Part(c.name, c.begin, c.end) for c in own]
        else:
            rows, result = gather_columns(rows, own), result.new_empty(sum(c.end - c.begin for c in own))
            places = list(side_by_side([c.name for c in own], {c.name: c.end - c.begin for c in own}).values())
        feedback = self._feedback_of(codec, rows, places) if self.owner.feeds_back else None
        if skippable:
            self.owner.residuals.remember([c.name for c in own], [self.kind])
        if feedback is not None and self._scatters:
            self._give_own(rows, residual_of(feedback.residual).reshape(rows.shape), op)
        self._add(rows.reshape(-1), op, array_of(result), codec, feedback)
        if not whole:
            scatter_columns(array_of(result), own, out)
        if feedback is not None:
            # Block codecs also leave residuals at the zeros of exact columns and of padding. States lack these.
            if whole:
                clear_columns(residual_of(feedback.residual).reshape(rows.shape), columns.of(None))
            for c in own:
                c.clear_padding(self._arrays[c.name], self._rows)

    def _feedback_of(self, codec: Codec, rows: Array, places: list[Part]) -> ErrorFeedback:
        """Return a codec's feedback, with the residuals of the parameters that have gradients now in their places."""
        number, layout = each_codec(self.owner._codec).index(codec), (tuple(rows.shape), places)
        before, feedback = self._feedback.get(number, (None, ErrorFeedback()))
        if before != layout:
            feedback = ErrorFeedback()
            self._communicator._prepare_feedback(feedback, rows.reshape(-1))
            adopt(self._arrays, residual_of(feedback.residual).reshape(rows.shape), places)
            self._feedback[number] = layout, feedback
        return feedback

    def _give_own(self, rows: Array, residual: Array, op: str) -> None:
        """Add the residual of this rank's own row to the row, and clear it.

        A rank does not encode its own row, so feedback would never use this residual. It is not zero only after a state
        of other shards was loaded.
        """
        rank, size = self._communicator.rank, self._communicator.size
        own = residual[rank]
        if own.any():
            rows[rank] = wide(rows[rank]) + own * (size if op == "mean" else 1)
            own[...] = 0

    def _add(
        self, values: Array, op: str, out: Array, codec: Codec | None, feedback: ErrorFeedback | None = None
    ) -> None:
        owner, communicator = self.owner, self._communicator
        collective: Any = communicator.reduce_scatter if self._scatters else communicator.allreduce
        if codec is None:
            # 16-bit floats are summed in float32, whose rounding errors are below their precision.
            with np.errstate(over="ignore"):
                out[...] = collective(wide(values), op=op, codec=None)
        else:
            count_calls_with(feedback, communicator)
            collective(values, op=op, out=out, feedback=feedback, codec=codec, algorithm=owner.algorithm)
        owner.stats.add_last(communicator)


class ScatteredGradients(private.DefaultAllocMixin, private.ReduceScatter):
    """Reduce-scatter of a module's gradients.

    Parameters
    ----------
    reduction : Reduction
        The reduction among the shards.
    group : FSDPParamGroup
        PyTorch's group of the module's parameters.

    Attributes
    ----------
    present : Columns
        Columns of the parameters that have gradients in the next reduce-scatter.
    between : float
        Unit of the allreduce between replicas.
    """

    def __init__(self, reduction: Reduction, group: Any) -> None:
        self._reduction, self._group = reduction, group
        self.present, self.between = reduction.known, 1.0

    def prepare(self, columns: Callable[[Sequence[Any]], Columns]) -> None:
        """Record which parameters have gradients, before PyTorch copies these into one buffer."""
        self.present = columns(private.parameters_with_gradients(self._group))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        unit, self.between = self._units(input_tensor)
        return self._reduction.reduce(input_tensor, output_tensor, op, self.present, unit, wait=not async_op)

    def _units(self, gradients: Tensor) -> tuple[float, float]:
        """Return the units of this reduce-scatter and of the allreduce between replicas.

        For float16 and float64, PyTorch divides only in part before the sums, so values are larger than the gradient.
        """
        replicas = self._reduction.mesh.place.replicas
        after, between = private.divisors(self._group, gradients.dtype, gradients.device.type)
        divided = 1.0 if after is None else float(after)
        return divided * (replicas if linear(between).name == "mean" else 1), divided


class Replicas(dist.ProcessGroup):
    """A process group for a module's all-reduce between replicas, since FSDP2 has no hook for this collective.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks that hold replicas of this rank's rows.
    reduction : Reduction
        The reduction between the replicas.
    scattered : ScatteredGradients
        The reduce-scatter that precedes it.
    """

    def __init__(self, group: dist.ProcessGroup, reduction: Reduction, scattered: ScatteredGradients) -> None:
        super().__init__(group.rank(), group.size())
        self._group, self._reduction, self._scattered = group, reduction, scattered

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> CompletedWork:
        """Reduce one tensor in place; on return this has completed, or is ordered in its stream."""
        (tensor,) = tensors
        op, before = dist.ReduceOp.SUM if options is None else options.reduceOp, self._scattered
        try:
            self._reduction.reduce(tensor, tensor, op, before.present, before.between, wait=True)
        except Exception:
            private.enter_as(self, self._group)
            raise
        return CompletedWork()


class GatheredParameters(private.DefaultAllocMixin, private.AllGather):
    """All-gather of a module's parameters.

    Parameters
    ----------
    owner : ShardCompression
        The model's compression.
    communicator : Communicator
        Communicator of the ranks over which the module is sharded.
    columns : Columns
        Columns of all the module's parameters.

    Attributes
    ----------
    lost : float or array
        Squared relative error of this rank's last encoded shard.
    """

    lost: Any = 0.0

    def __init__(self, owner: ShardCompression, communicator: Communicator, columns: Columns) -> None:
        self.owner, self.communicator, self.columns = owner, communicator, columns

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        owner, communicator = self.owner, self.communicator
        codec, width = owner.param_codec, input_tensor.numel()
        compressed = codec is not None and bool(self.columns.codecs(width, input_tensor))

        def gather() -> None:
            own = copy_of(array_of(input_tensor))  # the input is a view of the output
            out = array_of(output_tensor).reshape(communicator.size, width)
            if not compressed:
                communicator.allgather(own, out=out, codec=None)
                owner.stats.add_last(communicator)
                return
            if exact := self.columns.of(None):
                kept = gather_columns(own, exact)
                clear_columns(own, exact)
            communicator.allgather(own, out=out, codec=codec, algorithm=owner.algorithm)
            owner.stats.add_last(communicator)
            sent = wide(own)
            lost = sent - wide(out[communicator.rank])
            self.lost = (lost * lost).sum() / (sent * sent).sum().clip(1e-30)
            if exact:
                scatter_columns(communicator.allgather(kept, codec=None), exact, out)
                owner.stats.add_last(communicator)

        return owner.start(gather, not async_op, output_tensor, input_tensor)


class ShardCompression:
    """Compressed collectives of one FSDP2 model, as returned by `compress`.

    Attributes
    ----------
    stats : TrainingStats
        Bytes and calls so far. Assign a new TrainingStats to count from zero.
    exact : dict
        Whether a parameter and its gradient stay exact with any codec, by name.
    error : BaseException or None
        The exception that the last collective raised; None if it succeeded.

    Examples
    --------
    >>> model = fully_shard(nn.Linear(64, 64))  # of torch.distributed.fsdp
    >>> compression = compcoll.torch.compress(model)
    >>> model(torch.ones(1, 64)).sum().backward()
    """

    account = renamed_attribute("account", "stats")

    def __init__(
        self,
        model: FSDPModule,
        codec: Codecs,
        param_codec: Codec | None,
        algorithm: str,
        exact: Mapping[str, bool],
        *,
        feedback: bool,
        timeout: float | None = None,
        transport: str = "auto",
    ) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._shapes = {logical_name(name): parameter.shape for name, parameter in model.named_parameters()}
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        module_of = {group: module for module in sharded for group in private.parameter_groups(module)}
        groups = list(module_of)
        if not groups:
            raise InvalidArgument("no module with parameters was sharded: apply fully_shard to such modules first")
        if any(isinstance(private.reduce_scatter_of(group), ScatteredGradients) for group in groups):
            raise HookTaken(
                "this model's shards are compressed already: keep the object that compress() returned instead of "
                "calling it again"
            )
        ranks_of = [private.reduction_groups(group) for group in groups]
        if any(replicas is not None for _, replicas in ranks_of):
            choose.check("allreduce", algorithm)
        self.stats = TrainingStats()
        self.error: BaseException | None = None
        self.exact = dict(exact)
        self.algorithm = algorithm
        self._model, self._codec = model, codec
        self._codecs = self._by_logical_name(codec)
        self.param_codec = param_codec
        self._device = private.device_of(groups[0])
        check_device(self._device)
        self.streams = JobStreams()
        lines = [
            f"codec {codec!r}, param_codec {param_codec!r}, algorithm {algorithm}, feedback {feedback}",
            f"over {transport}",
            *described(model.named_parameters(), exact),
        ]

        # All ranks have the same modules in the same order, so they make the communicators in one order.
        @cache
        def joined(ranks: dist.ProcessGroup) -> Communicator:
            check_alike(ranks, self._device, lines)
            return communicator_of(*(ranks, self._device, timeout, transport), measured=algorithm == choose.AUTO)

        @cache
        def mesh_of(shards: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> Mesh:
            return Mesh(joined(shards), None if replicas is None else joined(replicas))

        meshes = [mesh_of(*ranks) for ranks in ranks_of]
        self.meshes = list(dict.fromkeys(meshes))
        self._communicators = list(dict.fromkeys(c for mesh in self.meshes for c in mesh.communicators.values()))
        self._rank, self._size, *_ = self.meshes[0].place
        if len(self.meshes) > 1:
            self._rank, self._size = _number(dict(zip(meshes, ranks_of, strict=True)), self._device)
        self.feeds_back = feedback and bool(each_codec(codec))
        reductions_of = dict.fromkeys(each for mesh in self.meshes for each in mesh.communicators.items())
        for each, (kind, communicator) in product(each_codec(codec), reductions_of):
            own = (p for name, p in model.named_parameters() if self._codecs[logical_name(name)] == each)
            dtypes = sorted({parameter.dtype for parameter in own}, key=str)
            zeros = [torch.zeros(64 * communicator.size, dtype=dtype, device=self._device) for dtype in dtypes]
            try_codec(
                *(communicator, map(array_of, zeros), each, algorithm),
                feedback=ErrorFeedback if self.feeds_back else None,
                scatter=kind == RESIDUAL,
            )
        # One queue runs the collectives of all groups. Back-propagation submits them in the same order on all ranks,
        # as FSDP2 itself requires, whose reduce-scatters share one stream. So ranks cannot wait for each other in a
        # cycle: the ranks of the earliest collective that has not ended have no earlier one to wait for.
        self._jobs = JobQueue("shards")
        self.residuals = Residuals(self._jobs, self.streams, model.parameters(), (RESIDUAL, BETWEEN))
        self._step, self._begun = -1, set[Reduction]()
        self._finite: list[Tensor] = []
        self._gathers: list[GatheredParameters] = []
        self._reductions: list[dict[str, Reduction]] = []
        columns = partial(Columns, names=names, codecs=self._codecs)
        gathered_columns = partial(Columns, names=names, codecs=self._by_logical_name(param_codec))
        for group, mesh, (_, replicas) in zip(groups, meshes, ranks_of, strict=True):
            known = columns(private.parameters_of(group))
            reductions = {kind: Reduction(self, mesh, known, kind) for kind in mesh.communicators}
            self._reductions.append(reductions)
            scattered = ScatteredGradients(reductions[RESIDUAL], group)
            of_gather = gathered_columns(private.parameters_of(group))
            self._gathers.append(GatheredParameters(self, mesh.shards, of_gather))
            private.set_collectives(module_of[group], group, self._gathers[-1], scattered)
            private.before_reductions(group, partial(scattered.prepare, columns))
            if replicas is not None:
                private.replace_replicas(group, Replicas(replicas, reductions[BETWEEN], scattered))
        known_columns = [(c, mesh) for each, mesh in zip(self._gathers, meshes, strict=True) for c in each.columns.all]
        self._shapes |= {c.name: c.shape for c, _ in known_columns}  # of DTensors, those of the local tensors
        self._mesh_of = {c.name: mesh for c, mesh in known_columns}
        # PyTorch reduces nothing in a mesh of one rank, such as that of an expert which no other rank has.
        self._alone = [c.parameter for c, mesh in known_columns if mesh.place.size == 1]
        if self._rank == 0:
            parameters = {c.name: c.parameter for c, _ in known_columns}
            codecs = {name: self._codecs[name] for name in parameters}
            averages = [average for mesh in self.meshes for average in self._averages(mesh)]
            log_choice(each_codec(codec), codecs, algorithm, parameters, averages)

    def _averages(self, mesh: Mesh) -> list[Average]:
        """Return the averages of gradients in a mesh, for `log_choice`."""
        shards, names = mesh.shards, {name for name, its in self._mesh_of.items() if its is mesh}
        largest = shards.size * max(each.columns.nbytes for each in self._gathers if each.communicator is shards)
        averages = [Average(shards, names, largest, scatter=True)]
        if (between := mesh.communicators.get(BETWEEN)) is not None:
            averages.append(Average(between, names, largest, shards.size))
        return averages

    @property
    def codec(self) -> Codec | Mapping[str, Codec | None] | None:
        """The codec, or the mapping of codecs, as of `GradientCompression`."""
        return shown(self._codec)

    @codec.setter
    def codec(self, codec: str | Codec | Mapping[str, str | Codec | None]) -> None:
        self._codec = replaced(self._codec, codec)
        self._codecs.update(self._by_logical_name(self._codec))
        if isinstance(self._codec, dict):  # other codecs may be equal now, which then share a collective
            for reductions in self._reductions:
                for reduction in reductions.values():
                    reduction.rearrange()

    def _by_logical_name(self, codec: Codecs) -> dict[str, Codec | None]:
        """Return the codec of each parameter, by logical name."""
        return {logical_name(name): each for name, each in codec_by_name(codec, self._model, self.exact).items()}

    @property
    def parameters_error(self) -> float:
        """Relative root-mean-square error of the last parameter all-gather: the maximum over this rank's modules.

        0 if parameters are sent exactly. On a GPU, the host waits for the result.
        """
        return math.sqrt(max((float(gather.lost) for gather in self._gathers), default=0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's residuals. Each rank saves its own with the model."""
        self.residuals.settle()
        found: dict[str, dict[str, Tensor]] = {kind: {} for mesh in self.meshes for kind in mesh.communicators}
        for reductions in self._reductions:
            for kind, reduction in reductions.items():
                found[kind] |= reduction.residuals()
        residuals = self.residuals.carried.get(RESIDUAL, {}) | found.pop(RESIDUAL)
        state = state_of(self._rank, self._size, residuals, **found)
        state[BEGUN] = [each.sequence_number for each in self._communicators]
        if len(self.meshes) > 1:
            state[MESHES] = {name: list(mesh.place) for name, mesh in self._mesh_of.items()}
        elif (replicas := self.meshes[0].place.replicas) > 1:
            state[REPLICAS] = replicas
        return state

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue with the residuals of an earlier run, as `GradientCompression.load_state_dict` does.

        States of `GradientCompression` can be loaded, too. If the states of all ranks are given, the meshes may have
        changed. But as many sets of ranks as before must average each parameter separately.
        """
        chosen_from(states, self._rank, self._size, optional=OPTIONAL)
        every = [states] if isinstance(states, Mapping) else states
        known = (c for each in self._reductions for c in each[RESIDUAL].known.compressed)
        columns = {c.name: c for c in known if c.parameter.requires_grad}
        alike: dict[tuple[Mesh, tuple[Place, ...]], list[str]] = {}
        for name in {name: None for state in every for kind in (RESIDUALS, BETWEEN) for name in state.get(kind, ())}:
            places = tuple(place_of(state, name) for state in every)
            alike.setdefault((self._mesh_of.get(name, self.meshes[0]), places), []).append(name)
        carried, residuals, between = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for (mesh, places), names in alike.items():
            parts = of_mesh(states, names, places, mesh.place)
            read = partial(residuals_of, parts, mesh.place.rank, mesh.place.size, self._shapes, optional=OPTIONAL)
            summed, apart = read(), read(kind=BETWEEN)
            # Later states still need the residuals of parameters that are frozen or exact now.
            carried |= {name: lost for name, lost in added(summed, apart).items() if name not in columns}
            summed, apart = ({n: lost for n, lost in each.items() if n in columns} for each in (summed, apart))
            if {(place.size, place.replicas) for place in places} != {(mesh.place.size, mesh.place.replicas)}:
                residuals |= added(summed, apart)
                continue
            # If the placement changed, residuals that this rank no longer uses between replicas move to the shards.
            own = {name: columns[name].own(lost, mesh.shards) for name, lost in apart.items()}
            residuals |= added(summed, {name: apart[name] - kept for name, kept in own.items()})
            between |= own
        check_fed_back(carried | residuals | between, feedback=self.feeds_back)
        self.residuals.restart({RESIDUAL: carried}, loaded=True)
        for reductions in self._reductions:
            for kind, reduction in reductions.items():
                reduction.restore(residuals if kind == RESIDUAL else between)
        own_state = next(
            (state for state in every if (state["rank"], state["size"]) == (self._rank, self._size)), every[0]
        )
        for communicator, begun in zip(self._communicators, own_state.get(BEGUN, ()), strict=False):
            communicator.sequence_number = begun

    def begin(self, reduction: Reduction) -> bool:
        """Begin a reduction, and return whether a GradScaler may skip its step."""
        if not self.feeds_back:
            return False
        step = private.backward_pass()
        if step != self._step or reduction in self._begun:
            self._begun.clear()
            self.residuals.begin()
            self._step = step
            if self.residuals.scale.possible:
                private.at_end_of_backward(self._agree)
        self._begun.add(reduction)
        return self.residuals.scale.possible

    def watch(self, job: Callable[[], None], result: Tensor) -> None:
        """Run a job of a step that may be skipped, and record whether its result is finite."""
        job()
        self._finite.append(result.isfinite().all())

    def _agree(self) -> None:
        """Let the ranks agree whether all results of this backward pass are finite. Collective.

        A GradScaler skips the step on all ranks if a gradient overflows in any module, whatever the module's mesh.
        """
        infinite = torch.zeros(1, device=self._device)
        alone = [p.grad.to_local() for p in self._alone if p.grad is not None]

        def job() -> None:
            for finite in [*self._finite, *(gradient.isfinite().all() for gradient in alone)]:
                infinite.add_(~finite)
            self._finite.clear()
            for communicator in self._communicators:
                communicator.allreduce(array_of(infinite), out=array_of(infinite), codec=None)
            self.residuals.watch(infinite == 0)

        self.start(job, True, infinite)

    def __repr__(self) -> str:
        return f"ShardCompression({self._codec!r}, param_codec={self.param_codec!r}, algorithm={self.algorithm!r})"

    def free(self) -> None:
        """Release thread and communicators after training. Collective."""
        self.residuals.scale.free()
        self._jobs.close()
        for communicator in self._communicators:
            communicator.free()

    def start(self, job: Callable[[], Any], wait: bool, *tensors: Tensor) -> Work | None:
        """Queue a collective on some tensors; return a handle, or wait and return None."""

        def run() -> None:
            self.error = None
            try:
                job()
            except Exception as error:
                self.error = error
                raise

        if not wait:
            return self._jobs.submit(run, self.streams.order(*tensors))
        self._jobs.run(run, self.streams.order(*tensors))
        return None


def _number(
    ranks_of: Mapping[Mesh, tuple[dist.ProcessGroup, dist.ProcessGroup | None]], device: torch.device
) -> tuple[int, int]:
    """Number the ranks of a model on several meshes, and the subsets of ranks that each mesh has. Collective.

    Returns
    -------
    tuple of int
        This rank's number among all ranks of the model, and their number.
    """
    groups = [ranks for pair in ranks_of.values() for ranks in pair if ranks is not None]
    own = dist.get_rank()
    lowest = []
    for shards, replicas in ranks_of.values():
        first = min(dist.get_process_group_ranks(shards))
        if replicas is not None:
            first = min(unpacked(each) for each in gathered(packed(first), replicas, device))
        lowest.append(first)
    # The groups are dimensions of meshes, so one gather in each reaches all ranks.
    known = {own: lowest}
    for ranks in dict.fromkeys(groups):
        for each in gathered(packed(list(known.items())), ranks, device):
            known |= dict(unpacked(each))
    for number, mesh in enumerate(ranks_of):
        subsets = sorted({each[number] for each in known.values()})
        mesh.place = mesh.place._replace(subset=subsets.index(lowest[number]), subsets=len(subsets))
    return sorted(known).index(own), len(known)
