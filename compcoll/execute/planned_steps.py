"""The steps of planned collectives on host arrays: each prepares the algorithm's job and runs it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..algorithms import ALGORITHMS, additive, native, sparse
from ..algorithms.gather import gather
from ..algorithms.hierarchical import sharded
from ..algorithms.job import Job, Operands, Window
from ..codecs.base import Array, Codec, Coder, Coders
from ..codecs.sparse.sparsifier import SparseCoder
from ..errors import WireCorrupted
from ..host.device import HostDevice
from ..host.quantizer import IntegerQuantizer
from ..layout import Chunk, Lengths, World, balanced_chunks, consecutive_chunks
from ..pending import Steps
from ..plan import choose
from ..plan.choose import COPY
from ..plan.cost import Profile
from ..plan.plan import Plan, coders_of, make_plan, with_checksum
from ..plan.signature import reference_mismatch
from ..stats import UNKNOWN
from ..transports.base import Group, LibraryConnection
from ..transports.shared import Shared
from .compiled_plan import Buffers, Run

_COUNT = struct.Struct("<q")
_CHECKSUM = struct.Struct(">I")
_LARGEST = np.dtype(np.float64)

PlanSteps = Callable[[Plan, Buffers, Run], Steps]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a communicator, and its settings.

    Attributes
    ----------
    rank : int
        This rank.
    native : LibraryConnection or None
        MPI's own collectives, or a process group's.
    codec, tolerance, algorithm : Codec or None, float or None, str
        Defaults of the calls.
    profile : Profile
        Profile of the machines, the same on all ranks.
    world : World
        The ranks and their nodes.
    small : bytearray
        Memory where all ranks' small arrays arrive with the handshake.
    shared : Shared or None
        Memory that all ranks share.
    has_timeout : bool
        Whether no call may block in MPI, where a timeout has no effect.
    checksum : bool
        Whether wires carry checksums.
    blocks : bool
        Whether a test of a message waits until it completes.
    """

    rank: int
    native: LibraryConnection | None
    codec: Codec | None
    tolerance: float | None
    algorithm: str
    profile: Profile
    world: World
    small: bytearray
    shared: Shared | None
    has_timeout: bool
    checksum: bool
    blocks: bool


