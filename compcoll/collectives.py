"""What each collective does with its arguments: checks them, and prepares what will run."""

from __future__ import annotations

import contextlib
import math
import numbers
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .accuracy import feedback_converges
from .algorithms import additive, bcast, choose, hierarchical, native, pairwise
from .algorithms.job import Job, Window
from .codecs.base import Codec, Coder
from .codecs.registry import as_codec
from .errors import InvalidArgument, InvalidBuffer
from .feedback import ErrorFeedback
from .layout import Chunk, World, balanced_chunks, consecutive_chunks
from .model import Profile
from .plan import MOVED, Call, Plan, make_plan
from .request import Steps
from .transports.base import Wire
from .transports.mpi import MPITransport, operation_name

_COUNT = struct.Struct("<q")

_MOST_PLANS = 4096

COPY = "copy"
"""What every collective is when there is one rank."""


class Means(NamedTuple):
    """What a running collective gets from its communicator.

    Attributes
    ----------
    group : Group
        The ranks.
    take : callable
        Gives memory, in bytes.
    stats : Stats
        The account to fill.
    turn : Turn or None
        For MPI's nonblocking collectives; None for one that blocks.
    number : int
        How many collectives the communicator began before.
    """

    group: Any
    take: Any
    stats: Any
    turn: Any
    number: int = 0


class Prepared(NamedTuple):
    """A collective whose arguments are checked.

    Attributes
    ----------
    result : array
        What the caller gets; None if `run` returns it.
    run : callable
        Makes the steps.
    at_once : bool
        Whether `run` calls what blocks in MPI.
    nbytes : int
        Bytes of this rank's buffer.
    """

    plan: Plan
    result: Any
    run: Callable[[Means], Steps]
    at_once: bool
    nbytes: int


class Compression(NamedTuple):
    """A call's codec and algorithm, and the relative error that the result may have if the codec is to be chosen."""

    codec: Codec | None
    algorithm: str
    tolerance: float | None = None


def compression(codec: str | Codec | None, options: dict[str, Any], algorithm: str) -> Compression:
    """What a call's arguments name."""
    if not (isinstance(codec, str) and codec == choose.AUTO):
        return Compression(as_codec(codec, options), algorithm)
    tolerance = options.get("tolerance")
    if set(options) != {"tolerance"}:
        raise InvalidArgument(
            f'codec="auto" takes tolerance=, the relative error that the result may have, and no more: not {options}'
        )
    if not isinstance(tolerance, numbers.Real) or not 0 <= float(tolerance) < math.inf:
        raise InvalidArgument(f'codec="auto": tolerance={tolerance!r} must be a finite number, 0 or more')
    return Compression(None, algorithm, float(tolerance))


