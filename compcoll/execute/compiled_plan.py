"""A plan that is ready to run, and what one of its calls works with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..codecs.base import Array, Codec
from ..codecs.registry import as_codec
from ..errors import InvalidArgument
from ..feedback import ErrorFeedback
from ..gpu.streams import Ending, Timeline
from ..kernels._host import Operation, PiggybackReduction, Program
from ..pending import OrderingTicket, Steps
from ..plan import choose
from ..plan.plan import Plan
from ..stats import Stats
from ..transports.base import Group, Persistent

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
    ending : Ending or None
        The collective's, once all is launched.
    """

    caller: Any
    before: Any
    x: Any
    stream: Any
    new: bool
    ending: Ending | None = None


class Buffers(NamedTuple):
    """The arrays of one call.

    Attributes
    ----------
    x, out : array
        The input and the result; of an allgatherv, which makes its result, ``out`` is None.
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
        """The same with one-dimensional arrays, as generators take them."""
        if self.x.ndim == 1 and (self.out is None or self.out.ndim == 1):
            return self
        x = self.x.reshape(-1)
        return self._replace(x=x, out=x if self.out is self.x else self.out.reshape(-1))


@dataclass(slots=True)
class Run:
    """What the generator of a collective gets from its communicator.

    Attributes
    ----------
    group : Group
        The ranks.
    allocate : callable
        Returns memory for wires, in bytes.
    stats : Stats
        The account to fill.
    ticket : OrderingTicket
        For what all ranks must start in the same order.
    number : int
        The collective's number in the order of calls.
    timeline : Timeline or None
        Of a device whose work is done later.
    pinned : callable or None
        Returns host memory that such a device copies from and to, in bytes.
    """

    group: Group
    allocate: Callable[[int], Array]
    stats: Stats
    ticket: OrderingTicket
    number: int = 0
    timeline: Timeline | None = None
    pinned: Callable[[int], Array] | None = None


class Compiled(NamedTuple):
    """A program for one slot, and its messages.

    Attributes
    ----------
    program : Program
        Runs on arrays.
    messages : list of Persistent
        Its messages.
    """

    program: Program
    messages: list[Persistent]


@dataclass(slots=True, eq=False)
class CompiledPlan:
    """A plan that is ready to run.

    Attributes
    ----------
    plan : Plan
        What was chosen.
    steps : callable
        Returns the generator that runs a call: of an algorithm, or of what else has no operation.
    operation : Operation or None
        Runs every call of the plan, if one operation does.
    compiles : bool
        Whether an algorithm's program runs the calls, compiled for each slot when it is first needed.
    unblocked : CompiledPlan or None
        What runs instead where some rank must not block in MPI; None if the same does.
    timeout : float or None
        Seconds that a wait of these calls may last, if they say so.
    on_gpus : callable or None
        Returns the generator that runs a call whose arrays are on GPUs on all ranks; None if ``steps`` does.
    """

    plan: Plan
    steps: Callable[[Plan, Buffers, Run], Steps]
    operation: Operation | None = None
    compiles: bool = False
    unblocked: CompiledPlan | None = None
    timeout: float | None = None
    on_gpus: Callable[[Buffers, Run], Steps] | None = None

    @classmethod
    def of_operation(cls, plan: Plan, operation: Operation) -> CompiledPlan:
        """The plan of calls that one operation runs."""
        return cls(plan, lambda _, buffers, run: driven(operation, buffers, run), operation)

    @property
    def piggyback(self) -> PiggybackReduction | None:
        """What travels with the handshake, if the arrays are small."""
        return self.operation if isinstance(self.operation, PiggybackReduction) else None


def driven(operation: Operation, buffers: Buffers, run: Run) -> Steps:
    """Run an operation on arrays."""
    operation.begin(buffers.x, buffers.out, buffers.residual, run.number)
    operation.Test()
    while not operation.done:
        yield operation
    store_account(run.stats, operation)


def store_account(stats: Stats, operation: Operation) -> None:
    """Store in the statistics what an operation's last run did."""
    stats.wire_nbytes, stats.raw_sent_nbytes, *seconds = operation.account
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
    """Say why a plan's codec takes no feedback; empty if it does. The codec of the call counts if this topology does
    not need it.
    """
    codec = plan.call.codec if plan.algorithm in (choose.COPY, choose.HIERARCHICAL) else plan.codec
    if plan.quantizer is not None and not plan.quantizer.feedback:
        return f"feedback with {plan.codec!r}: a vote loses nothing that could be fed back"
    if codec is None or codec.feedback_converges(plan.call.dtype):
        return ""
    return (
        f"feedback with {codec!r} would grow without end, since rounding to steps that large loses more "
        "than there is: use more bits, smaller blocks, norm='max', rounding to nearest, or no feedback"
    )
