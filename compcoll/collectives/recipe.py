"""The link between a plan and its algorithm: how the calls of one plan run, and what such a call works with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ..codecs.base import Array, Codec
from ..devices.streams import Ending, Timeline
from ..errors import InvalidArgument
from ..feedback import ErrorFeedback
from ..kernels._host import Along, Body, Program
from ..progress import Steps, Turn
from ..registry import as_codec
from ..stats import Stats
from ..transports.base import Group, Persistent
from . import choose
from .handshake import SentAhead
from .lanes import Lane
from .plan import Plan

Asked = tuple[Any, str | None, dict[str, Any]]
"""A call's codec (``...``: the communicator's), algorithm (None: the communicator's), and the codec's options."""


@dataclass(slots=True)
class Order:
    """The order of a call on a device whose work is done later.

    Attributes
    ----------
    caller, before : Stream, Event
        The caller's stream, and what comes before the call.
    x : array
        The caller's.
    stream : object
        What the caller named as stream; None for the current one.
    new : bool
        Whether the result shall be a new array such as ``x``.
    fetched : array or None
        On the host, the residual of a call whose values travel with the opening.
    ending : Ending or None
        The collective's, once all is launched.
    """

    caller: Any
    before: Any
    x: Any
    stream: Any
    new: bool
    fetched: Array | None = None
    ending: Ending | None = None


class Buffers(NamedTuple):
    """The arrays of one call.

    Attributes
    ----------
    x, out : array
        The input and the result, flat; of an allgatherv, which makes its result, ``out`` is None.
    result : array
        What the caller gets; of an allgatherv, which returns it, what it is like.
    residual : array or None
        What feedback adds.
    feedback : ErrorFeedback or None
        For a sparsifier, the feedback itself.
    order : Order or None
        On a device whose work is done later.
    """

    x: Array
    out: Array
    result: Array
    residual: Array | None = None
    feedback: ErrorFeedback | None = None
    order: Order | None = None

    @property
    def apart(self) -> bool:
        """Tell whether ``out`` is to be copied to the result, which is not aligned, in the end."""
        return self.order is None and self.out is not None and not self.result.flags.aligned

    def flat(self) -> Buffers:
        """Flatten the arrays of a call that was found to be like another, and whose arrays nobody has looked at."""
        x = self.x.reshape(-1)
        return Buffers(x, x if self.out is self.x else self.out.reshape(-1), *self[2:])


@dataclass(slots=True)
class Run:
    """The means that a collective under way gets from its communicator.

    Attributes
    ----------
    group : Group
        The ranks.
    take : callable
        Gives memory for wires, in bytes.
    stats : Stats
        The account to fill.
    turn : Turn
        For what all ranks must start in the same order.
    lane : Lane
        The one that it runs in.
    number : int
        How many collectives the communicator began before.
    timeline : Timeline or None
        Of a device whose work is done later.
    pinned : callable or None
        Gives host memory that such a device copies from and to, in bytes.
    """

    group: Group
    take: Callable[[int], Array]
    stats: Stats
    turn: Turn
    lane: Lane
    number: int = 0
    timeline: Timeline | None = None
    pinned: Callable[[int], Array] | None = None


@dataclass(slots=True, eq=False)
class Recipe:
    """The recipe by which the calls of one plan run.

    Attributes
    ----------
    plan : Plan
        What was chosen.
    steps : callable
        Makes the steps from the end of the opening to the result.
    along : Along or None
        What travels with the opening, if this is small.
    fetch : callable or None
        Makes the steps that fetch a call's values and residual to the host for that, where its arrays are elsewhere.
    body, with_feedback : Body or None
        Do what ``steps`` do, without and with feedback, in one go while no rank has other collectives to advance; they
        may block in MPI.
    algorithm : callable or None
        Makes the steps of an algorithm that can be recorded, by a plan; None if it cannot.
    calls : int
        How often ``steps`` were asked for, of an algorithm that can be recorded: the first time it runs itself, later
        it is recorded in the call's lane. Runs of what is recorded already, and of a body, are not counted.
    recordings : dict
        Its recordings, by lane and whether there is feedback.
    unblocked : Recipe or None
        How they run where some rank must not block in MPI; None if by this one's steps.
    other : Recipe or None
        How they run where others want some rank's core and this was found to take less time; None if by this one.
    timeout : float or None
        Seconds that a wait of these calls may last, if they say so.
    all_on_gpus : callable or None
        Makes the steps where all ranks' arrays are on GPUs, which end the turn; None if these are no others.
    """

    plan: Plan
    steps: Callable[[Buffers, Run], Steps]
    along: Along | None = None
    fetch: Callable[[Buffers], Steps] | None = None
    body: Body | None = None
    with_feedback: Body | None = None
    algorithm: Callable[[Plan, Buffers, Run], Steps] | None = None
    calls: int = 0
    recordings: dict[tuple[int, bool], Recording] = field(default_factory=dict)
    unblocked: Recipe | None = None
    other: Recipe | None = None
    timeout: float | None = None
    all_on_gpus: Callable[[Buffers, Run], Steps] | None = None

    @classmethod
    def of_body(cls, plan: Plan, body: Body, **more: Any) -> Recipe:
        """The recipe of what one body does for all calls."""
        return cls(plan, lambda buffers, run: driven(body, buffers, run), body=body, with_feedback=body, **more)


@dataclass(slots=True, eq=False)
class Recording:
    """A program, and what belongs to it (the contract is `compcoll.collectives.handshake.Ahead`).

    Attributes
    ----------
    recipe : Recipe
        Whose calls it runs.
    program : Program
        Runs on arrays.
    messages : list of Persistent
        Its messages.
    ahead : list of SentAhead
        Those of its messages that can be sent ahead.
    """

    recipe: Recipe
    program: Program = field(default_factory=Program)
    messages: list[Persistent] = field(default_factory=list)
    ahead: list[SentAhead] = field(default_factory=list)

    @property
    def sent(self) -> Sequence[SentAhead]:
        """The messages that were sent ahead of an opening, and are still to be used."""
        return self.ahead if self.program.ahead else ()

    def withdraw(self) -> None:
        """Forget the messages: they are not used."""
        self.program.withdraw()


def driven(body: Body, buffers: Buffers, run: Run) -> Steps:
    """Begin to run a body; return the steps to its end, without blocking."""
    then = partial(tell_account, run.stats)
    body.begin(buffers.x, buffers.out, buffers.residual, run.number, 1, 0, then)
    return body  # type: ignore[return-value]  # a generator would be entered each time that those around it are


def tell_account(stats: Stats, body: Body) -> None:
    """Tell what a body's last run did."""
    stats.wire_nbytes, stats.raw_sent_nbytes, stats.fresh_nbytes, *seconds = body.account
    stats.encode_seconds, stats.decode_seconds, stats.wait_seconds = seconds


def named_codec(codec: str | Codec | None, options: dict[str, Any]) -> tuple[Codec | None, float | None]:
    """Make the codec that a call's arguments name, or read the tolerance by which it is to be chosen."""
    if not (isinstance(codec, str) and codec == choose.AUTO):
        return as_codec(codec, options), None
    tolerance = options.get("tolerance")
    if set(options) != {"tolerance"}:
        others = ", ".join(sorted(options.keys() - {"tolerance"}))
        raise InvalidArgument(
            'codec="auto" needs tolerance=, the relative error that the result may have, such as tolerance=1e-2'
            + f", and takes no other option: not {others}" * bool(others)
        )
    if not isinstance(tolerance, numbers.Real) or not 0 <= float(tolerance) < math.inf:
        raise InvalidArgument(f'codec="auto": tolerance={tolerance!r} must be a finite number, 0 or more')
    return None, float(tolerance)


def feedback_refused(plan: Plan) -> str:
    """Say why a plan's codec takes no feedback; empty if it does. One that only these ranks need not run counts."""
    codec = plan.call.codec if plan.algorithm in (choose.COPY, choose.HIERARCHICAL) else plan.codec
    if plan.summands is not None and not plan.summands.feedback:
        return f"feedback with {plan.codec!r}: a vote loses nothing that could be fed back"
    if codec is None or codec.feedback_converges(plan.call.dtype):
        return ""
    return (
        f"feedback with {codec!r} would grow without end, since rounding to steps that large loses more "
        "than there is: use more bits, smaller blocks, norm='max', rounding to nearest, or no feedback"
    )
