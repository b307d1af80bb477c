"""Compressed training of one FSDP2 model (`torch.distributed.fsdp.fully_shard`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from ...codecs.base import Codec
from ...collectives import choose
from ...communicator import Communicator
from ...errors import HookTaken, InvalidArgument
from ...feedback import ErrorFeedback
from ...sparse import Sparsifier
from ..account import Account
from ..arrays import arrays_on
from ..groups.membership import communicator_of
from ..job_queue import JobQueue, Work
from ..loss_scale import LossScale
from ..membership import check_alike
from ..states import BEGUN, BETWEEN, OPTIONAL, REPLICAS, added, logical_name, residuals_of, state_of
from .replicas import Replicas
from .shard_collectives import AveragedReplicas, Columns, GatheredParameters, Lossy, ScatteredGradients


class ShardCompression:
    """The compressed collectives of one FSDP2 model: what `compress` returns.

    Attributes
    ----------
    account : Account
        What was sent so far. Replace it by a new one to count from zero.
    exact : dict
        Whether a parameter and its gradient stay exact whatever the codecs, by name.
    error : BaseException or None
        What ended the last collective, out of which it came; None if that went well.

    Examples
    --------
    >>> model = fully_shard(nn.Linear(64, 64))  # of torch.distributed.fsdp
    >>> compression = compcoll.torch.compress(model, codec="zfp", rate=8)
    >>> model(torch.ones(1, 64)).sum().backward()
    """

    def __init__(
        self,
        model: FSDPModule,
        codec: Codec | None,
        parameters: Codec | None,
        algorithm: str,
        exact: Mapping[str, bool],
        *,
        feedback: bool,
        timeout: float | None = None,
        over: str = "auto",
    ) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._shapes = {logical_name(name): parameter.shape for name, parameter in model.named_parameters()}
        self._carried: dict[str, Tensor] = {}
        states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        groups = [group for state in states for group in state._fsdp_param_groups]
        shared = {group._reduce_scatter_process_group for group in groups}
        if any(isinstance(group._reduce_scatter_comm, ScatteredGradients) for group in groups):
            raise HookTaken("this model's shards are compressed already")
        if len(shared) != 1:
            raise InvalidArgument(f"the model is sharded over {len(shared)} process groups: one is needed")
        replicas = {group.mesh_info.replicate_process_group for group in groups if _has_replicas(group)}
        if len(replicas) > 1 or (replicas and not all(map(_has_replicas, groups))):
            raise InvalidArgument("the model's modules have other replicas than each other: all need the same")
        if replicas:
            choose.check("allreduce", algorithm)
        self.account = Account()
        self.error: BaseException | None = None
        self.exact = dict(exact)
        self.algorithm = algorithm
        self.codec = codec
        self.parameters = parameters
        process_group, device = shared.pop(), groups[0].device
        self.place = arrays_on(device)
        lines = [
            f"codec {codec!r}, parameters {parameters!r}, algorithm {algorithm}, feedback {feedback}, over {over}",
            *(
                f"{name}: {list(parameter.shape)} of {parameter.dtype}, {'exact' if exact[name] else 'compressed'}"
                for name, parameter in model.named_parameters()
            ),
        ]

        def joined(ranks: dist.ProcessGroup) -> Communicator:
            check_alike(ranks, device, lines)
            return communicator_of(*(ranks, device, timeout, over), measured=algorithm == choose.AUTO)

        self.communicator = joined(process_group)
        self.between: Communicator | None = joined(between) if (between := next(iter(replicas), None)) else None
        self._jobs = JobQueue("shards")
        self._scatters: list[ScatteredGradients] = []
        self._gathers: list[GatheredParameters] = []
        self._averages: list[AveragedReplicas] = []
        feedback = feedback and codec is not None
        self._feeds_back, self._device = feedback, device
        self._try(feedback, {parameter.dtype for name, parameter in model.named_parameters() if not exact[name]})
        self.loss_scale = LossScale(model.parameters())
        self._step, self._begun = -1, set[Lossy]()
        self._watched: list[Tensor] = []
        columns = partial(Columns, names=names, exact=exact)
        for group in groups:
            known = columns(group.fsdp_params)
            scattered = ScatteredGradients(self, group, known, feedback=feedback)
            self._scatters.append(scattered)
            self._gathers.append(GatheredParameters(self, known))
            group._reduce_scatter_comm = self._scatters[-1]
            group._all_gather_comm = self._gathers[-1]
            group.post_backward = partial(_post_backward, group, scattered, columns, group.post_backward)
            if between is not None and self.between is not None:
                self._averages.append(AveragedReplicas(scattered, self.between, feedback=feedback))
                group.mesh_info = copy.copy(group.mesh_info)  # which modules share
                group.mesh_info.replicate_process_group = Replicas(between, self._averages[-1])

    @property
    def parameters_error(self) -> float:
        """The relative error, root mean square, of what a module's parameters were sent with last: the largest of all
        modules on this rank. 0 where they are sent exactly; on a GPU the host waits for it.
        """
        return math.sqrt(max((float(gather.lost) for gather in self._gathers), default=0.0))

    def state_dict(self) -> dict[str, Any]:
        """Copy what this rank's compression has lost so far, to be saved with the model: every rank's own."""
        self._settle()
        residuals, between = self._carried | _joined(self._scatters), _joined(self._averages)
        rank, size = self._place()
        state = state_of(rank, size, residuals) | {BEGUN: [each.begun for each in self._communicators()]}
        if self.between is None:
            return state
        return state | state_of(rank, size, residuals, **{BETWEEN: between}) | {REPLICAS: self.replicas}

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on with the losses of an earlier run; as `GradientCompression.load_state_dict` does, whose states may be
        given, too. Of all ranks' states the number of replicas may have been another.
        """
        rank, size = self._place()
        read = partial(residuals_of, states, rank, size, self._shapes, optional=OPTIONAL)
        residuals, between = read(), read(kind=BETWEEN)
        trained = [c for s in self._scatters for c in s.known.compressed if c.parameter.requires_grad]
        compressed = {c.name for c in trained}
        # Of what is frozen or exact now, it is kept for later.
        carried = {name: lost for name, lost in added(residuals, between).items() if name not in compressed}
        residuals, between = ({n: lost for n, lost in each.items() if n in compressed} for each in (residuals, between))
        every = [states] if isinstance(states, Mapping) else states
        if {(state["size"], state.get(REPLICAS, 1)) for state in every} != {(size, self.replicas)}:
            residuals, between = added(residuals, between), {}
        else:  # with another placement than then, this rank adds up other elements between replicas
            columns = {c.name: c for average in self._averages for c in average.known.compressed}
            own = {name: columns[name].own(lost, self.communicator) for name, lost in between.items()}
            residuals, between = added(residuals, {name: between[name] - kept for name, kept in own.items()}), own
        self._watched, self._carried = [], carried
        self.loss_scale.restart(loaded=True)
        for collective in (*self._scatters, *self._averages):
            collective.forget()
        for collective in self._scatters:
            collective.restore(residuals)
        for average in self._averages:
            average.restore(between)
        for communicator, begun in zip(self._communicators(), every[0].get(BEGUN, ()), strict=False):
            communicator.begun = begun

    @property
    def replicas(self) -> int:
        """How many replicas of the shards there are."""
        return 1 if self.between is None else self.between.size

    def begin(self, collective: Lossy) -> bool:
        """Begin a collective of a step: tells whether a GradScaler may skip that step."""
        if not self._feeds_back:
            return False
        step = torch._C._current_graph_task_id()
        if step != self._step or collective in self._begun:
            self._begun.clear()
            self._settle()
            self._multiply(self.loss_scale.begin())
            self._step = step
        self._begun.add(collective)
        return self.loss_scale.possible

    def watch(self, job: Callable[[], None], result: Tensor) -> None:
        """Run a job of a step that may be skipped. All ranks learn whether its result is finite on all."""
        job()
        found = (~result.isfinite().all()).to(torch.float32).reshape(1)
        for communicator in self._communicators():
            communicator.allreduce(self.place.array(found), out=self.place.array(found), codec=None)
        self._watched.append(found)

    def _settle(self) -> None:
        """Undo what the last step changed if not all its gradients are finite: a GradScaler skips such a step."""
        if not self._watched:
            return
        ended = self.loss_scale.ended

        def settle() -> None:
            if any(map(bool, self._watched)):
                for collective in (*self._scatters, *self._averages):
                    collective.undo()
            if ended:
                self._watched.clear()
                for collective in (*self._scatters, *self._averages):
                    collective.forget()

        self.place.run(self._jobs, settle)

    def _multiply(self, ratio: float) -> None:
        """Have what is kept in another unit."""
        if ratio == 1.0:
            return

        def multiply() -> None:
            for collective in (*self._scatters, *self._averages):
                collective.multiply(ratio)

        self.place.run(self._jobs, multiply)

    def _try(self, feedback: bool, dtypes: Iterable[torch.dtype]) -> None:
        """Refuse what a step would: PyTorch would tell it less well."""
        if self.codec is None:
            return
        sparse = isinstance(self.codec, Sparsifier)
        for dtype in sorted(dtypes, key=str):
            for communicator in self._communicators():
                first = communicator is self.communicator
                algorithm = self.algorithm
                if algorithm == choose.AUTO:  # which would not compress so little
                    algorithm = "sparse_ring" if sparse and not first else "direct"
                zeros = self.place.array(torch.zeros(64 * communicator.size, dtype=dtype, device=self._device))
                (communicator.reduce_scatter if first else communicator.allreduce)(
                    zeros, feedback=ErrorFeedback() if feedback else None, codec=self.codec, algorithm=algorithm
                )

    def _communicators(self) -> list[Communicator]:
        """List those among the shards, and between the replicas if there are any."""
        return [self.communicator] if self.between is None else [self.communicator, self.between]

    def _place(self) -> tuple[int, int]:
        """Tell this rank, and how many there are, counted replica by replica."""
        shards = self.communicator
        if self.between is None:
            return shards.rank, shards.size
        return self.between.rank * shards.size + shards.rank, self.between.size * shards.size

    def __repr__(self) -> str:
        return f"ShardCompression({self.codec!r}, parameters={self.parameters!r}, algorithm={self.algorithm!r})"

    def free(self) -> None:
        """Give back thread and communicator, when the model is trained no more. Collective."""
        self.loss_scale.free()
        self._jobs.close()
        for communicator in self._communicators():
            communicator.free()

    def start(self, job: Callable[[], Any], wait: bool, *tensors: Tensor) -> Work | None:
        """Put a collective on some tensors in the line; PyTorch gets a handle unless it wants to wait."""

        def run() -> None:
            self.error = None
            try:
                job()
            except Exception as error:
                self.error = error
                raise

        if not wait:
            return self.place.submit(self._jobs, run, *tensors)
        self.place.run(self._jobs, run, *tensors)
        return None

    def count(self, communicator: Communicator, least: float) -> None:
        """Account for the collective of a communicator that ended last."""
        assert communicator.stats is not None
        self.account.add(communicator.stats, least)


def _has_replicas(group: Any) -> bool:
    return isinstance(group.mesh_info, HSDPMeshInfo) and group.mesh_info.replicate_mesh_size > 1


def _joined(collectives: Sequence[Lossy]) -> dict[str, Tensor]:
    """Collect what several modules' collectives have lost."""
    return {name: lost for each in collectives for name, lost in each.residuals().items()}


def _post_backward(
    group: Any,
    scattered: ScatteredGradients,
    columns: Callable[[Sequence[Any]], Columns],
    post_backward: Callable[..., Any],
    *unused: Any,
) -> Any:
    """Note which parameters have gradients before PyTorch puts these side by side."""
    scattered.present = columns(list(filter(partial(_has_gradient, group), group.fsdp_params)))
    return post_backward(*unused)


def _has_gradient(group: Any, parameter: Any) -> bool:
    if not hasattr(parameter, "_unsharded_param"):
        return False
    whole = parameter.unsharded_param
    found = parameter.unsharded_accumulated_grad is not None or whole.grad is not None
    return found or (whole.requires_grad and getattr(group, "reduce_scatter_unused_params", False))
