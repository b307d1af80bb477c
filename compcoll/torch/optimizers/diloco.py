"""DiLoCo and Streaming DiLoCo: ranks train locally and average their parameter changes from time to time."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...codecs.base import Codec
from ...codecs.registry import as_codec
from ...communicator import Communicator
from ...deprecated import renamed_arguments, renamed_attribute
from ...errors import InvalidArgument
from .. import private
from ..buffers import HostArray
from ..handles import Handle
from ..hooks import check_hook_free
from ..job_queue import JobQueue
from ..policy import check_whole, compressing
from ..states import state_of
from ..training_stats import RecentSteps, TrainingStats
from .common import (
    Averager,
    Flat,
    Ranks,
    any_rank,
    average,
    broadcast_object,
    check_groups,
    check_together,
    check_trained,
    groups_of,
    join,
    keep_gradients,
    load,
    load_by_name,
    module_of,
    parameters_of,
    read_states,
    scaling_of,
    state_by_name,
    unscale,
    untrained,
)

Outer = Callable[[list[Tensor]], torch.optim.Optimizer]
NESTEROV: Outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, fused=True)
"""The paper's outer optimizer."""

_BY_NAME = ("parameters", "outer", "under_way")
_STATE = ("settings", "steps", "rounds", "begun", "versions", "due", "outer_state", "inner_state", "under_way")


