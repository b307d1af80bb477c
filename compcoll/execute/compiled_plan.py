"""Plans that are ready to run, and the arguments and state of one call."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..codecs.base import Array, Codec
from ..codecs.registry import as_codec, name_in, with_written
from ..errors import InvalidArgument
from ..feedback import ErrorFeedback
from ..gpu.streams import Ending, Timeline
from ..kernels._host import Operation, PiggybackReduction
from ..pending import OrderingTicket, Steps
from ..plan import choose
from ..plan.plan import Plan
from ..stats import Stats
from ..transports.base import Group

Asked = tuple[Any, str | None, dict[str, Any]]
"""A call's codec (``...``: the communicator's), algorithm (None: the communicator's), and codec options."""


@dataclass(slots=True)
class Order:
    """The stream order of a call on an asynchronous device.

    Attributes
    ----------
    caller, before : Stream, Event
        The caller's stream, and the event on it that the call follows.
    x : array
        The caller's array.
    stream : object
        The call's ``stream=`` argument; None for the current stream.
    new : bool
        Whether the result is a new array of the same kind as ``x``.
    ending : Ending or None
        The end of the collective, once all its work is launched.
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
        The input and the result. ``out`` is None in an allgatherv or alltoallv, which allocates its result, and on
        ranks without a result.
    result : array or None
        The array that the caller gets. In an allgatherv or alltoallv, the input, since it has the result's type and row
        shape. None on ranks without a result.
    residual : array or None
        The residual that feedback adds to the input.
    feedback : ErrorFeedback or None
        The feedback itself, for a sparsifier.
    order : Order or None
        The stream order, on an asynchronous device.
    counts : tuple of int
        In an alltoallv, the rows for each rank.
    """

    x: Array
    out: Array
    result: Array
    residual: Array | None = None
    feedback: ErrorFeedback | None = None
    order: Order | None = None
    counts: tuple[int, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether ``out`` is a separate array, to copy to the result in the end, since the result is not aligned."""
        if self.out is self.result or self.out is None or self.order is not None:
            return False
        return not self.result.flags.aligned

    def flat(self) -> Buffers:
        """Return the buffers with one-dimensional arrays, as generators need them."""
        if self.x.ndim == 1 and (self.out is None or self.out.ndim == 1):
            return self
        x = self.x.reshape(-1)
        if self.out is None:
            return self._replace(x=x)
        return self._replace(x=x, out=x if self.out is self.x else self.out.reshape(-1))


@dataclass(slots=True)
class Run:
    """One run of a collective: the arguments that its generator gets from its communicator, and whether it has ended.

    Attributes
    ----------
    group : Group
        The ranks.
    allocate : callable
        Returns memory for wires of a given number of bytes.
    stats : Stats
        The statistics to fill.
    ticket : OrderingTicket
        Orders operations that all ranks must start in the same order.
    number : int
        Sequence number of the collective.
    timeline : Timeline or None
        Timeline of the call, on an asynchronous device.
    pinned : callable or None
        Returns pinned host memory of a given number of bytes, for copies from and to such a device.
    ended : bool
        Whether the collective has ended, successfully or with an error.
    """

    group: Group
    allocate: Callable[[int], Array]
    stats: Stats
    ticket: OrderingTicket
    number: int = 0
    timeline: Timeline | None = None
    pinned: Callable[[int], Array] | None = None
    ended: bool = False

    def Test(self) -> bool:
        """Return ``ended``. The next collective in the same slot waits for this run (see `Pending`)."""
        return self.ended


@dataclass(slots=True, eq=False)
class CompiledPlan:
    """A plan that is ready to run.

    Attributes
    ----------
    plan : Plan
        The chosen codec and algorithm.
    steps : callable
        Returns the generator that runs a call if no operation does.
    operation : Operation or None
        The C++ object that runs every call of the plan after its handshake; None if there is none.
    new_operation : callable or None
        Returns an operation for a slot, if calls in several slots may run at the same time; None: ``operation``.
    compiles : bool
        Whether a program runs the calls: an operation that is compiled for each slot on first use.
    unblocked : CompiledPlan or None
        The plan to use if some rank must not block in MPI; None: this plan.
    timeout : float or None
        The ``timeout=`` of these calls, in seconds.
    on_gpus : callable or None
        Returns the generator that runs a call if all ranks' arrays are on GPUs; None: ``steps``.
    logged, checked : bool
        Whether there was a call, and a call without feedback: see `compcoll.execute.observation`.
    """

    plan: Plan
    steps: Callable[[Plan, Buffers, Run], Steps]
    operation: Operation | None = None
    new_operation: Callable[[], Operation] | None = None
    compiles: bool = False
    unblocked: CompiledPlan | None = None
    timeout: float | None = None
    on_gpus: Callable[[Buffers, Run], Steps] | None = None
    logged: bool = False
    checked: bool = False

    @classmethod
    def of_operation(cls, plan: Plan, operation: Operation) -> CompiledPlan:
        """Return the compiled plan of calls that one operation runs."""
        return cls(plan, lambda _, buffers, run: driven(operation, buffers, run), operation)

    @classmethod
    def of_operations(cls, plan: Plan, new: Callable[[], Operation]) -> CompiledPlan:
        """Return the compiled plan of calls that an operation for each slot runs."""
        return cls(plan, lambda _, buffers, run: driven(new(), buffers, run), new_operation=new)

    @property
    def piggyback(self) -> PiggybackReduction | None:
        """The reduction whose small arrays travel with the handshake; None if there is none."""
        return self.operation if isinstance(self.operation, PiggybackReduction) else None


def driven(operation: Operation, buffers: Buffers, run: Run) -> Steps:
    """Run an operation on a call's arrays."""
    operation.begin(buffers.x, buffers.out, buffers.residual, run.number)
    operation.Test()
    while not operation.done:
        yield operation
    store_account(run.stats, operation)


def store_account(stats: Stats, operation: Operation) -> None:
    """Store the byte counts and times of an operation's last run in the statistics."""
    stats.wire_nbytes, stats.raw_sent_nbytes, *seconds = operation.account
    stats.encode_seconds, stats.decode_seconds, stats.wait_seconds = seconds


_TOLERANCES = "a finite number, 0 or more"


@dataclass(frozen=True)
class _Automatic:
    """The options of ``codec="auto"``."""

    tolerance: float = field(metadata={"limits": _TOLERANCES})


def named_codec(codec: str | Codec | None, options: dict[str, Any]) -> tuple[Codec | None, float | None]:
    """Return the codec that a call's arguments name, and None; for ``codec="auto"``, None and the tolerance."""
    if not (isinstance(codec, str) and name_in(codec) == choose.AUTO):
        return as_codec(codec, options), None
    options = with_written(codec, options, _Automatic)
    tolerance = options.get("tolerance")
    if set(options) != {"tolerance"}:
        others = ", ".join(sorted(options.keys() - {"tolerance"}))
        raise InvalidArgument(
            'codec="auto" needs tolerance=, the relative error that the result may have, such as tolerance=1e-2'
            + f", and takes no other option: not {others}" * bool(others)
        )
    if not isinstance(tolerance, numbers.Real) or not 0 <= float(tolerance) < math.inf:
        raise InvalidArgument(f'codec="auto": tolerance={tolerance!r} must be {_TOLERANCES}')
    return None, float(tolerance)


def feedback_refused(plan: Plan) -> str:
    """Return why a plan's codec takes no feedback; empty if it does. The requested codec is checked even if this
    topology does not use it.
    """
    codec = plan.call.codec if plan.algorithm in (choose.COPY, choose.HIERARCHICAL) else plan.codec
    if plan.quantizer is not None and not plan.quantizer.feedback:
        return f"feedback with {plan.codec!r}: votes leave no residual, so use no feedback"
    if codec is None or codec.feedback_converges(plan.call.dtype):
        return ""
    return (
        f"feedback with {codec!r} would grow without end, since its steps are so large that rounding errors exceed "
        "the values: use more bits, smaller blocks, norm='max', rounding to nearest, or no feedback"
    )
