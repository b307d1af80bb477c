"""Argument checks and compiled plans of collectives on host arrays."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from .. import config
from ..algorithms import native
from ..algorithms.record import REDUCTIONS, ROOTED, UNEVEN
from ..codecs.base import Array
from ..codecs.sparse.sparsifier import Sparsifier
from ..errors import InvalidArgument, InvalidBuffer
from ..feedback import ErrorFeedback
from ..host.device import HostCoder, HostDevice
from ..kernels._host import Function, Gathered, Started
from ..pending import Pending, Steps
from ..plan import choose
from ..plan.advice import check_error
from ..plan.call import NO_REDUCTION, Call, Setting, operation_name
from ..plan.choose import COPY
from ..plan.plan import Plan, make_plan
from .compiled_plan import Asked, Buffers, CompiledPlan, Run, feedback_refused, named_codec
from .handshake import places
from .planned_steps import PlannedSteps, Ranks

_MOST_PLANS = 2048


Checked = tuple[CompiledPlan, Buffers]


class Collectives(PlannedSteps):
    """Prepares the compiled plan and the buffers of each call.

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
        self._plans: dict[tuple[Any, ...], CompiledPlan] = {}
        self._checks: dict[str, Callable[[Array, Any, Array | None, ErrorFeedback | None, Asked], Checked]] = {
            "allreduce": self._check_allreduce,
            "reduce_scatter": self._check_reduce_scatter,
            "allgather": self._check_allgather,
            "allgatherv": self._check_allgatherv,
            "bcast": self._check_bcast,
            "reduce": self._check_reduce,
            "gather": self._check_gather,
            "scatter": self._check_scatter,
            "alltoall": self._check_alltoall,
            "alltoallv": self._check_alltoallv,
        }

    def check(
        self, collective: str, x: Array, param: Any, out: Array | None, feedback: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        """Check a call and return its compiled plan and buffers. `Communicator.call` explains ``param``.

        Raises
        ------
        CompcollError
            If the arguments are invalid.
        """
        plan, buffers = self._checks[collective](x, param, out, feedback, asked)
        if feedback is None:
            return plan, buffers
        if refused := feedback_refused(plan.plan):
            raise InvalidArgument(refused)
        return plan, self.fed_back(plan, buffers, feedback)

    def explain(self, collective: str, x: Array, op: Any, root: int, asked: Asked) -> Plan:
        """Return the plan of a call with these arguments; see `Communicator.explain`."""
        if collective not in choose.NAMES:
            raise InvalidArgument(f"collective={collective!r} is none of {', '.join(choose.NAMES)}")
        self._device.check_readable(x, "x")
        dtype = self._device.dtype_name(x)
        return self.running(
            self._compiled_plan(
                *(collective, self._device.flat(x, dtype), dtype, asked),
                op=op if collective in REDUCTIONS else NO_REDUCTION,
                root=self._root(root) if collective in ROOTED else None,
                rows=tuple(x.shape[1:]) if collective in UNEVEN else None,
            )
        )

    def running(self, compiled: CompiledPlan) -> Plan:
        """Return the plan that runs if all ranks' arrays are on devices like this one."""
        return compiled.plan

    def _check_allreduce(
        self, x: Array, op: Any, out: Array | None, feedback: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        dtype, flat, result, flat_out = self._device.buffers(x, None, out)
        plan = self._compiled_plan("allreduce", flat, dtype, asked, op=op)
        chosen = plan.plan.codec
        if chosen is not None and isinstance(chosen, Sparsifier):
            chosen.check_call(feedback, out)
        return plan, Buffers(flat, flat_out, result)

    def _check_reduce_scatter(
        self, x: Array, op: Any, out: Array | None, feedback: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        self._device.check_readable(x, "x")
        shape = (self._split(x.shape, "reduce_scatter"), *x.shape[1:])
        dtype, flat, result, flat_out = self._device.buffers(x, shape, out)
        plan = self._compiled_plan("reduce_scatter", flat, dtype, asked, op=op)
        return plan, Buffers(flat, flat_out, result)

    def _check_allgather(self, x: Array, _: Any, out: Array | None, __: ErrorFeedback | None, asked: Asked) -> Checked:
        self._device.check_readable(x, "x")
        dtype, flat, result, flat_out = self._device.buffers(x, (self._size, *x.shape), out)
        plan = self._compiled_plan("allgather", flat, dtype, asked)
        self._check_reference(plan, out)
        return plan, Buffers(flat, flat_out, result)

    def _check_allgatherv(self, x: Array, _: Any, __: Array | None, ___: ErrorFeedback | None, asked: Asked) -> Checked:
        self._device.check_readable(x, "x")
        self._check_axes(x, "allgatherv joins arrays along their first axis")
        dtype = self._device.dtype_name(x)
        flat = self._device.flat(x, dtype)
        return self._compiled_plan("allgatherv", flat, dtype, asked, rows=x.shape[1:]), Buffers(flat, None, x)

    def _check_bcast(self, x: Array, root: Any, out: Array | None, _: ErrorFeedback | None, asked: Asked) -> Checked:
        root = self._root(root)
        dtype, flat, result, flat_out = self._device.buffers(x, None, out)
        plan = self._compiled_plan("bcast", flat, dtype, asked, root=root)
        self._check_reference(plan, None if flat_out is flat and self._ranks.rank == root else out)
        return plan, Buffers(flat, flat_out, result)

    @staticmethod
    def _check_reference(plan: CompiledPlan, out: Array | None) -> None:
        """Raise `InvalidBuffer` if a codec sends how the result differs from ``out``, and there is no such array."""
        codec = plan.plan.call.codec
        if codec is not None and codec.needs_reference and out is None:
            raise InvalidBuffer(
                f"{codec!r} sends how the result differs from the previous one, and updates that: give it as out= (on "
                "the root of compcoll.torch.broadcast as reference=), in memory of its own; a bcast's other ranks may "
                "give out=x"
            )

    def _check_reduce(
        self, x: Array, param: tuple[Any, Any], out: Array | None, _: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        root = self._root(param[1])
        dtype, buffers = self._at_root(x, root, None, out)
        return self._compiled_plan("reduce", buffers.x, dtype, asked, op=param[0], root=root), buffers

    def _check_gather(self, x: Array, root: Any, out: Array | None, _: ErrorFeedback | None, asked: Asked) -> Checked:
        root = self._root(root)
        self._device.check_readable(x, "x")
        dtype, buffers = self._at_root(x, root, (self._size, *x.shape), out)
        return self._compiled_plan("gather", buffers.x, dtype, asked, root=root), buffers

    def _check_scatter(self, x: Array, root: Any, out: Array | None, _: ErrorFeedback | None, asked: Asked) -> Checked:
        root = self._root(root)
        self._device.check_readable(x, "x")
        shape = (self._split(x.shape, "scatter"), *x.shape[1:])
        dtype, flat, result, flat_out = self._device.buffers(x, shape, out)
        return self._compiled_plan("scatter", flat, dtype, asked, root=root), Buffers(flat, flat_out, result)

    def _root(self, root: Any) -> int:
        if not isinstance(root, numbers.Integral) or root not in range(self._size):
            raise InvalidArgument(f"root={root!r} is not a rank of this communicator: 0 to {self._size - 1}")
        return int(root)

    def _at_root(self, x: Array, root: int, shape: tuple[int, ...] | None, out: Array | None) -> tuple[str, Buffers]:
        """Return the element type and the buffers of a collective whose result only the root gets."""
        if self._ranks.rank == root:
            dtype, flat, result, flat_out = self._device.buffers(x, shape, out)
            return dtype, Buffers(flat, flat_out, result)
        self._device.check_readable(x, "x")
        dtype = self._device.dtype_name(x)
        return dtype, Buffers(self._device.flat(x, dtype), None, None)

    def _check_alltoall(self, x: Array, _: Any, out: Array | None, __: ErrorFeedback | None, asked: Asked) -> Checked:
        dtype, flat, result, flat_out = self._device.buffers(x, None, out)
        self._split(x.shape, "alltoall")
        if flat_out is flat:
            raise InvalidBuffer("out shares memory with x, but alltoall cannot work in place: pass another out")
        return self._compiled_plan("alltoall", flat, dtype, asked), Buffers(flat, flat_out, result)

    def _check_alltoallv(
        self, x: Array, counts: Any, _: Array | None, __: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        self._device.check_readable(x, "x")
        self._check_axes(x, "alltoallv sends rows along its first axis")
        try:
            rows = tuple(map(operator.index, counts))
        except TypeError:
            rows = ()
        if len(rows) != self._size or min(rows) < 0 or sum(rows) != x.shape[0]:
            raise InvalidArgument(
                f"counts={counts!r}: {self._size} whole numbers are needed, the rows for each rank, 0 or more; they "
                f"must add up to the {x.shape[0]} rows of x"
            )
        dtype = self._device.dtype_name(x)
        flat = self._device.flat(x, dtype)
        plan = self._compiled_plan("alltoallv", flat, dtype, asked, rows=x.shape[1:])
        return plan, Buffers(flat, None, x, counts=rows)

    @staticmethod
    def _check_axes(x: Array, why: str) -> None:
        if x.ndim == 0:
            raise InvalidBuffer(f"x has no axes, but {why}: pass x.reshape(1)")

    def fed_back(self, plan: CompiledPlan, buffers: Buffers, feedback: ErrorFeedback) -> Buffers:
        """Return the buffers of a call with its feedback's residual.

        Raises
        ------
        InvalidArgument, InvalidBuffer
            If ``feedback`` is not an `ErrorFeedback`, or belongs to other buffers or other codecs.
        """
        if not isinstance(feedback, ErrorFeedback):
            raise InvalidArgument(f"feedback={feedback!r}: a compcoll.ErrorFeedback is needed")
        codec, sparse = plan.plan.codec, plan.plan.algorithm in choose.SPARSE
        if isinstance(codec, Sparsifier) and not sparse and feedback.arrays != ErrorFeedback.arrays:
            raise InvalidArgument(
                f"feedback={feedback!r} is for allreduces with a sparse algorithm: for {codec!r} by "
                f"{plan.plan.algorithm}, use a compcoll.ErrorFeedback"
            )
        residual = feedback.prepare(buffers.x.size, plan.plan.call.dtype, self._device.zeros_residual)
        if not self._device.holds(residual):
            raise InvalidBuffer("feedback has a residual on another device: use one ErrorFeedback for each buffer")
        if sparse:
            return buffers._replace(feedback=feedback)
        return buffers if codec is None else buffers._replace(residual=residual)

    def prepare_feedback(self, feedback: ErrorFeedback, x: Array) -> None:
        """Allocate the state of a feedback; see `Communicator._prepare_feedback`."""
        dtype = self._device.dtype_name(x)
        feedback.prepare(self._device.flat(x, dtype).size, dtype, self._device.zeros_residual)

    def _split(self, shape: tuple[int, ...], collective: str) -> int:
        """Return the extent of one rank's block along the first axis."""
        if not shape or shape[0] % self._size:
            raise InvalidBuffer(
                f"{collective}: the first axis of shape {shape} must be a multiple of the {self._size} ranks"
            )
        return shape[0] // self._size

    def _compiled_plan(
        self,
        collective: str,
        flat: Array,
        dtype: str,
        asked: Asked,
        *,
        op: Any = NO_REDUCTION,
        root: int | None = None,
        rows: tuple[int, ...] | None = None,
    ) -> CompiledPlan:
        n = flat.size if rows is None else 0
        codec, algorithm, options = asked
        key: tuple[Any, ...] = (collective, n, dtype, op, root, rows, codec, algorithm)
        if options:
            key += (*options.items(),)
        try:
            if (known := self._plans.get(key)) is not None:
                return known
        except TypeError:  # unhashable: refused below
            key = ()
        options = dict(options)
        timeout = options.pop("timeout", None)
        if timeout is not None:
            config.timeout(timeout)
        max_error = options.pop("max_error", None)
        if max_error is not None and not (isinstance(max_error, numbers.Real) and 0 < float(max_error) < math.inf):
            raise InvalidArgument(
                f"max_error={max_error!r}: a relative error is needed, a finite number above 0 such as max_error=1e-2"
            )
        chosen, tolerance = self._ranks.codec, self._ranks.tolerance
        if codec is not ... or options:
            chosen, tolerance = named_codec(None if codec is ... else codec, options)
        call = Call(
            collective,
            n,
            dtype,
            flat.itemsize,
            operation_name(op) if collective in REDUCTIONS else NO_REDUCTION,
            chosen,
            self._ranks.algorithm if algorithm is None else algorithm,
            root=root,
            rows=rows,
            tolerance=tolerance,
            checksum=self._ranks.checksum,
            max_error=None if max_error is None else float(max_error),
        )
        compiled = self._make(call, has_timeout=self._ranks.has_timeout or timeout is not None)
        if max_error is not None:
            check_error(compiled.plan)
            check_error(self.running(compiled))
        for each in (compiled, compiled.unblocked):
            if each is not None:
                each.timeout = timeout
        if len(self._plans) >= _MOST_PLANS:
            del self._plans[next(iter(self._plans))]  # the oldest
        if key:
            self._plans[key] = compiled
        return compiled

    def _make(self, call: Call, *, has_timeout: bool) -> CompiledPlan:
        return self._compiled(make_plan(call, self._setting), has_timeout=has_timeout)

    def _compiled(self, plan: Plan, *, has_timeout: bool) -> CompiledPlan:
        device, ranks, call = self._device, self._ranks, plan.call
        if plan.algorithm == COPY and call.rows is None:
            return CompiledPlan.of_operation(plan, Function(device.copy, 0))
        if plan.quantizer is not None:
            return CompiledPlan(plan, partial(self._add, plan.quantizer))
        if plan.algorithm == choose.DISSEMINATION:
            where = places(ranks.rank, self._size)
            gathered = Gathered(ranks.small, self._size, *where, call.n, call.dtype, call.op)
            return CompiledPlan.of_operation(plan, gathered)
        if plan.algorithm == choose.SHARED_MEMORY:
            assert ranks.shared is not None  # else no plan uses it
            return CompiledPlan.of_operation(plan, device.shared_sum(*ranks.shared, call.dtype, plan.scale))
        if plan.algorithm == choose.NATIVE and call.op != NO_REDUCTION:
            return self._by_mpi(plan, has_timeout=has_timeout)
        if plan.algorithm == choose.NATIVE and call.rows is None:
            return CompiledPlan.of_operations(plan, partial(Started, self._started_by_mpi(call)))
        fixed = call.rows is None and plan.coders is not None and isinstance(plan.coders.coder, HostCoder)
        return CompiledPlan(plan, self._steps_of[call.collective], compiles=fixed)

    def _by_mpi(self, plan: Plan, *, has_timeout: bool) -> CompiledPlan:
        """Compile MPI's own reduction, and the plan that replaces it if some rank must not block in MPI."""
        call = plan.call
        own = self._native.reductions(call.collective, call.op, call.root)
        reduction = native.Reduction(*own, self._device, call.dtype, plan.scale)

        def steps(plan: Plan, buffers: Buffers, run: Run) -> Steps:
            return reduction.steps(buffers.x, buffers.out, run.ticket, run.stats)

        if plan.unblocked is not None:
            unblocked = self._compiled(replace(plan.unblocked, signature=plan.signature), has_timeout=has_timeout)
        else:
            unblocked = CompiledPlan(plan, steps)
        return CompiledPlan(plan, steps, None if has_timeout else reduction.operation, unblocked=unblocked)

    def _started_by_mpi(self, call: Call) -> Callable[[Array, Array], Pending]:
        """Return MPI's own nonblocking collective without a reduction, as a function of input and result."""
        own, root = self._native, call.root
        if call.collective == "allgather":
            return partial(own.iallgatherv, counts=[call.n] * self._size)
        if root is None:
            return own.ialltoall
        if call.collective != "bcast":
            return partial(own.igather if call.collective == "gather" else own.iscatter, root=root)

        def bcast(x: Array, out: Array) -> Pending:
            if self._ranks.rank == root:
                self._device.copy(x, out)
            return own.ibcast(out, root)

        return bcast
