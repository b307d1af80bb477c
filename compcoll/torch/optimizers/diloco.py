"""Local steps: ranks train on their own, and every so often average how far they have come. DiLoCo, also streaming."""

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
from ..arrays import HostArray
from ..handles import Handle
from ..hooks import check_hook_free
from ..job_queue import JobQueue
from ..policy import check_whole, compressing
from ..states import state_of
from ..training_stats import RecentSteps, TrainingStats
from .ranks import (
    SUPPORTED,
    Ranks,
    any_rank,
    broadcast_object,
    check_together,
    join,
    keep_gradients,
    module_of,
    scaling_of,
    unscale,
)
from .vectors import (
    Exchange,
    Flat,
    check_groups,
    check_trained,
    exact_mean,
    groups_of,
    load,
    load_by_name,
    parameters_of,
    read_states,
    state_by_name,
    untrained,
)

Outer = Callable[[list[Tensor]], torch.optim.Optimizer]
NESTEROV: Outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, fused=True)
"""The paper's outer optimizer."""

_BY_NAME = ("parameters", "outer", "under_way")
_STATE = ("settings", "steps", "rounds", "begun", "versions", "due", "outer_state", "inner_state", "under_way")


@dataclass(frozen=True)
class Schedule:
    """When fragments are averaged, and how much of their ranks' own they keep: the options of `DiLoCo` about that.

    Raises
    ------
    InvalidArgument
        If a number of steps or fragments is out of its range, two do not go together, or the share is none.
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
            raise InvalidArgument(f"fragments={self.fragments}: at most every={self.every} can be sent in turn")
        if self.delay >= self.every:
            raise InvalidArgument(f"delay={self.delay}: it must be below every={self.every}, the next average")
        if not 0 <= self.alpha < 1:
            raise InvalidArgument(f"alpha={self.alpha!r}: a number from 0 to below 1 is needed")

    @property
    def phases(self) -> list[int]:
        """After which step of each round each fragment is sent."""
        return [self.every * (number + 1) // self.fragments % self.every for number in range(self.fragments)]


class UnderWay(NamedTuple):
    """An average of outer gradients that runs, or has ended and is still to be mixed in.

    Attributes
    ----------
    due : int
        The step after which it is mixed in.
    gradient : Tensor
        The outer gradient; the ranks' mean when the work has ended.
    work : Handle or None
        The average; its value is the bytes sent. None if it had ended when it was saved.
    residual : array or None
        What compression had lost before.
    """

    due: int
    gradient: Tensor
    work: Handle[int] | None
    residual: HostArray | None


class Fragment:
    """Some layers of a model, synchronised together.

    Parameters
    ----------
    parameters : mapping
        By name.
    phase : int
        After which step of each round it is sent.
    make : callable
        Makes the exchange of a vector.

    Attributes
    ----------
    parameters : dict
        This rank's, which the inner optimizer moves.
    outer : Tensor
        The parameters that all ranks have in common, as one vector in host memory.
    version : int
        How many outer steps it has made.
    sent : int
        The step at which its outer gradient was taken last; -1 if that is to be done again.
    under_way : UnderWay or None
        Its average that is not mixed in yet.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], phase: int, make: Callable[[Tensor], Exchange]) -> None:
        self.parameters, self.phase = dict(parameters), phase
        self.flat = Flat(self.parameters)
        self.outer = self.flat.pack(self.parameters.values())
        self.exchange = make(self.outer)
        self.version, self.sent = 0, -1
        self.under_way: UnderWay | None = None

    def gradient(self, step: int) -> Tensor:
        """Take the outer gradient of a step: the common parameters minus this rank's."""
        self.sent = step
        gradient = torch.empty_like(self.outer)
        views = zip(self.flat.views(self.outer), self.flat.views(gradient), strict=True)
        for parameter, (common, difference) in zip(self.parameters.values(), views, strict=True):
            own = parameter.detach()
            # In the parameter's precision: what `mix` rounded away is no step of this rank's.
            torch.sub(common.to(own.dtype).to(common.dtype), own.to(common), out=difference)
        return gradient

    def mix(self, alpha: float) -> None:
        """Set this rank's parameters to α of them and 1 - α of the common ones."""
        for parameter, common in zip(self.parameters.values(), self.flat.views(self.outer), strict=True):
            target = parameter.detach()
            if not alpha:
                target.copy_(common)
                continue
            own = target.to(common.dtype)  # itself, if it is of that type
            target.copy_(torch.lerp(common.to(target.device), own, alpha, out=own))

    def average_gradients(self, communicator: Communicator, stats: TrainingStats, used: Container[str]) -> int:
        """Have the gradients of the parameters that some rank uses be the ranks' mean, exactly; returns the bytes sent.
        Collective.
        """
        mean = self.flat.pack(p.grad for p in self.parameters.values())
        nbytes = exact_mean(mean, communicator, stats)
        for (name, parameter), values in zip(self.parameters.items(), self.flat.views(mean), strict=True):
            if name in used:
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = torch.empty_like(parameter)  # in its memory format, as fused steps want it
                parameter.grad.copy_(values)
        return nbytes

    def agree(self, communicator: Communicator) -> None:
        """Go on from the first rank's parameters. Collective."""
        values = self.outer.numpy()
        communicator.bcast(values, 0, out=values, codec=None)
        self.mix(0.0)

    def state(self) -> dict[str, dict[str, Any]]:
        """Give what is saved, by kind and by name: residuals, and a mean that is still to be mixed in, if there are."""
        by_name, residual, under_way = self.flat.by_name, self.exchange.residual, self.under_way
        return {
            "parameters": by_name(self.flat.pack(self.parameters.values())),
            "outer": by_name(self.outer),
            "residuals": {} if residual is None else by_name(torch.from_numpy(residual)),
            "under_way": {} if under_way is None else by_name(under_way.gradient),
            "due": {} if under_way is None else dict.fromkeys(self.flat.names, under_way.due),
        }

    def due(self, due: Mapping[str, int]) -> int | None:
        """Find when a mean that is still to be mixed in is due, of all that a state has; None if there is none.

        Raises
        ------
        InvalidArgument
            If they are means of other fragments.
        """
        found = {due.get(name) for name in self.flat.names}
        if len(found) > 1:
            raise InvalidArgument("this state has averages under way of other fragments than those here")
        return found.pop()

    def load(self, state: Mapping[str, Any], residuals: Mapping[str, Tensor], size: int) -> None:
        """Go on from a state, with this rank's part of the residuals; on another number of ranks than ``size`` from the
        common parameters.
        """
        due = self.due(state["due"])
        self.flat.load(state["outer"], self.outer)
        if self.exchange.residual is not None:
            self.flat.load(residuals, torch.from_numpy(self.exchange.residual))
            if not self.exchange.of_mean:
                self.exchange.residual *= size / state["size"]
        self.mix(0.0)
        if state["size"] == size:
            for name, parameter in self.parameters.items():
                parameter.detach().copy_(state["parameters"][name].reshape(parameter.shape))
        if due is not None:
            self.under_way = UnderWay(due, self.flat.load(state["under_way"], torch.empty_like(self.outer)), None, None)

    def abandon(self) -> None:
        """Forget the average under way: what it has not brought is in the next outer gradient."""
        self.sent = -1
        if self.under_way is None:
            return
        work, residual = self.under_way.work, self.under_way.residual
        self.under_way = None
        if work is not None:
            with suppress(Exception):  # whose reason the caller knows, or will know at the next call
                work.wait()
            if residual is not None and self.exchange.residual is not None:
                self.exchange.residual[...] = residual