class PlannedSteps:
    """Creates the steps of plans, which run after the handshake.

    Parameters
    ----------
    device : HostDevice
        The buffers' device.
    ranks : Ranks
        The communicator's ranks and settings.
    """

    def __init__(self, device: HostDevice, ranks: Ranks) -> None:
        self._device = device
        self._ranks = ranks
        self._size = ranks.world.size
        self._steps_of: dict[str, PlanSteps] = {
            "allreduce": partial(self._reduction, self._allreduce),
            "reduce_scatter": partial(self._reduction, self._reduce_scatter),
            "allgather": partial(self._update, self._allgather),
            "allgatherv": self._allgatherv,
            "bcast": partial(self._update, self._bcast),
            "reduce": partial(self._reduction, self._reduce),
            "gather": self._gather,
            "scatter": self._scatter,
            "alltoall": self._alltoall,
            "alltoallv": self._alltoallv,
        }

    @property
    def _native(self) -> LibraryConnection:
        assert self._ranks.native is not None  # else no plan uses them
        return self._ranks.native

    def _reduction(self, steps: PlanSteps, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        """Run the steps of a reduction. If its codec needs it, the ranks first agree on their largest magnitude."""
        if plan.codec is None or not plan.codec.needs_largest:
            return steps(plan, buffers, run)
        return self._for_largest(steps, plan, buffers, run)

    def _for_largest(self, steps: PlanSteps, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        assert plan.codec is not None
        largest: float = yield from self._largest(plan, buffers, run)
        yield from steps(self._with_codec(plan, plan.codec.for_largest(largest)), buffers, run)

    def _largest(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        """Return the largest finite magnitude of all ranks' values."""
        return self._agree_on_largest(self._device.largest(buffers.x, plan.call.dtype), plan, run)

    def _agree_on_largest(self, own: float, plan: Plan, run: Run) -> Steps:
        largest = run.allocate(_LARGEST.itemsize).view(_LARGEST)
        largest[:] = own
        yield from self._add_numbers(run, plan.lengths.segment, "recursive_doubling", 0, largest, "max")
        return float(largest[0])

    def _update(self, steps: PlanSteps, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        """Run a collective. If its codec sends differences, the ranks first compare what these differ from."""
        if plan.codec is None or not plan.codec.needs_reference:
            return steps(plan, buffers, run)
        return self._for_equal_references(steps, plan, buffers, run)

    def _for_equal_references(self, steps: PlanSteps, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        own = _CHECKSUM.pack(self._device.crc32c(buffers.out))
        checksums: list[bytes] = yield from gather(run.group, own)
        if len(set(checksums)) > 1:
            raise reference_mismatch(plan.signature, checksums, self._ranks.rank)
        yield from steps(plan, buffers, run)

    def _with_codec(self, plan: Plan, codec: Codec) -> Plan:
        """Return the plan with another codec's coders."""
        return replace(plan, coders=coders_of(codec, plan.call, plan.setting))

    def _allreduce(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        if plan.algorithm in choose.SPARSE:
            return self._sparse_allreduce(plan, buffers, run)
        cut = partial(balanced_chunks, plan.call.n, lengths=plan.lengths)
        job = self._job(plan, buffers, run, cut(ALGORITHMS[plan.algorithm].parts(self._size)))
        job.cut = cut
        if plan.setting.streamed and plan.algorithm == choose.HIERARCHICAL:
            return sharded(job)
        return choose.ALLREDUCE[plan.algorithm](job)

    def _sparse_allreduce(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        assert plan.coders is not None and isinstance(plan.coders.coder, SparseCoder)
        own = self._ranks.native
        job = sparse.SparseJob(
            group=run.group,
            coder=plan.coders.coder,
            x=buffers.x,
            out=buffers.out,
            scale=plan.scale,
            feedback=buffers.feedback,
            allocate=run.allocate,
            stats=run.stats,
            block=max(plan.lengths.segment * buffers.x.itemsize // 4, 1),
            start=None if own is None else own.iallgatherv,
            ticket=run.ticket,
        )
        return sparse.allreduce(plan.algorithm, job, buffers.result)

    def _reduce_scatter(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        n = plan.call.n // self._size
        job = self._job(plan, buffers, run, self._equal(plan, n))
        job.operands.out.offset = self._ranks.rank * n
        return choose.REDUCE_SCATTER[plan.algorithm](job)

    def _allgather(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        job = self._job(plan, buffers, run, self._equal(plan, plan.call.n))
        job.operands.x.offset = self._ranks.rank * plan.call.n
        return choose.ALLGATHER[plan.algorithm](job)

    def _allgatherv(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        device, x = self._device, buffers.result
        packed = yield from gather(run.group, _COUNT.pack(x.shape[0]))
        rows = [_COUNT.unpack(own)[0] for own in packed]
        if min(rows) < 0:
            raise WireCorrupted(f"some rank announced a negative number of rows: {rows}")
        counts = [count * math.prod(x.shape[1:]) for count in rows]
        result = self._empty(buffers, run, (sum(rows), *x.shape[1:]))
        buffers = buffers._replace(out=device.flat(result, device.dtype_name(x)))
        plan = self._countable(plan, run, sum(counts), choose.RING)
        if plan.algorithm == choose.NATIVE:
            start = partial(self._native.iallgatherv, counts=counts)
            yield from native.move(start, buffers.x, buffers.out, run.ticket, run.stats)
        elif plan.algorithm == COPY:
            yield from self._copy(buffers, run)
        else:
            job = self._job(plan, buffers, run, consecutive_chunks(counts, plan.lengths))
            job.operands.x.offset = sum(counts[: self._ranks.rank])
            yield from choose.ALLGATHER[plan.algorithm](job)
        return result

    @staticmethod
    def _countable(plan: Plan, run: Run, most: int, instead: str) -> Plan:
        """Return the plan, or one by the algorithm ``instead`` if MPI cannot count the largest number of elements.

        No rank knew it before.
        """
        if plan.algorithm != choose.NATIVE or most <= native.MOST:
            return plan
        plan = make_plan(plan.call._replace(algorithm=instead, codec=None, tolerance=None), plan.setting)
        run.ticket.used, run.stats.algorithm = True, plan.algorithm
        return plan

    def _empty(self, buffers: Buffers, run: Run, shape: tuple[int, ...]) -> Array:
        """Return memory for a result whose shape was not known when the call was prepared."""
        return self._device.empty_like(buffers.result, shape)

    def _copy(self, buffers: Buffers, run: Run) -> Steps:
        self._device.copy(buffers.x, buffers.out)
        yield None

    def _bcast(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        job = self._job(plan, buffers, run, balanced_chunks(plan.call.n, 1, plan.lengths))
        job.group = Group(run.group.transport, run.group.tag, self._from_root(plan))
        return choose.BCAST[plan.algorithm](job)

    def _from_root(self, plan: Plan) -> list[int]:
        """Return the ranks in cyclic order, the root first."""
        assert plan.call.root is not None
        return [(plan.call.root + distance) % self._size for distance in range(self._size)]

    def _reduce(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        parts = ALGORITHMS[plan.algorithm].parts(self._size)
        job = self._job(plan, buffers, run, balanced_chunks(plan.call.n, parts, plan.lengths))
        job.group = Group(run.group.transport, run.group.tag, self._from_root(plan))
        return choose.REDUCE[plan.algorithm](job)

    def _gather(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        job = self._blocks_from_root(plan, buffers, run, plan.call.n)
        job.operands.x.offset = self._ranks.rank * plan.call.n
        return choose.GATHER[plan.algorithm](job)

    def _scatter(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        n = plan.call.n // self._size
        job = self._blocks_from_root(plan, buffers, run, n)
        job.operands.out.offset = self._ranks.rank * n
        return choose.SCATTER[plan.algorithm](job)

    def _blocks_from_root(self, plan: Plan, buffers: Buffers, run: Run, n: int) -> Job:
        """Return the job of a group whose rank 0 is the root. Each rank has its block of ``n`` elements."""
        blocks, ranks = self._equal(plan, n), self._from_root(plan)
        job = self._job(plan, buffers, run, [blocks[rank] for rank in ranks])
        job.group = Group(run.group.transport, run.group.tag, ranks)
        return job

    def _alltoall(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        job = self._job(plan, buffers, run, self._equal(plan, plan.call.n // self._size))
        return choose.ALLTOALL[plan.algorithm](job)

    def _alltoallv(self, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        device, x, counts = self._device, buffers.result, struct.Struct(f"<{self._size}q")
        packed = yield from gather(run.group, counts.pack(*buffers.counts))
        rows = [counts.unpack(each) for each in packed]  # by source and destination
        if min(map(min, rows)) < 0:
            raise WireCorrupted(f"some rank announced a negative number of rows: {rows}")
        width, rank = math.prod(x.shape[1:]), self._ranks.rank
        totals = (sum(each) for each in (*rows, *zip(*rows, strict=True)))
        plan = self._countable(plan, run, max(totals) * width, choose.PAIRWISE)
        arriving = [each[rank] for each in rows]
        result = self._empty(buffers, run, (sum(arriving), *x.shape[1:]))
        buffers = buffers._replace(out=device.flat(result, device.dtype_name(x)))
        sent, received = ([count * width for count in each] for each in (buffers.counts, arriving))
        if plan.algorithm == choose.NATIVE:
            start = partial(self._native.ialltoallv, sent=sent, received=received)
            yield from native.move(start, buffers.x, buffers.out, run.ticket, run.stats)
        elif plan.algorithm == COPY:
            yield from self._copy(buffers, run)
        else:
            job = self._job(plan, buffers, run, consecutive_chunks(sent, plan.lengths))
            job.arriving = consecutive_chunks(received, plan.lengths)
            yield from choose.ALLTOALLV[plan.algorithm](job)
        return result

    def _add(self, quantizer: IntegerQuantizer, plan: Plan, buffers: Buffers, run: Run) -> Steps:
        """Run an allreduce of a quantizer's integers."""
        x, agree = buffers.x, partial(self._add_numbers, run, plan.lengths.segment, "recursive_doubling", 0)
        if plan.gathers:
            yield from additive.gathered_votes(
                *(x, buffers.out, quantizer.gathered, self._ranks.rank, self._size),
                agree=agree,
                gather=partial(self._gather_rows, run, plan, x.nbytes),
                allocate=run.allocate,
            )
            return
        yield from additive.allreduce(
            x,
            buffers.out,
            plan.scale,
            buffers.residual,
            quantizer,
            agree=agree,
            add=partial(self._add_numbers, run, plan.lengths.segment, plan.algorithm, x.itemsize / quantizer.per_value),
            allocate=run.allocate,
            timeline=run.timeline,
        )
        if plan.algorithm == choose.NATIVE:  # MPI sent the numbers, and does not report their bytes
            run.stats.wire_nbytes, run.stats.raw_sent_nbytes = UNKNOWN, 0

    def _add_numbers(self, run: Run, segment: int, algorithm: str, raw_nbytes: float, numbers: Array, op: str) -> Steps:
        """Reduce numbers in place. Each of them encodes ``raw_nbytes`` bytes of values."""
        device = self._device
        if self._size == 1:
            return _nothing()
        if algorithm == choose.NATIVE:
            return self._numbers_by_mpi(run, numbers, op)
        coder: Coder = device.number_coder(numbers, op)
        if self._ranks.checksum:
            coder = with_checksum(coder, device)

        cut = partial(balanced_chunks, numbers.size, lengths=Lengths(1, segment))
        chunks, window = cut(ALGORITHMS[algorithm].parts(self._size)), Window(numbers)
        operands = Operands(window, window, itemsize=raw_nbytes)
        job = Job(run.group, Coders(coder, coder), operands, chunks, run.allocate, run.stats, run.timeline, cut)
        return choose.ALLREDUCE[algorithm](job)

    def _gather_rows(self, run: Run, plan: Plan, raw_nbytes: int, rows: Array) -> Steps:
        """Gather all ranks' rows of bytes in place. This replaces an allreduce of ``raw_nbytes`` bytes."""
        everybody, nbytes = rows.reshape(-1), rows.shape[1]
        coder: Coder = self._device.number_coder(everybody, "sum")
        if self._ranks.checksum:
            coder = with_checksum(coder, self._device)
        begin = self._ranks.rank * nbytes
        own = Window(everybody[begin : begin + nbytes], begin)
        operands = Operands(own, Window(everybody), itemsize=2 * raw_nbytes / max(everybody.size, 1))
        chunks = consecutive_chunks([nbytes] * self._size, Lengths(1, plan.lengths.segment))
        job = Job(run.group, Coders(coder, coder), operands, chunks, run.allocate, run.stats, run.timeline)
        return choose.ALLGATHER[plan.algorithm](job)

    def _numbers_by_mpi(self, run: Run, numbers: Array, op: str) -> Steps:
        start = self._native.reductions("allreduce", op)[1]
        return native.move(start, numbers, numbers, run.ticket, run.stats)

    def _equal(self, plan: Plan, n: int) -> tuple[Chunk, ...]:
        return consecutive_chunks([n] * self._size, plan.lengths)

    def _job(self, plan: Plan, buffers: Buffers, run: Run, chunks: Sequence[Chunk]) -> Job:
        assert plan.coders is not None
        operands = Operands(
            x=Window(buffers.x),
            out=Window(buffers.out),
            itemsize=buffers.x.itemsize,
            scale=plan.scale,
            residual=None if buffers.residual is None else Window(buffers.residual),
            rng_counter=run.number % 2**32 << 32 | self._ranks.rank,
        )
        return Job(
            *(run.group, plan.coders, operands, chunks, run.allocate, run.stats, run.timeline),
            homomorphic=plan.homomorphic,
        )


def _nothing() -> Steps:
    """Return a generator without steps."""
    yield from ()
