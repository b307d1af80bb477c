"""The preparation of collectives: each checks its arguments, and prepares what will run."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import config
from ..algorithms import native
from ..codecs.base import Array
from ..devices.host import HostDevice
from ..errors import InvalidArgument, InvalidBuffer
from ..feedback import ErrorFeedback
from ..kernels._host import Along, Function, Started
from ..progress import Pending
from ..sparse.contract import Sparsifier
from . import choose
from .call import MOVED, REDUCTIONS, Call, Setting, operation_name
from .choose import COPY
from .handshake import places
from .plan import Plan, make_plan
from .planned_steps import PlannedSteps, Ranks
from .recipe import Asked, Buffers, Recipe, feedback_refused, named_codec
from .signature import USUAL_WAY

_MOST_RECIPES = 4096


Checked = tuple[Recipe, Buffers]


class Collectives(PlannedSteps):
    """Prepares collectives among some ranks: a call's recipe, and its buffers.

    Parameters are those of `PlannedSteps`.
    """

    def __init__(self, device: HostDevice, ranks: Ranks) -> None:
        super().__init__(device, ranks)
        self._setting = Setting(
            ranks.world,
            device,
            ranks.profile,
            library="" if ranks.native is None else ranks.native.library,
            shared=ranks.shared is not None,
            blocks=ranks.blocks,
        )
        self._recipes: dict[tuple[Any, ...], Recipe] = {}
        self._checks: dict[str, Callable[[Array, Any, Array | None, ErrorFeedback | None, Asked], Checked]] = {
            "allreduce": self._check_allreduce,
            "reduce_scatter": self._check_reduce_scatter,
            "allgather": self._check_allgather,
            "allgatherv": self._check_allgatherv,
            "bcast": self._check_bcast,
            "alltoall": self._check_alltoall,
        }

    def check(
        self, collective: str, x: Array, param: Any, out: Array | None, feedback: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        """Find out how a call runs, and its buffers; ``param`` is the operation or the root.

        Raises
        ------
        CompcollError
            If the arguments cannot be right.
        """
        recipe, buffers = self._checks[collective](x, param, out, feedback, asked)
        if feedback is None:
            return recipe, buffers
        if refused := feedback_refused(recipe.plan):
            raise InvalidArgument(refused)
        return recipe, self.fed_back(recipe, buffers, feedback)

    def explain(self, collective: str, x: Array, op: Any, root: int, asked: Asked) -> Plan:
        """The plan that a call of these arguments would take: see `Communicator.explain`."""
        if collective not in choose.NAMES:
            raise InvalidArgument(f"collective={collective!r} is none of {', '.join(choose.NAMES)}")
        self._device.check_readable(x, "x")
        dtype = self._device.dtype_name(x)
        return self._recipe(
            *(collective, self._device.flat(x, dtype), dtype, asked),
            op=op if collective in REDUCTIONS else MOVED,
            root=root if collective == "bcast" else None,
            rows=tuple(x.shape[1:]) if collective == "allgatherv" else None,
        ).plan

    def _check_allreduce(
        self, x: Array, op: Any, out: Array | None, feedback: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        dtype, flat, result, flat_out = self._device.buffers(x, None, out)
        recipe = self._recipe("allreduce", flat, dtype, asked, op=op)
        chosen = recipe.plan.codec
        if chosen is not None and isinstance(chosen, Sparsifier):
            chosen.check_call(feedback, out)
        return recipe, Buffers(flat, flat_out, result)

    def _check_reduce_scatter(
        self, x: Array, op: Any, out: Array | None, feedback: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        self._device.check_readable(x, "x")
        shape = (self._split(x.shape, "reduce_scatter"), *x.shape[1:])
        dtype, flat, result, flat_out = self._device.buffers(x, shape, out)
        recipe = self._recipe("reduce_scatter", flat, dtype, asked, op=op)
        return recipe, Buffers(flat, flat_out, result)

    def _check_allgather(self, x: Array, _: Any, out: Array | None, __: ErrorFeedback | None, asked: Asked) -> Checked:
        self._device.check_readable(x, "x")
        dtype, flat, result, flat_out = self._device.buffers(x, (self._size, *x.shape), out)
        return self._recipe("allgather", flat, dtype, asked), Buffers(flat, flat_out, result)

    def _check_allgatherv(self, x: Array, _: Any, __: Array | None, ___: ErrorFeedback | None, asked: Asked) -> Checked:
        self._device.check_readable(x, "x")
        if x.ndim == 0:
            raise InvalidBuffer("allgatherv joins arrays along their first axis: x must have one")
        dtype = self._device.dtype_name(x)
        flat = self._device.flat(x, dtype)
        return self._recipe("allgatherv", flat, dtype, asked, rows=x.shape[1:]), Buffers(flat, None, x)

    def _check_bcast(self, x: Array, root: Any, out: Array | None, _: ErrorFeedback | None, asked: Asked) -> Checked:
        if not isinstance(root, numbers.Integral) or root not in range(self._size):
            raise InvalidArgument(f"root={root!r} is not a rank of this communicator: 0 to {self._size - 1}")
        dtype, flat, result, flat_out = self._device.buffers(x, None, out)
        return self._recipe("bcast", flat, dtype, asked, root=int(root)), Buffers(flat, flat_out, result)

    def _check_alltoall(self, x: Array, _: Any, out: Array | None, __: ErrorFeedback | None, asked: Asked) -> Checked:
        dtype, flat, result, flat_out = self._device.buffers(x, None, out)
        self._split(x.shape, "alltoall")
        if flat_out is flat:
            raise InvalidBuffer("alltoall cannot work in place: give an out of its own")
        return self._recipe("alltoall", flat, dtype, asked), Buffers(flat, flat_out, result)

    def fed_back(self, recipe: Recipe, buffers: Buffers, feedback: ErrorFeedback) -> Buffers:
        """The buffers of a call that takes feedback, with what it keeps of them.

        Raises
        ------
        InvalidArgument, InvalidBuffer
            If it is none, or of other buffers.
        """
        if not isinstance(feedback, ErrorFeedback):
            raise InvalidArgument(f"feedback={feedback!r}: a compcoll.ErrorFeedback is needed")
        codec, sparse = recipe.plan.codec, recipe.plan.algorithm in choose.SPARSE
        if isinstance(codec, Sparsifier) and not sparse and feedback.arrays != ErrorFeedback.arrays:
            raise InvalidArgument(
                f"feedback={feedback!r} is for allreduces: what {codec!r} loses in one of its encodings by "
                f"{recipe.plan.algorithm} is kept in a compcoll.ErrorFeedback"
            )
        residual = feedback.prepare(buffers.x.size, recipe.plan.call.dtype, self._device.zeros_residual)
        if not self._device.holds(residual):
            raise InvalidBuffer("feedback holds the losses of arrays on another device: use one feedback a buffer")
        if sparse:
            return buffers._replace(feedback=feedback)
        return buffers if codec is None else buffers._replace(residual=residual)

    def prepare_feedback(self, feedback: ErrorFeedback, x: Array) -> None:
        """Prepare a feedback: see `Communicator.prepare_feedback`."""
        dtype = self._device.dtype_name(x)
        feedback.prepare(self._device.flat(x, dtype).size, dtype, self._device.zeros_residual)

    def _split(self, shape: tuple[int, ...], collective: str) -> int:
        """Extent of one rank's block along the first axis."""
        if not shape or shape[0] % self._size:
            raise InvalidBuffer(
                f"{collective}: the first axis of shape {shape} must be a multiple of the {self._size} ranks"
            )
        return shape[0] // self._size

    def _recipe(
        self,
        collective: str,
        flat: Array,
        dtype: str,
        asked: Asked,
        *,
        op: Any = MOVED,
        root: int | None = None,
        rows: tuple[int, ...] | None = None,
    ) -> Recipe:
        n = flat.size if rows is None else 0
        codec, algorithm, options = asked
        key: tuple[Any, ...] = (collective, n, dtype, op, root, rows, codec, algorithm)
        if options:
            key += (*options.items(),)
        try:
            if (known := self._recipes.get(key)) is not None:
                return known
        except TypeError:  # made of what cannot be a key, and will be refused
            key = ()
        options = dict(options)
        timeout = options.pop("timeout", None)
        if timeout is not None:
            config.timeout(timeout)
        chosen, tolerance = self._ranks.codec, self._ranks.tolerance
        if codec is not ... or options:
            chosen, tolerance = named_codec(None if codec is ... else codec, options)
        call = Call(
            collective,
            n,
            dtype,
            flat.itemsize,
            operation_name(op) if collective in REDUCTIONS else MOVED,
            chosen,
            self._ranks.algorithm if algorithm is None else algorithm,
            root=root,
            rows=rows,
            tolerance=tolerance,
            checksum=self._ranks.checksum,
        )
        recipe = self._make(call, bounded=self._ranks.bounded or timeout is not None)
        recipe.timeout = timeout
        if recipe.unblocked is not None:
            recipe.unblocked.timeout = timeout
        if len(self._recipes) >= _MOST_RECIPES:
            self._ranks.recordings.forget(self._recipes.values())
            self._recipes.clear()
        if key:
            self._recipes[key] = recipe
        return recipe

    def _make(self, call: Call, *, bounded: bool) -> Recipe:
        return self._recipe_of(make_plan(call, self._setting), bounded=bounded)

    def _recipe_of(self, plan: Plan, *, bounded: bool) -> Recipe:
        device, ranks, call = self._device, self._ranks, plan.call
        if plan.algorithm == COPY and call.rows is None:
            return Recipe.of_body(plan, Function(device.copy, 0))
        if plan.summands is not None:
            return Recipe(plan, partial(self._add, plan))
        if plan.algorithm == choose.DISSEMINATION:
            where = places(ranks.rank, self._size)
            along: Along
            if plan.coder is None:
                along = device.gathered(ranks.small, self._size, where, call.n, call.dtype, call.op)
            else:
                along = device.encoded_sum(ranks.small, plan.coder, call.n, ranks.rank, self._size, plan.scale)
            return Recipe.of_body(plan, along, along=along)
        if plan.algorithm == choose.SHARED_MEMORY:
            return self._by_shared_memory(plan, bounded=bounded)
        if plan.algorithm == choose.NATIVE and call.op != MOVED:
            return self._by_mpi(plan, bounded=bounded)
        if plan.algorithm == choose.NATIVE and call.rows is None:
            start = self._started_by_mpi(call)
            body = Started(start)
            steps = lambda buffers, run: native.move(start, buffers.x, buffers.out, run.turn, run.stats)  # noqa: E731
            return Recipe(plan, steps, body=body, with_feedback=body)
        algorithm = self._steps_of[call.collective]
        recipe = Recipe(plan, partial(algorithm, plan))
        if call.rows is None:
            ranks.recordings.make_replayable(recipe, algorithm)
        return recipe

    def _by_shared_memory(self, plan: Plan, *, bounded: bool) -> Recipe:
        assert self._ranks.shared is not None  # else no plan names it
        other = None
        if plan.other is not None and bounded:
            plan = plan._replace(signature=plan.signature.bounded(USUAL_WAY), other=None)
        elif plan.other is not None:
            other = self._by_mpi(plan.other, bounded=False)
        body = self._device.shared_sum(*self._ranks.shared, plan.call.dtype, plan.scale)
        return Recipe.of_body(plan, body, other=other)

    def _by_mpi(self, plan: Plan, *, bounded: bool) -> Recipe:
        """MPI's own reduction, or what takes its place where some rank must not block in it."""
        # What blocks in MPI matches only the same on all ranks: so one that must not says so when the call is opened.
        if bounded:
            plan = plan._replace(signature=plan.signature.bounded())
        unblocked, other = None, None
        if plan.unblocked is not None:
            unblocked = self._recipe_of(plan.unblocked._replace(signature=plan.signature), bounded=bounded)
        if unblocked is not None and unblocked.plan.algorithm == choose.SHARED_MEMORY:
            if bounded:
                return unblocked
            other = unblocked
        call = plan.call
        own = self._native.reductions(call.collective, call.op)
        reduction = native.Reduction(*own, self._device, call.dtype, plan.scale)
        steps = lambda buffers, run: reduction.steps(buffers.x, buffers.out, run.turn, run.stats)  # noqa: E731
        body = None if bounded else reduction.body
        return Recipe(plan, steps, body=body, with_feedback=body, unblocked=unblocked, other=other)

    def _started_by_mpi(self, call: Call) -> Callable[[Array, Array], Pending]:
        """MPI's own nonblocking collective that reduces nothing, as a function of input and result."""
        own, root = self._native, call.root
        if call.collective == "allgather":
            return partial(own.iallgatherv, counts=[call.n] * self._size)
        if root is None:
            return own.ialltoall

        def bcast(x: Array, out: Array) -> Pending:
            if self._ranks.rank == root:
                self._device.copy(x, out)
            return own.ibcast(out, root)

        return bcast
