"""Local steps: ranks train on their own, and every so often average how far they have come. DiLoCo, also streaming."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...codecs.base import Codec
from ...communicator import Communicator
from ...errors import InvalidArgument
from ...registry import as_codec
from ..account import Account, RecentSteps
from ..job_queue import JobQueue
from ..states import residuals_of, state_of
from .adam import algorithm_for
from .exchange import CodedExchange, Exchange
from .flat import Flat
from .fragments import Fragment, Schedule, UnderWay, check_inner, strided
from .named import check_groups, check_trained, fitted, load_by_name, state_by_name, untrained
from .outer_state import load_outer_state, outer_state
from .ranks import Ranks, any_rank, check_hook_free, check_together, join, keep_gradients, module_of, told_by
from .scaling import SUPPORTED, scaling_of, unscale

Outer = Callable[[list[Tensor]], torch.optim.Optimizer]
NESTEROV: Outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, fused=True)
"""The paper's outer optimizer."""

_STATE = (
    *("settings", "steps", "rounds", "begun", "versions", "due"),
    *("parameters", "outer", "under_way", "outer_state", "inner_state"),
)


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
    account : Account
        What was sent so far, with the mean and the most of a step. Replace it by a new one to count from zero.

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
        over: str = "auto",
        **codec_options: Any,
    ) -> None:
        chosen = as_codec(codec, codec_options)
        self._algorithm = algorithm_for(chosen, algorithm)

        def make(flat: Flat, vector: Tensor) -> Exchange:
            return CodedExchange(chosen, self._algorithm, feedback, vector)

        told = f"codec {chosen!r}, feedback {feedback}, algorithm {self._algorithm}"
        schedule = Schedule.of(every, warmup, fragments, delay, alpha)
        self._set_up(model, inner, outer, schedule, make, told, group, timeout, over)

    def _set_up(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        outer: Outer,
        schedule: Schedule,
        make: Callable[[Flat, Tensor], Exchange],
        told: str,
        group: Ranks | None,
        timeout: float | None,
        over: str,
    ) -> None:
        self._module = module_of(model)
        parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        check_inner(inner, parameters)
        check_hook_free(model)
        self._inner, self._schedule = inner, schedule
        self._names = {id(p): name for name, p in self._module.named_parameters()}
        self._trained = {id(p): name for name, p in parameters.items()}
        dealt = strided(parameters, schedule.fragments)
        self._fragments = [Fragment(each, phase, make) for each, phase in zip(dealt, schedule.phases, strict=True)]
        self.outer = outer([fragment.outer for fragment in self._fragments])
        options = ", ".join(f"{name} {value}" for name, value in asdict(schedule).items())
        self._told = f"{options}, {told}"
        self._lines = [
            f"{type(self).__name__}: {self._told}, over {over}, {self.outer!r}".replace("\n", " "),
            *(f"{name}: {list(p.shape)} of {p.dtype}" for name, p in parameters.items()),
        ]
        self._timeout, self._over = timeout, over
        self.steps, self._rounds = 0, -1
        self.account = Account()
        self._recent = RecentSteps(max(schedule.delay, 1))
        self._communicator: Communicator | None = None
        self._join(group)
        self._resumed = False
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._handles = inner.register_step_pre_hook(self._before), inner.register_step_post_hook(self._stepped)
        self._inner_scales = vars(inner).get(SUPPORTED)
        setattr(inner, SUPPORTED, True)
        keep_gradients(model, f"compcoll {type(self).__name__}")

    @property
    def communicator(self) -> Communicator:
        """The communicator by which the ranks average, for nothing else but its `shrink`."""
        assert self._communicator is not None
        return self._communicator

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
        """Copy what is to be saved: this rank's parameters, the outer ones, both optimizers' states, losses, and
        averages under way, for which it waits. By every rank its own, or by `WholeState` as one.
        """
        residuals: dict[str, Any] = {}
        parameters: dict[str, Any] = {}
        outer: dict[str, Any] = {}
        under_way: dict[str, Any] = {}
        due: dict[str, int] = {}
        for fragment in self._fragments:
            self._settle(fragment)
            parameters |= fragment.own()
            outer |= fragment.flat.by_name(fragment.outer)
            residuals |= fragment.lost()
            under_way |= fragment.waiting()
            due |= dict.fromkeys(fragment.waiting(), 0 if fragment.under_way is None else fragment.under_way.due)
        by_name = {"parameters": parameters, "outer": outer, "under_way": under_way}
        return state_of(self.communicator.rank, self.communicator.size, residuals, **by_name) | {
            "settings": asdict(self._schedule),
            "steps": self.steps,
            "rounds": self._rounds,
            "begun": self.communicator.begun,
            "outer_state": outer_state(self.outer, self._fragments),
            "inner_state": state_by_name(self._inner, self._names),
            "versions": [fragment.version for fragment in self._fragments],
            "due": due,
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
        states = fitted(states, ("parameters", "outer"), ("residuals", "under_way"), shapes, self._module)
        residuals = residuals_of(states, rank, size, shapes, _STATE, optional=("begun",))
        every = [states] if isinstance(states, Mapping) else sorted(states, key=lambda state: int(state["rank"]))
        mine = every[rank % len(every)]
        if (settings := {"warmup": 0, **mine["settings"]}) != (here := asdict(self._schedule)):
            raise InvalidArgument(f"this state is of {settings}, but here are {here}")
        check_groups(mine["inner_state"]["groups"], len(self._inner.param_groups))
        check_groups(mine["outer_state"]["groups"], len(self.outer.param_groups))
        dues = [fragment.due(mine["due"]) for fragment in self._fragments]
        for fragment in self._fragments:
            fragment.abandon()
        load_by_name(self._inner, self._names, mine["inner_state"])
        load_outer_state(self.outer, self._fragments, mine["outer_state"])
        self.steps, self._rounds = mine["steps"], mine["rounds"]
        self.communicator.begun = mine.get("begun", self.communicator.begun)
        for fragment, version, due in zip(self._fragments, mine["versions"], dues, strict=True):
            fragment.load(mine["outer"], mine["parameters"] if mine["size"] == size else {}, residuals)
            if not fragment.exchange.of_mean and fragment.exchange.losses is not None:
                fragment.exchange.losses *= size / mine["size"]
            fragment.resume(version, self.steps if self._turn_of(fragment) else -1, due, mine["under_way"])
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
                    raise InvalidArgument(
                        "the first steps average gradients: compute them before step(), not in a closure"
                    )
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
                nbytes = sum(f.average_gradients(self.communicator, self.account, names) for f in self._fragments)
                self.account.peak_step_nbytes = max(self.account.peak_step_nbytes, nbytes)

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
        self.account.steps += 1
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
        job = partial(fragment.exchange.mean, gradient, self.communicator, self.account)
        losses = fragment.keep_losses()
        fragment.under_way = UnderWay(due, gradient, self._jobs.submit(job), losses)

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
        self.account.peak_step_nbytes = max(self.account.peak_step_nbytes, self._recent.spread(nbytes))

    def _join(self, ranks: Ranks | None) -> None:
        """Average with these ranks from now on, from where those are that have come farthest. Collective."""
        communicator = join(ranks, self._lines, self._timeout, self._over, self._algorithm)
        self._ranks: Ranks | None = ranks
        self._communicator = communicator
        self._jobs = JobQueue("diloco")
        for fragment in self._fragments:
            fragment.exchange.try_out(communicator)
        rounds = communicator.allgather(np.array([self._rounds]), codec=None).ravel()
        root = int(rounds.argmax())
        common = told_by(root, communicator, self._common() if communicator.rank == root else {})
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