@dataclass(frozen=True)
class Schedule:
    """The options of `DiLoCo` that define when fragments are averaged, and how the averages are mixed in.

    Raises
    ------
    InvalidArgument
        If an option is out of range, or two options conflict.
    """

    every: int
    warmup: int
    fragments: int
    delay: int
    alpha: float

    def __post_init__(self) -> None:
        for name, lowest in (("every", 1), ("warmup", 0), ("fragments", 1), ("delay", 0)):
            check_whole(name, getattr(self, name), lowest)
        if self.fragments > self.every:
            raise InvalidArgument(f"fragments={self.fragments} must be at most every={self.every}: one per step")
        if self.delay >= self.every:
            raise InvalidArgument(f"delay={self.delay} must be below every={self.every}, when the next average begins")
        if not 0 <= self.alpha < 1:
            raise InvalidArgument(f"alpha={self.alpha!r}: a number from 0 to below 1 is needed")

    @property
    def phases(self) -> list[int]:
        """For each fragment, the step of each round after which it is sent."""
        return [self.every * (number + 1) // self.fragments % self.every for number in range(self.fragments)]


class UnderWay(NamedTuple):
    """An average of outer gradients that is running, or complete and not yet mixed in.

    Attributes
    ----------
    due : int
        Step after which the average is mixed in.
    gradient : Tensor
        The outer gradient; after the work completes, the ranks' mean.
    work : Handle or None
        The running average; its result is the bytes sent. None if it has completed.
    residual : array or None
        The residual before the average.
    """

    due: int
    gradient: Tensor
    work: Handle[int] | None
    residual: HostArray | None


class Fragment:
    """Layers of a model that are synchronised together.

    Parameters
    ----------
    parameters : mapping
        Parameters by name.
    phase : int
        Step of each round after which the fragment is sent.
    make : callable
        Makes the averager of a vector.

    Attributes
    ----------
    parameters : dict
        This rank's parameters, which the inner optimizer moves.
    outer : Tensor
        The common parameters of all ranks, as one vector in host memory.
    version : int
        Number of outer steps so far.
    sent : int
        Step at which the outer gradient was last computed; -1 if it must be computed again.
    under_way : UnderWay or None
        The average that is not mixed in yet.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], phase: int, make: Callable[[Tensor], Averager]) -> None:
        self.parameters, self.phase = dict(parameters), phase
        self.flat = Flat(self.parameters)
        self.outer = self.flat.pack(self.parameters.values())
        self.averager = make(self.outer)
        self.version, self.sent = 0, -1
        self.under_way: UnderWay | None = None

    def gradient(self, step: int) -> Tensor:
        """Return the outer gradient of a step: the common parameters minus this rank's."""
        self.sent = step
        gradient = torch.empty_like(self.outer)
        views = zip(self.flat.views(self.outer), self.flat.views(gradient), strict=True)
        for parameter, (common, difference) in zip(self.parameters.values(), views, strict=True):
            own = parameter.detach()
            # Subtract in the parameter's precision: the rounding by `mix` is not a change that this rank made.
            torch.sub(common.to(own.dtype).to(common.dtype), own.to(common), out=difference)
        return gradient

    def mix(self, alpha: float) -> None:
        """Set this rank's parameters to α times their values plus 1 - α times the common ones."""
        for parameter, common in zip(self.parameters.values(), self.flat.views(self.outer), strict=True):
            target = parameter.detach()
            if not alpha:
                target.copy_(common)
                continue
            own = target.to(common.dtype)  # the same tensor if the type matches
            target.copy_(torch.lerp(common.to(target.device), own, alpha, out=own))

    def average_gradients(self, communicator: Communicator, stats: TrainingStats, used: Container[str]) -> int:
        """Replace the gradients of ``used`` parameters by their exact mean; return the bytes sent. Collective."""
        mean = self.flat.pack(p.grad for p in self.parameters.values())
        nbytes = average(mean, communicator, stats)
        for (name, parameter), values in zip(self.parameters.items(), self.flat.views(mean), strict=True):
            if name in used:
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = torch.empty_like(parameter)  # fused steps need its memory format
                parameter.grad.copy_(values)
        return nbytes

    def agree(self, communicator: Communicator) -> None:
        """Set the common and this rank's parameters to rank 0's common parameters. Collective."""
        values = self.outer.numpy()
        communicator.bcast(values, 0, out=values, codec=None)
        self.mix(0.0)

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the arrays to save, by kind and name, including residuals and a pending mean if there are any."""
        by_name, residual, under_way = self.flat.by_name, self.averager.residual, self.under_way
        return {
            "parameters": by_name(self.flat.pack(self.parameters.values())),
            "outer": by_name(self.outer),
            "residuals": {} if residual is None else by_name(torch.from_numpy(residual)),
            "under_way": {} if under_way is None else by_name(under_way.gradient),
            "due": {} if under_way is None else dict.fromkeys(self.flat.shapes, under_way.due),
        }

    def due(self, due: Mapping[str, int]) -> int | None:
        """Return the step at which this fragment's pending mean in a state is due; None if there is none.

        Raises
        ------
        InvalidArgument
            If the state's means are of other fragments.
        """
        found = {due.get(name) for name in self.flat.shapes}
        if len(found) > 1:
            raise InvalidArgument("this state has unfinished averages of other fragments: use the same fragments=")
        return found.pop()

    def load(self, state: Mapping[str, Any], residuals: Mapping[str, Tensor], size: int) -> None:
        """Load a state, with this rank's part of the residuals.

        If the state is of another number of ranks than ``size``, the fragment starts from the common parameters.
        """
        due = self.due(state["due"])
        self.flat.load(state["outer"], self.outer)
        if self.averager.residual is not None:
            self.flat.load(residuals, torch.from_numpy(self.averager.residual))
            if not self.averager.of_mean:
                self.averager.residual *= size / state["size"]
        self.mix(0.0)
        if state["size"] == size:
            for name, parameter in self.parameters.items():
                parameter.detach().copy_(state["parameters"][name].reshape(parameter.shape))
        if due is not None:
            self.under_way = UnderWay(due, self.flat.load(state["under_way"], torch.empty_like(self.outer)), None, None)

    def abandon(self) -> None:
        """Discard the pending average: the next outer gradient includes its content."""
        if self.under_way is None:
            return
        self.sent = -1
        work, residual = self.under_way.work, self.under_way.residual
        self.under_way = None
        if work is not None:
            with suppress(Exception):  # the caller knows the cause, or the next call reports it
                work.wait()
            if residual is not None and self.averager.residual is not None:
                self.averager.residual[...] = residual


class DiLoCo:
    """Train each rank locally, and average the parameter changes of many steps: DiLoCo. Collective.

    Every ``every`` steps of the inner optimizer, the outer gradients (common parameters minus this rank's own) are
    averaged over the ranks, compressed and with feedback. The outer optimizer moves the common parameters by the mean,
    and all ranks continue from there. Each rank keeps its own gradients, also with DistributedDataParallel, whose
    communication hook this object takes. A hook counts the calls of ``inner.step()``. No other call is needed.

    *Streaming*: with ``fragments`` above 1, the model's layers are distributed over fragments in turn. Each fragment is
    sent every ``every`` steps, at different steps, so that less is sent at once. With ``delay``, a fragment is sent
    while the next ``delay`` steps run, and mixed in after them: ``θ ← alpha θ + (1 - alpha) θ_outer``.

    Parameters
    ----------
    model : torch.nn.Module
        DistributedDataParallel, or any other module. Its parameters and buffers become those of rank 0. If it joins
        ranks that have trained already, it takes theirs.
    inner : torch.optim.Optimizer
        Any optimizer that has all trainable parameters of the model.
    outer : callable, optional
        Makes the outer optimizer from a list of vectors, one per fragment. It must work element by element. Default:
        SGD with a learning rate of 0.7 and Nesterov momentum of 0.9.
    every : int
        The paper's H: inner steps between two averages.
    warmup : int
        Number of initial steps in which gradients are averaged exactly, and the ranks stay together. The paper starts
        from a model trained for 27 % of all steps.
    fragments : int
        Number of fragments: 1 to ``every``, and at most the number of the model's layers.
    delay : int
        Steps that an average may take, below ``every``.
    alpha : float, optional
        Weight of a rank's own parameters in the mixture, from 0 to below 1. Default: 0, or 0.5 with a delay, as in the
        paper.
    codec : str or Codec, optional
        Codec of outer gradients, as for `compcoll.allreduce`. None sends them uncompressed.
    feedback : bool
        Whether to add residuals to the next outer gradient.
    algorithm, group, timeout, transport, **codec_options
        As for `OneBitAdam`.

    Attributes
    ----------
    outer : torch.optim.Optimizer
        The outer optimizer. Its learning rate may be changed, to the same value on all ranks.
    steps : int
        Inner steps so far.
    stats : TrainingStats
        Bytes and calls so far, with the mean and the maximum per step. Assign a new TrainingStats to count from zero.
    communicator : Communicator
        Averages among the ranks. Use it for nothing else but its `shrink`.

    Raises
    ------
    InvalidArgument
        If an option is invalid, the inner optimizer has other parameters than the model, or the codec's residuals would
        grow without bound.
    HookTaken, CollectiveMismatch, NotUnderMPI, MPIMissing, ThreadsUnavailable
        As for `OneBitAdam`.

    Notes
    -----
    The outer parameters and the data to send are in host memory.

    The means given to the outer optimizer plus all ranks' residuals equal the sum of the exact means of the outer
    gradients, up to rounding. With ``feedback=False``, no residuals are kept.

    With a GradScaler, a local step that overflows does not change this rank's parameters, but counts, so that all ranks
    stay at the same step without communication. In the warm-up, all ranks skip such a step together.

    If ranks die, ``inner.step()`` raises the error of the average. Set `group` to a group of the surviving ranks, and
    continue.

    References
    ----------
    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105;
    "Streaming DiLoCo with overlapping communication", arXiv 2501.18512.

    Examples
    --------
    >>> model = nn.Linear(64, 64)
    >>> inner = torch.optim.AdamW(model.parameters())
    >>> diloco = compcoll.torch.DiLoCo(model, inner, every=50, codec="minmax", bits=4)
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> inner.step()
    """

    conserves: ClassVar[str] = "exact"
    """How the sent values plus the residuals relate to the values to send: "exact", "decay" or "none"."""

    account = renamed_attribute("account", "stats")

    @renamed_arguments(over="transport")
    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        outer: Outer = NESTEROV,
        *,
        every: int,
        warmup: int = 0,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        codec: str | Codec | None = None,
        feedback: bool = True,
        algorithm: str | None = None,
        group: Ranks | None = None,
        timeout: float | None = None,
        transport: str = "auto",
        **codec_options: Any,
    ) -> None:
        chosen = as_codec(codec, codec_options)
        self._algorithm = compressing(chosen) if algorithm is None else algorithm
        make, text = self._averagers(chosen, feedback)
        schedule = Schedule(every, warmup, fragments, delay, (0.5 if delay else 0.0) if alpha is None else float(alpha))
        self._module = module_of(model)
        self._names = {id(p): name for name, p in self._module.named_parameters()}
        parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._trained = {id(p): name for name, p in parameters.items()}
        check_inner(inner, parameters)
        check_hook_free(model)
        self._inner, self._schedule = inner, schedule
        dealt = strided(parameters, schedule.fragments)
        self._fragments = [Fragment(each, phase, make) for each, phase in zip(dealt, schedule.phases, strict=True)]
        self.outer = outer([fragment.outer for fragment in self._fragments])
        options = ", ".join(f"{name} {value}" for name, value in asdict(schedule).items())
        self._settings = f"{options}, {text}"
        self._lines = [
            f"{type(self).__name__}: {self._settings}, over {transport}, {self.outer!r}".replace("\n", " "),
            *(f"{name}: {list(p.shape)} of {p.dtype}" for name, p in parameters.items()),
        ]
        self._timeout, self._over = timeout, transport
        self.steps, self._rounds = 0, -1
        self.stats = TrainingStats()
        self._recent = RecentSteps(max(schedule.delay, 1))
        self._join(group)
        self._resumed = False
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._handles = inner.register_step_pre_hook(self._before), inner.register_step_post_hook(self._stepped)
        self._inner_scales = vars(inner).get(private.SUPPORTS_SCALING)
        setattr(inner, private.SUPPORTS_SCALING, True)
        keep_gradients(model, f"compcoll {type(self).__name__}")

    def _averagers(self, codec: Codec | None, feedback: bool) -> tuple[Callable[[Tensor], Averager], str]:
        """Return the factory of averagers, and its settings as text."""
        text = f"codec {codec!r}, feedback {feedback}, algorithm {self._algorithm}"
        return partial(Averager, codec, self._algorithm, feedback), text

    @property
    def group(self) -> Ranks | None:
        """The ranks. Between two steps, all ranks of another group may set it.

        After ranks have died, use the surviving ones: a new process group, or
        ``diloco.group = diloco.communicator.shrink()`` if the library of MPI supports this. `synchronize` then makes
        the outer step that failed. To add ranks, each new rank makes a `DiLoCo` at the same time. All ranks then get
        the outer parameters, the outer optimizer's state and the step number of a rank with the most outer steps. Ranks
        that have made this number of outer steps keep their own parameters; all other ranks start from the outer ones.
        Unfinished averages are discarded: the next average includes their content.
        """
        return self._ranks

    @group.setter
    def group(self, ranks: Ranks) -> None:
        for fragment in self._fragments:
            fragment.abandon()
        self._jobs.close()
        self._join(ranks)
        self._resumed = False

    def synchronize(self) -> None:
        """Average all fragments now, and set all ranks' parameters to the outer ones. Collective.

        Call this at the end of a training, for example.

        Raises
        ------
        CollectiveMismatch
            If ranks call this after different steps.
        """
        self._check_resumed()
        self._finish(self._fragments)
        check_together(self.communicator, f"{type(self).__name__}.synchronize after step {self.steps}")
        # Fragments that were just sent have no change to send: momentum alone would move them.
        for fragment in (f for f in self._fragments if f.sent != self.steps):
            self._begin(fragment, self.steps)
        self._finish(self._fragments)
        with torch.no_grad():
            for fragment in self._fragments:
                fragment.mix(0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save. Each rank saves its own, or `GatheredState` saves one for all.

        It contains this rank's parameters, the outer ones, both optimizers' states, the residuals, and unfinished
        averages, for which this method waits.
        """
        for fragment in self._fragments:
            self._settle(fragment)
        parts = [fragment.state() for fragment in self._fragments]
        merged = {kind: {name: each for part in parts for name, each in part[kind].items()} for kind in parts[0]}
        by_name = {kind: merged[kind] for kind in _BY_NAME}
        return state_of(self.communicator.rank, self.communicator.size, merged["residuals"], **by_name) | {
            "settings": asdict(self._schedule),
            "steps": self.steps,
            "rounds": self._rounds,
            "begun": self.communicator.sequence_number,
            "outer_state": outer_state(self.outer, self._fragments),
            "inner_state": state_by_name(self._inner, self._names),
            "versions": [fragment.version for fragment in self._fragments],
            "due": merged["due"],
        }

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue an earlier run, including the model's parameters and the inner optimizer's state.

        Parameters
        ----------
        states : dict, or sequence of dict
            This rank's `state_dict`, or those of all ranks of the earlier run. With all of them, the number of ranks
            may change: each rank then starts from the outer parameters, with the inner optimizer's state of an earlier
            rank. Codecs with random rounding continue from the saved position, or from the current one if an old state
            lacks it. Values of parameters that are no longer trained are dropped with a warning.

        Raises
        ------
        InvalidArgument
            If the states belong to another number of ranks, rank, or model, or to other settings, such as ``every``.
            Nothing is changed in this case. If the ranks' states are of different steps, the next step raises
            `CollectiveMismatch`.
        """
        rank, size = self.communicator.rank, self.communicator.size
        shapes = {name: shape for fragment in self._fragments for name, shape in fragment.flat.shapes.items()}
        every, residuals = read_states(
            *(states, rank, size, ("parameters", "outer"), ("residuals", "under_way"), _STATE, shapes, self._module)
        )
        mine = every[rank % len(every)]
        if (settings := {"warmup": 0, **mine["settings"]}) != (here := asdict(self._schedule)):
            raise InvalidArgument(f"this state was saved with {settings}, but this optimizer has {here}")
        check_groups(mine["inner_state"]["groups"], len(self._inner.param_groups))
        check_groups(mine["outer_state"]["groups"], len(self.outer.param_groups))
        for fragment in self._fragments:
            fragment.due(mine["due"])
        for fragment in self._fragments:
            fragment.abandon()
        load_by_name(self._inner, self._names, mine["inner_state"])
        load_outer_state(self.outer, self._fragments, mine["outer_state"])
        self.steps, self._rounds = mine["steps"], mine["rounds"]
        self.communicator.sequence_number = mine.get("begun", self.communicator.sequence_number)
        for fragment, version in zip(self._fragments, mine["versions"], strict=True):
            fragment.load(mine, residuals, size)
            fragment.version, fragment.sent = version, self.steps if self._turn_of(fragment) else -1
        self._resumed = True

    def free(self) -> None:
        """Remove the inner optimizer's hooks, and release thread and communicator. Collective. DDP keeps its hook."""
        self._let_go()
        for fragment in self._fragments:
            fragment.abandon()
        self._jobs.close()
        if self.communicator is not self._ranks:
            self.communicator.free()

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.free()
        else:  # other ranks may be gone
            self._let_go()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings})"

    def _let_go(self) -> None:
        """Restore the inner optimizer's hooks and attributes."""
        for handle in self._handles:
            handle.remove()
        vars(self._inner).pop(private.SUPPORTS_SCALING, None)
        if self._inner_scales is not None:
            setattr(self._inner, private.SUPPORTS_SCALING, self._inner_scales)

    def _check_resumed(self) -> None:
        """After loading a state, check that all ranks continue from the same step. Collective."""
        if self._resumed:
            check_together(self.communicator, f"{type(self).__name__} goes on from a state of step {self.steps}")
            self._resumed = False

    @torch.compiler.disable
    @torch.no_grad()
    def _before(self, _: object, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Unscale gradients, average those of the warm-up, and hide those that overflow.

        The inner step without gradients changes nothing, but counts.
        """
        self._hidden = []
        with scaling_of(self._inner) as scaling:
            check_trained(self._inner, self._trained)
            self._check_resumed()
            overflowed, scale = scaling or (False, 1.0)
            parameters = {name: p for fragment in self._fragments for name, p in fragment.parameters.items()}
            warming = self.steps < self._schedule.warmup
            if warming:
                if any(each is not None for each in (*args[1:], *given.values())):  # args[0] is the optimizer
                    raise InvalidArgument("warmup averages gradients: compute them before step(), not in a closure")
                flags = [overflowed, *(p.grad is not None for p in parameters.values())]
                overflowed, *used = any_rank(self.communicator, flags)
            if scaling is not None:
                unscale(parameters.values(), scale)
                self._inner.found_inf = self._inner.grad_scale = None  # the inner optimizer must not scale again
            if overflowed:
                self._hidden = [(p, p.grad) for p in parameters.values() if p.grad is not None]
                for parameter, _gradient in self._hidden:
                    parameter.grad = None
            elif warming:
                names = {name for name, wanted in zip(parameters, used, strict=True) if wanted}
                nbytes = sum(f.average_gradients(self.communicator, self.stats, names) for f in self._fragments)
                self.stats.peak_step_nbytes = max(self.stats.peak_step_nbytes, nbytes)

    @torch.compiler.disable
    @torch.no_grad()
    def _stepped(self, *_: object) -> None:
        """Count a step of the inner optimizer, mix in due averages, and send the fragments of this step."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        with scaling_of(self._inner):
            self._count()

    def _count(self) -> None:
        self.steps += 1
        self.stats.steps += 1
        self._recent.begin()
        if self.steps <= self._schedule.warmup:
            self._rounds += 1
            for fragment in self._fragments:
                fragment.flat.pack(fragment.parameters.values(), fragment.outer)
                if self.steps == self._schedule.warmup:  # a rank that joined during these steps may differ
                    fragment.agree(self.communicator)
            return
        self._finish([f for f in self._fragments if f.under_way is not None and f.under_way.due <= self.steps])
        for fragment in self._fragments:
            if self._turn_of(fragment):
                self._begin(fragment, self.steps + self._schedule.delay)
                if not self._schedule.delay:
                    self._finish([fragment])

    def _turn_of(self, fragment: Fragment) -> bool:
        """Return whether a fragment is sent after this step."""
        return self.steps % self._schedule.every == fragment.phase

    def _begin(self, fragment: Fragment, due: int) -> None:
        """Start to average a fragment's outer gradient."""
        gradient = fragment.gradient(self.steps)
        job = partial(fragment.averager.average, gradient, self.communicator, self.stats)
        residual = None if fragment.averager.residual is None else fragment.averager.residual.copy()
        fragment.under_way = UnderWay(due, gradient, self._jobs.submit(job), residual)

    def _finish(self, fragments: Sequence[Fragment]) -> None:
        """Wait for the averages of fragments and make their outer steps, in due order."""
        for fragment in sorted(fragments, key=lambda each: 0 if each.under_way is None else each.under_way.due):
            if fragment.under_way is None:
                continue
            self._settle(fragment)
            fragment.outer.grad = fragment.under_way.gradient
            self.outer.step()
            fragment.outer.grad = None
            fragment.under_way = None
            fragment.version += 1
            self._rounds += 1
            fragment.mix(self._schedule.alpha)

    def _settle(self, fragment: Fragment) -> None:
        """Wait for an average. If it fails, discard all pending averages and restore their residuals."""
        under_way = fragment.under_way
        if under_way is None or under_way.work is None:
            return
        try:
            nbytes = under_way.work.result()
        except Exception:
            for each in self._fragments:
                each.abandon()
            raise
        fragment.under_way = under_way._replace(work=None)
        self.stats.peak_step_nbytes = max(self.stats.peak_step_nbytes, self._recent.spread(nbytes))

    def _join(self, ranks: Ranks | None) -> None:
        """Average with these ranks from now on, starting from the state of the most advanced rank. Collective."""
        communicator = join(ranks, self._lines, self._timeout, self._over, self._algorithm)
        self._ranks: Ranks | None = ranks
        self.communicator = communicator
        self._jobs = JobQueue("diloco")
        for fragment in self._fragments:
            fragment.averager.try_out(communicator)
        rounds = communicator.allgather(np.array([self._rounds]), codec=None).ravel()
        root = int(rounds.argmax())
        common = broadcast_object(root, communicator, self._common() if communicator.rank == root else {})
        behind = self._rounds < rounds[root] or self._rounds < 0
        if communicator.rank != root:
            self.steps = common["steps"]
            self.outer.load_state_dict(common["outer_optimizer"])
            states = zip(self._fragments, common["outer"], common["versions"], common["sent"], strict=True)
            for fragment, outer, version, sent in states:
                fragment.outer.copy_(outer)
                fragment.version, fragment.sent = version, sent
                if behind:
                    fragment.mix(0.0)
            others = untrained(self._module, self._trained) if behind else ()
            for each, value in zip(others, common["others"], strict=behind):
                each.detach().copy_(value)
        self._rounds = max(int(rounds[root]), 0)

    def _common(self) -> dict[str, Any]:
        """Collect the state that all ranks share."""
        return {
            "steps": self.steps,
            "outer": [fragment.outer for fragment in self._fragments],
            "versions": [fragment.version for fragment in self._fragments],
            "sent": [fragment.sent for fragment in self._fragments],
            "outer_optimizer": self.outer.state_dict(),
            "others": [each.detach().cpu() for each in untrained(self._module, self._trained)],
        }


def strided(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Distribute a model's layers over ``count`` fragments in turn.

    Parameters whose names agree up to the first number form a layer. Names without a number must agree up to the first
    dot.

    Raises
    ------
    InvalidArgument
        If the model has fewer layers than ``count``.
    """
    layers: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        words = name.split(".")
        number = next((at for at, word in enumerate(words) if word.isdigit()), 0)
        layers.setdefault(".".join(words[: number + 1]), {})[name] = parameter
    if len(layers) < count:
        raise InvalidArgument(f"fragments={count}: the model has {len(layers)} layers, {', '.join(layers)}")
    dealt: list[dict[str, nn.Parameter]] = [{} for _ in range(count)]
    for at, layer in enumerate(layers.values()):
        dealt[at % count] |= layer
    return dealt


def check_inner(inner: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that an inner optimizer has exactly the model's trainable parameters.

    Raises
    ------
    InvalidArgument
        If it lacks a parameter, or has others.
    """
    held = {id(p) for group in inner.param_groups for p in group["params"] if p.requires_grad}
    lacking = [name for name, p in parameters.items() if id(p) not in held]
    foreign = len(held - {id(p) for p in parameters.values()})
    if lacking or foreign:
        what = f"lacks {lacking[0]!r}" if lacking else f"has {foreign} that are not the model's"
        raise InvalidArgument(f"the inner optimizer must have all trainable parameters of the model, but it {what}")


def outer_state(outer: torch.optim.Optimizer, fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Copy an outer optimizer's state: vectors are split by kind and parameter, other values are kept by fragment."""
    vectors: dict[str, dict[str, Tensor]] = {}
    rest: list[dict[str, Any]] = []
    for fragment in fragments:
        state = outer.state.get(fragment.outer, {})
        shape = fragment.outer.shape
        of_elements = {kind for kind, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
        rest.append({kind: deepcopy(value) for kind, value in state.items() if kind not in of_elements})
        for kind in of_elements:
            vectors.setdefault(kind, {}).update(fragment.flat.by_name(state[kind].clone()))
    return {"vectors": vectors, "rest": rest, "groups": groups_of(outer)}


def load_outer_state(outer: torch.optim.Optimizer, fragments: Sequence[Fragment], state: Mapping[str, Any]) -> None:
    """Load a state from `outer_state`; elements that it lacks are 0."""
    kept = {}
    for fragment, rest in zip(fragments, state["rest"], strict=True):
        kept[id(fragment.outer)] = one = deepcopy(rest)
        for kind, arrays in state["vectors"].items():
            if held := [arrays[name] for name in fragment.flat.shapes if name in arrays]:
                one[kind] = torch.zeros_like(fragment.outer, dtype=held[0].dtype)
                fragment.flat.load(arrays, one[kind])
    places = {at: kept[id(p)] for at, p in enumerate(parameters_of(outer)) if kept[id(p)]}
    load(outer, places, state["groups"])