class DiLoCo:
    """Have each rank train on its own, and average what many steps have come to: DiLoCo. Collective.

    Every ``every`` steps of the inner optimizer a rank's outer gradient, the common parameters minus its own, is
    averaged over the ranks, compressed and with feedback. The outer optimizer moves the common parameters by the mean,
    and all ranks go on from there. Gradients are each rank's own: with DistributedDataParallel, too, of which this
    becomes the communication hook. Calls of ``inner.step()`` are counted by a hook; nothing else is to be called.

    *Streaming*: with ``fragments`` above 1 every so many-th layer forms a fragment, and fragments are sent in turn,
    each every ``every`` steps, so that less is sent at once. With ``delay`` a fragment travels while the next
    ``delay`` steps run, and is mixed in after them: ``θ ← alpha θ + (1 - alpha) θ_outer``.

    Parameters
    ----------
    model : torch.nn.Module
        DistributedDataParallel or any other. Its parameters and buffers become rank 0's, or those of the ranks that
        have trained already, if it joins them.
    inner : torch.optim.Optimizer
        Any, of all trainable parameters of the model.
    outer : callable, optional
        Makes the outer optimizer of a list of vectors, one a fragment: by default SGD at a learning rate of 0.7 with
        Nesterov's momentum of 0.9. One that works element by element.
    every : int
        The paper's H: inner steps from one average to the next.
    warmup : int
        Steps at first in which gradients are averaged, exactly, and the ranks stay together: the paper starts from a
        model that has 27 % of all steps behind it.
    fragments : int
        1 to ``every``, and at most as many as the model has layers.
    delay : int
        Steps that an average may take, fewer than ``every``.
    alpha : float, optional
        From 0 to below 1; by default 0, and 0.5 with a delay, as in the paper.
    codec : str or Codec, optional
        Of outer gradients, as for `compcoll.allreduce`; None sends them as they are.
    feedback : bool
        Whether what compression loses is added to the next outer gradient.
    algorithm, group, timeout, over, **codec_options
        As of `OneBitAdam`.

    Attributes
    ----------
    outer : torch.optim.Optimizer
        The outer optimizer: its learning rate may be changed, alike on all ranks.
    steps : int
        Inner steps so far.
    stats : TrainingStats
        What was sent so far, with the mean and the most of a step. Replace it by a new one to count from zero.
    communicator : Communicator
        Averages among the ranks; for nothing else but its `shrink`.

    Raises
    ------
    InvalidArgument
        If an option is not allowed, the inner optimizer has other parameters than the model, or what the codec loses
        would grow without end.
    HookTaken, CollectiveMismatch, NotUnderMPI, MPIMissing, ThreadsUnavailable
        As of `OneBitAdam`.

    Notes
    -----
    The outer parameters, and what is sent, are in host memory.

    All means that were given to the outer optimizer plus the residuals of all ranks equal the sum of the exact means of
    the outer gradients, up to rounding; with ``feedback=False`` no residuals are kept.

    With a GradScaler a local step that overflows leaves this rank's parameters as they are, and counts, so that all
    ranks stay in the same step without a message. In the warm-up all ranks skip it together.

    When ranks die, ``inner.step()`` raises what the average did. Set `group` to one of those that are left, and go on.

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
    """Whether values that were sent and residuals add up to those that were to be sent: "exact", "decay" or "none"."""

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
        make, told = self._exchanges(chosen, feedback)
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
        self._told = f"{options}, {told}"
        self._lines = [
            f"{type(self).__name__}: {self._told}, over {transport}, {self.outer!r}".replace("\n", " "),
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
        self._inner_scales = vars(inner).get(SUPPORTED)
        setattr(inner, SUPPORTED, True)
        keep_gradients(model, f"compcoll {type(self).__name__}")

    def _exchanges(self, codec: Codec | None, feedback: bool) -> tuple[Callable[[Tensor], Exchange], str]:
        """Return what makes the exchange of a vector, and the settings in words."""
        told = f"codec {codec!r}, feedback {feedback}, algorithm {self._algorithm}"
        return partial(Exchange, codec, self._algorithm, feedback), told

    @property
    def group(self) -> Ranks | None:
        """The ranks. Between two steps others may be set, by all of them: some of those before, of which others died,
        ``diloco.group = diloco.communicator.shrink()`` where the library has that; or those and new ones, which make
        a `DiLoCo` meanwhile. All then have the outer parameters, the outer optimizer's state and the number of steps
        of a rank that made the most outer steps. A rank that has made as many keeps its own parameters, others start
        from the outer ones. Averages under way are given up: what they would have brought is in the next one.
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
        """Average all fragments now, and have all ranks go on from the outer parameters, as at the end of a training.
        Collective.

        Raises
        ------
        CollectiveMismatch
            If not all ranks call this after the same step.
        """
        self._check_resumed()
        self._finish(self._fragments)
        check_together(self.communicator, f"{type(self).__name__}.synchronize after step {self.steps}")
        for fragment in (f for f in self._fragments if f.sent != self.steps):  # nothing new: momentum alone would move
            self._begin(fragment, self.steps)
        self._finish(self._fragments)
        with torch.no_grad():
            for fragment in self._fragments:
                fragment.mix(0.0)

    def state_dict(self) -> dict[str, Any]:
        """Copy what is to be saved: this rank's parameters, the outer ones, both optimizers' states, residuals, and
        averages under way, for which it waits. By every rank its own, or by `GatheredState` as one.
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
        """Go on where an earlier run ended: the model's parameters and the inner optimizer's state, too.

        Parameters
        ----------
        states : dict, or sequence of dict
            What this rank's `state_dict` gave; or all ranks' ones of then. On another number of ranks each starts from
            the outer parameters, with the inner optimizer's state of a rank of then. After a state that lacks what
            codecs drew that round at random, as early ones do, they draw on from where they are. Values of parameters
            that are trained no more are dropped, with a warning.

        Raises
        ------
        InvalidArgument
            If they belong to another number of ranks, rank, or model, or to other settings, such as another
            ``every``. Nothing is changed then. That all ranks go on from the same step is found out in the next step,
            which raises `CollectiveMismatch`.
        """
        rank, size = self.communicator.rank, self.communicator.size
        shapes = {name: shape for fragment in self._fragments for name, shape in fragment.flat.shapes.items()}
        every, residuals = read_states(
            *(states, rank, size, ("parameters", "outer"), ("residuals", "under_way"), _STATE, shapes, self._module)
        )
        mine = every[rank % len(every)]
        if (settings := {"warmup": 0, **mine["settings"]}) != (here := asdict(self._schedule)):
            raise InvalidArgument(f"this state is of {settings}, but here are {here}")
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
        """Take the hook off the inner optimizer, and give back what it has. Collective; DDP keeps its hook."""
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
        return f"{type(self).__name__}({self._told})"

    def _let_go(self) -> None:
        """Leave the inner optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        vars(self._inner).pop(SUPPORTED, None)
        if self._inner_scales is not None:
            setattr(self._inner, SUPPORTED, self._inner_scales)

    def _check_resumed(self) -> None:
        """Make sure that all ranks go on from the same state, if this one does. Collective."""
        if self._resumed:
            check_together(self.communicator, f"{type(self).__name__} goes on from a state of step {self.steps}")
            self._resumed = False

    @torch.compiler.disable
    @torch.no_grad()
    def _before(self, _: object, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Unscale gradients, average those of the first steps, and hide those that overflow: a step without gradients
        changes nothing, and is counted.
        """
        self._hidden = []
        with scaling_of(self._inner) as scaling:
            check_trained(self._inner, self._trained)
            self._check_resumed()
            overflowed, scale = scaling or (False, 1.0)
            parameters = {name: p for fragment in self._fragments for name, p in fragment.parameters.items()}
            warming = self.steps < self._schedule.warmup
            if warming:
                if any(each is not None for each in (*args[1:], *given.values())):  # the first is the optimizer
                    raise InvalidArgument("warmup averages gradients: compute them before step(), not in a closure")
                flags = [overflowed, *(p.grad is not None for p in parameters.values())]
                overflowed, *used = any_rank(self.communicator, flags)
            if scaling is not None:
                unscale(parameters.values(), scale)
                self._inner.found_inf = self._inner.grad_scale = None  # all is done: the inner one has no part in it
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
        """Count a step of the inner optimizer, mix in what is due, and send what is its turn."""
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
                if self.steps == self._schedule.warmup:  # a rank that came during these steps may have made others
                    fragment.agree(self.communicator)
            return
        self._finish([f for f in self._fragments if f.under_way is not None and f.under_way.due <= self.steps])
        for fragment in self._fragments:
            if self._turn_of(fragment):
                self._begin(fragment, self.steps + self._schedule.delay)
                if not self._schedule.delay:
                    self._finish([fragment])

    def _turn_of(self, fragment: Fragment) -> bool:
        """Tell whether it is sent after this step."""
        return self.steps % self._schedule.every == fragment.phase

    def _begin(self, fragment: Fragment, due: int) -> None:
        """Send a fragment's outer gradient."""
        gradient = fragment.gradient(self.steps)
        job = partial(fragment.exchange.mean, gradient, self.communicator, self.stats)
        residual = None if fragment.exchange.residual is None else fragment.exchange.residual.copy()
        fragment.under_way = UnderWay(due, gradient, self._jobs.submit(job), residual)

    def _finish(self, fragments: Sequence[Fragment]) -> None:
        """Make the outer steps of fragments whose averages are due, in the order of these."""
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
        """Wait for an average; if it fails, take back what it and those behind it have changed."""
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
        """Average with these ranks from now on, from where those are that have come farthest. Collective."""
        communicator = join(ranks, self._lines, self._timeout, self._over, self._algorithm)
        self._ranks: Ranks | None = ranks
        self.communicator = communicator
        self._jobs = JobQueue("diloco")
        for fragment in self._fragments:
            fragment.exchange.try_out(communicator)
        rounds = communicator.allgather(np.array([self._rounds]), codec=None).ravel()
        root = int(rounds.argmax())
        common = broadcast_object(root, communicator, self._common() if communicator.rank == root else {})
        behind = self._rounds < rounds[root] or self._rounds < 0
        if communicator.rank != root:
            self.steps = common["steps"]
            self.outer.load_state_dict(common["outer_optimizer"])
            for fragment, outer, version in zip(self._fragments, common["outer"], common["versions"], strict=True):
                fragment.outer.copy_(outer)
                fragment.version = version
                if behind:
                    fragment.mix(0.0)
            others = untrained(self._module, self._trained) if behind else ()
            for each, value in zip(others, common["others"], strict=behind):
                each.detach().copy_(value)
        self._rounds = max(int(rounds[root]), 0)

    def _common(self) -> dict[str, Any]:
        """Collect what all ranks have in common."""
        return {
            "steps": self.steps,
            "outer": [fragment.outer for fragment in self._fragments],
            "versions": [fragment.version for fragment in self._fragments],
            "outer_optimizer": self.outer.state_dict(),
            "others": [each.detach().cpu() for each in untrained(self._module, self._trained)],
        }


def strided(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Deal a model's layers out, every ``count``-th to the same fragment.

    A layer is what has the same name up to its first number, or before its first dot if it has none.

    Raises
    ------
    InvalidArgument
        If there are fewer layers than fragments.
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
    """Refuse an inner optimizer of other parameters than the model's.

    Raises
    ------
    InvalidArgument
        If it lacks one, or has others.
    """
    held = {id(p) for group in inner.param_groups for p in group["params"] if p.requires_grad}
    lacking = [name for name, p in parameters.items() if id(p) not in held]
    foreign = len(held - {id(p) for p in parameters.values()})
    if lacking or foreign:
        what = f"lacks {lacking[0]!r}" if lacking else f"has {foreign} that are not the model's"
        raise InvalidArgument(f"the inner optimizer must have all trainable parameters of the model, but it {what}")


def outer_state(outer: torch.optim.Optimizer, fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Copy the state: of each kind a tensor for each parameter, and what is no vector, such as a number of steps."""
    vectors: dict[str, dict[str, Tensor]] = {}
    rest: list[dict[str, Any]] = []
    for fragment in fragments:
        state = outer.state.get(fragment.outer, {})
        of_elements = {kind for kind, value in state.items() if _is_vector(value, fragment)}
        rest.append({kind: deepcopy(value) for kind, value in state.items() if kind not in of_elements})
        for kind in of_elements:
            parts = fragment.flat.by_name(state[kind].clone())
            vectors.setdefault(kind, {}).update((name, torch.from_numpy(part)) for name, part in parts.items())
    return {"vectors": vectors, "rest": rest, "groups": groups_of(outer)}


def load_outer_state(outer: torch.optim.Optimizer, fragments: Sequence[Fragment], state: Mapping[str, Any]) -> None:
    """Go on from what `outer_state` gave; elements that it does not have are 0."""
    kept = {}
    for fragment, rest in zip(fragments, state["rest"], strict=True):
        kept[id(fragment.outer)] = one = deepcopy(rest)
        for kind, arrays in state["vectors"].items():
            if held := [arrays[name] for name in fragment.flat.names if name in arrays]:
                one[kind] = torch.zeros_like(fragment.outer, dtype=held[0].dtype)
                fragment.flat.load(arrays, one[kind])
    places = {at: kept[id(p)] for at, p in enumerate(parameters_of(outer)) if kept[id(p)]}
    load(outer, places, state["groups"])


def _is_vector(value: Any, fragment: Fragment) -> bool:
    return isinstance(value, Tensor) and value.shape == fragment.outer.shape