class Collectives:
    """Prepares collectives among some ranks.

    Parameters
    ----------
    device : HostDevice
        Where the buffers are.
    rank : int
        As in MPI.
    mpi : MPITransport or None
        For MPI's own collectives.
    default : Compression
        Of calls that name none.
    profile : Profile
        What is known of the machines, the same on all ranks.
    world : World
        The ranks.
    """

    def __init__(
        self,
        device: Any,
        rank: int,
        mpi: MPITransport | None,
        default: Compression,
        profile: Profile,
        world: World,
    ) -> None:
        self._device = device
        self._rank = rank
        self._size = world.size
        self._mpi = mpi
        self._default = default
        self._profile = profile
        self._world = world
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def allreduce(
        self,
        blocking: bool,
        x: Any,
        op: Any,
        out: Any,
        feedback: ErrorFeedback | None,
        compression: dict[str, Any],
    ) -> Prepared:
        device, mpi, op = self._device, self._mpi, operation_name(op)
        dtype, flat, result, flat_out = self._buffers(x, None, out)
        plan = self._plan("allreduce", flat, dtype, op, compression)
        residual = None if feedback is None else self._residual(feedback, plan, flat.size, dtype)
        if plan.summands is None and plan.algorithm == choose.HIERARCHICAL and self._world.nodes == 1:
            plan = plan._replace(codec=None)  # nothing is compressed inside a node
        scale = 1.0 / self._size if op == "mean" else 1.0

        if plan.summands is not None:
            return self._prepared(
                plan, flat, flat_out, result, lambda means: self._add(means, plan, flat, flat_out, scale, residual)
            )
        if plan.algorithm == choose.NATIVE:
            assert mpi is not None
            return self._prepared(
                plan,
                flat,
                flat_out,
                result,
                lambda means: native.reduce(
                    mpi.allreduce, mpi.iallreduce, means.turn, op, device, flat, flat_out, dtype, scale
                ),
                blocking,
            )

        def run(means: Means) -> Steps:
            assert plan.raw is not None
            job = self._job(means, plan, flat, flat_out, self._balanced(plan, flat.size), scale, residual)
            return self._by(plan.algorithm, job, plan.raw, flat.size, plan.block, plan.segment)

        return self._prepared(plan, flat, flat_out, result, run)

    def _by(self, algorithm: str, job: Job, raw: Coder, n: int, block: int, segment: int) -> Steps:
        """Run one of our own allreduces."""
        if algorithm != choose.HIERARCHICAL:
            return choose.ALLREDUCE[algorithm](job)
        between = choose.between_nodes(self._world.nodes)
        return hierarchical.allreduce(job, raw, between, lambda parts: balanced_chunks(n, parts, block, segment))

    def _add(self, means: Means, plan: Plan, flat: Any, flat_out: Any, scale: float, residual: Any) -> Steps:
        """Run an allreduce of numbers that stand for values."""
        assert plan.summands is not None
        device, mpi = self._device, self._mpi

        def reduce(algorithm: str, raw_nbytes: float, numbers: Any, op: str) -> Steps:
            n = len(numbers)
            if self._size == 1:
                return _nothing()
            if algorithm == choose.NATIVE:
                assert mpi is not None
                name = numbers.dtype.name
                return native.reduce(None, mpi.iallreduce, means.turn, op, device, numbers, numbers, name, 1.0)
            coder = device.number_coder(numbers, op)
            chunks = balanced_chunks(n, self._size, 1, plan.segment)
            job = Job(
                means.group,
                coder,
                Window(numbers),
                Window(numbers),
                chunks,
                means.take,
                means.stats,
                itemsize=raw_nbytes,
            )
            return self._by(algorithm, job, coder, n, 1, plan.segment)

        return additive.allreduce(
            flat,
            flat_out,
            scale,
            residual,
            plan.summands,
            agree=partial(reduce, "recursive_doubling", 0),
            add=partial(reduce, plan.algorithm, flat.itemsize / plan.summands.per_value),
        )

    def reduce_scatter(self, x: Any, op: Any, out: Any, compression: dict[str, Any]) -> Prepared:
        device, mpi, op = self._device, self._mpi, operation_name(op)
        device.check_readable(x, "x")
        shape = (self._split(x.shape, "reduce_scatter"), *x.shape[1:])
        dtype, flat, result, flat_out = self._buffers(x, shape, out)
        plan = self._plan("reduce_scatter", flat, dtype, op, compression)
        scale = 1.0 / self._size if op == "mean" else 1.0

        def run(means: Means) -> Steps:
            if plan.algorithm == choose.NATIVE:
                assert mpi is not None
                return native.reduce(None, mpi.ireduce_scatter, means.turn, op, device, flat, flat_out, dtype, scale)
            chunks = self._equal(plan, flat_out.size)
            job = self._job(means, plan, flat, flat_out, chunks, scale)
            job.out.offset = self._rank * flat_out.size
            return choose.REDUCE_SCATTER[plan.algorithm](job)

        return self._prepared(plan, flat, flat_out, result, run)

    def allgather(self, x: Any, out: Any, compression: dict[str, Any]) -> Prepared:
        mpi = self._mpi
        self._device.check_readable(x, "x")
        dtype, flat, result, flat_out = self._buffers(x, (self._size, *x.shape), out)
        plan = self._plan("allgather", flat, dtype, MOVED, compression)

        def run(means: Means) -> Steps:
            if plan.algorithm == choose.NATIVE:
                assert mpi is not None
                return native.move(lambda: mpi.iallgatherv(flat, flat_out, [flat.size] * self._size), means.turn)
            job = self._job(means, plan, flat, flat_out, self._equal(plan, flat.size))
            job.x.offset = self._rank * flat.size
            return choose.ALLGATHER[plan.algorithm](job)

        return self._prepared(plan, flat, flat_out, result, run)

    def allgatherv(self, x: Any, compression: dict[str, Any]) -> Prepared:
        mpi, device = self._mpi, self._device
        device.check_readable(x, "x")
        if x.ndim == 0:
            raise InvalidBuffer("allgatherv joins arrays along their first axis: x must have one")
        dtype = device.dtype_name(x)
        flat = device.flat(x, dtype)
        row = math.prod(x.shape[1:])
        plan = self._plan(
            "allgatherv", flat, dtype, MOVED, compression, detail=f"rows of shape {x.shape[1:]}", uneven=True
        )

        def run(means: Means) -> Steps:
            if self._size == 1:
                return x.copy()
            rows = yield from _exchange_counts(means, x.shape[0])
            counts = [count * row for count in rows]
            result = device.empty_like(x, (sum(rows), *x.shape[1:]))
            flat_out = device.flat(result, dtype)
            if plan.algorithm == choose.NATIVE:
                assert mpi is not None
                yield from native.move(lambda: mpi.iallgatherv(flat, flat_out, counts), means.turn)
            else:
                chunks = consecutive_chunks(counts, plan.block, plan.segment)
                job = self._job(means, plan, flat, flat_out, chunks)
                job.x.offset = sum(counts[: self._rank])
                yield from choose.ALLGATHER[plan.algorithm](job)
            return result

        return Prepared(plan, None, run, False, x.nbytes)

    def bcast(self, x: Any, root: int, out: Any, compression: dict[str, Any]) -> Prepared:
        mpi, device = self._mpi, self._device
        if not isinstance(root, numbers.Integral) or root not in range(self._size):
            raise InvalidArgument(f"root={root!r} is not a rank of this communicator: 0 to {self._size - 1}")
        dtype, flat, result, flat_out = self._buffers(x, None, out)
        plan = self._plan("bcast", flat, dtype, MOVED, compression, detail=f"root {root}")

        def run(means: Means) -> Steps:
            if plan.algorithm == choose.NATIVE:
                assert mpi is not None
                if self._rank == root:
                    device.copy(flat, flat_out)
                return native.move(lambda: mpi.ibcast(flat_out, root), means.turn)
            return bcast.bcast(self._job(means, plan, flat, flat_out, self._balanced(plan, flat.size)), root)

        return self._prepared(plan, flat, flat_out, result, run)

    def alltoall(self, x: Any, out: Any, compression: dict[str, Any]) -> Prepared:
        mpi = self._mpi
        dtype, flat, result, flat_out = self._buffers(x, None, out)
        self._split(x.shape, "alltoall")
        if flat_out is flat:
            raise InvalidBuffer("alltoall cannot work in place: give an out of its own")
        plan = self._plan("alltoall", flat, dtype, MOVED, compression)

        def run(means: Means) -> Steps:
            if plan.algorithm == choose.NATIVE:
                assert mpi is not None
                return native.move(lambda: mpi.ialltoall(flat, flat_out), means.turn)
            chunks = self._equal(plan, flat.size // self._size)
            return pairwise.alltoall(self._job(means, plan, flat, flat_out, chunks))

        return self._prepared(plan, flat, flat_out, result, run)

    def _prepared(
        self,
        plan: Plan,
        flat: Any,
        flat_out: Any,
        result: Any,
        run: Callable[[Means], Steps],
        at_once: bool = False,
    ) -> Prepared:
        if self._size > 1 or (plan.summands is not None and not plan.summands.is_sum):
            return Prepared(plan, result, run, at_once, flat.nbytes)

        def copy(means: Means) -> Steps:
            self._device.copy(flat, flat_out)
            yield None

        return Prepared(plan._replace(codec=None, algorithm=COPY), result, copy, at_once, flat.nbytes)

    def _buffers(self, x: Any, shape: tuple[int, ...] | None, out: Any) -> tuple[str, Any, Any, Any]:
        """The element type, the flat input, the result and the flat result."""
        device = self._device
        device.check_readable(x, "x")
        dtype = device.dtype_name(x)
        flat = device.flat(x, dtype)
        if shape is None:
            shape = x.shape
        if out is None:
            out = device.empty_like(x, shape)
        elif device.check_writable(out, x, shape):
            return dtype, flat, out, flat
        return dtype, flat, out, device.flat(out, dtype)

    def _plan(
        self,
        collective: str,
        flat: Any,
        dtype: str,
        op: str,
        compression: dict[str, Any],
        *,
        uneven: bool = False,
        detail: str = "",
    ) -> Plan:
        n = -1 if uneven else flat.size
        key = (collective, n, dtype, op, detail, *compression.items())
        try:
            return self._plans[key]
        except (KeyError, TypeError):  # new, or made of what cannot be a key and will be refused
            codec, algorithm, tolerance = self._compression(**compression)
            call = Call(collective, n, dtype, flat.itemsize, op, codec, algorithm, detail, tolerance)
            native = self._mpi is not None
            plan = make_plan(call, device=self._device, profile=self._profile, world=self._world, native=native)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            with contextlib.suppress(TypeError):
                self._plans[key] = plan
            return plan

    def _compression(self, /, codec: Any = ..., algorithm: str | None = None, **options: Any) -> Compression:
        algorithm = algorithm or self._default.algorithm
        if codec is ... and not options:
            return self._default._replace(algorithm=algorithm)
        return compression(None if codec is ... else codec, options, algorithm)

    def _residual(self, feedback: ErrorFeedback, plan: Plan, n: int, dtype: str) -> Any:
        if not isinstance(feedback, ErrorFeedback):
            raise InvalidArgument(f"feedback={feedback!r}: a compcoll.ErrorFeedback is needed")
        if plan.codec is not None and not feedback_converges(plan.codec, dtype):
            raise InvalidArgument(
                f"feedback with {plan.codec!r} would grow without end, since rounding to steps that large loses more "
                "than there is: use more bits, smaller blocks, norm='max', rounding to nearest, or no feedback"
            )
        if plan.summands is not None and not plan.summands.feedback:
            raise InvalidArgument(f"feedback with {plan.codec!r}: a vote loses nothing that could be fed back")
        residual = feedback.prepare(n, dtype, self._device.zeros_residual)
        return residual if plan.codec is not None else None

    def _split(self, shape: tuple[int, ...], collective: str) -> int:
        """Extent of one rank's block along the first axis."""
        if not shape or shape[0] % self._size:
            raise InvalidBuffer(
                f"{collective}: the first axis of shape {shape} must be a multiple of the {self._size} ranks"
            )
        return shape[0] // self._size

    def _balanced(self, plan: Plan, n: int) -> tuple[Chunk, ...]:
        return balanced_chunks(n, self._size, plan.block, plan.segment)

    def _equal(self, plan: Plan, n: int) -> tuple[Chunk, ...]:
        return consecutive_chunks([n] * self._size, plan.block, plan.segment)

    def _job(
        self,
        means: Means,
        plan: Plan,
        flat: Any,
        flat_out: Any,
        chunks: Sequence[Chunk],
        scale: float = 1.0,
        residual: Any = None,
    ) -> Job:
        assert plan.coder is not None
        return Job(
            group=means.group,
            coder=plan.coder,
            x=Window(flat),
            out=Window(flat_out),
            chunks=chunks,
            take=means.take,
            stats=means.stats,
            scale=scale,
            residual=None if residual is None else Window(residual),
            itemsize=flat.itemsize,
            draw=means.number % 2**32 << 32 | self._rank,
        )


def _nothing() -> Steps:
    """No steps."""
    yield from ()


def _exchange_counts(means: Means, own: int) -> Steps:
    """Every rank's count."""
    group = means.group
    wires = {rank: Wire(means.take(_COUNT.size)) for rank in range(group.size)}
    _COUNT.pack_into(wires[group.rank].buffer, 0, own)
    others = [rank for rank in wires if rank != group.rank]
    pending = [group.irecv(wires[rank], rank) for rank in others]
    pending += [group.isend(wires[group.rank], rank) for rank in others]
    for message in pending:
        yield message
    return [_COUNT.unpack_from(wire.buffer)[0] for wire in wires.values()]
