"""Compressed training of one FSDP2 model (`torch.distributed.fsdp.fully_shard`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from ...codecs.base import Codec
from ...collectives import choose
from ...communicator import Communicator
from ...errors import HookTaken, InvalidArgument
from ..account import Account
from ..arrays import arrays_on
from ..groups.membership import communicator_of
from ..job_queue import JobQueue, Work
from ..membership import check_alike
from ..states import Residuals, residuals_of, state_of
from .replicas import BEGUN, BETWEEN, REPLICAS, Replicas, completed, folded
from .shard_collectives import AveragedReplicas, GatheredParameters, Lossy, ScatteredGradients, columns_of


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

        self.communicator = shards = joined(process_group)
        self.between: Communicator | None = joined(between) if (between := next(iter(replicas), None)) else None
        self._jobs = JobQueue("shards")
        self._scatters: list[ScatteredGradients] = []
        self._gathers: list[GatheredParameters] = []
        self._averages: list[AveragedReplicas] = []
        feedback = feedback and codec is not None
        for group in groups:
            columns = columns_of(group.fsdp_params, names)
            self._scatters.append(ScatteredGradients(self, columns, shards, shards.size, feedback=feedback))
            self._gathers.append(GatheredParameters(self, columns))
            group._reduce_scatter_comm = self._scatters[-1]
            group._all_gather_comm = self._gathers[-1]
            if between is not None and self.between is not None:
                self._averages.append(AveragedReplicas(self, columns, self.between, 1, feedback=feedback))
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
        residuals, between = _joined(self._scatters), _joined(self._averages)
        rank, size = self._place()
        begun = {BEGUN: [communicator.begun for communicator in self._communicators()]}
        if self.between is None:
            return state_of(rank, size, residuals) | begun
        return state_of(rank, size, residuals, **{BETWEEN: between}) | {REPLICAS: self.between.size} | begun

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on with the losses of an earlier run; as `GradientCompression.load_state_dict` does. Of all ranks'
        states the number of replicas may have been another. After a state that lacks what codecs drew, as early ones
        do, they draw on from where they are.
        """
        rank, size = self._place()
        replicas = 1 if self.between is None else self.between.size
        whole = {c.name: c.size for scatter in self._scatters for c in scatter.columns if not self.exact[c.name]}
        own = {c.name: average.size_of(c) for average in self._averages for c in average.columns}
        given: Any = completed(states) if isinstance(states, Mapping) else list(map(completed, states))
        more = (BETWEEN, REPLICAS, BEGUN)
        residuals = residuals_of(given, rank, size, whole, more, drawn=BEGUN)
        every = [given] if isinstance(given, Mapping) else given
        if {(state["size"], state[REPLICAS]) for state in every} != {(size, replicas)}:
            if given is not every:
                raise InvalidArgument(
                    f"this is a state of {given[REPLICAS]} replicas, but here are {replicas}: "
                    "give the states of all ranks"
                )
            given = [folded(state, replicas) for state in every]
            residuals = residuals_of(given, rank, size, whole, more, drawn=BEGUN)
        between = residuals_of(given, rank, size, own, more, BETWEEN, BEGUN)
        for collective in self._scatters:
            collective.restore(residuals)
        for average in self._averages:
            average.restore(between)
        for communicator, begun in zip(self._communicators(), every[0].get(BEGUN, ()), strict=False):
            communicator.begun = begun

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


def _joined(collectives: Sequence[Lossy]) -> Residuals:
    """Collect what several modules' collectives have lost."""
    return {name: lost for each in collectives for name, lost in each.residuals().items()}
