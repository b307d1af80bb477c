"""The collectives that reduce, by MPI or compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from logging import getLogger
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceOptions,
    ReduceScatterOptions,
)
from torch.distributed import ReduceOp

from ...algorithms.dissemination import surely_small
from ...algorithms.shared_memory import STREAMED_NBYTES
from ...codecs.base import Codec
from ...collectives.call import operation_name
from ...collectives.choose import AUTO, DISSEMINATION, NAMES
from ...collectives.signature import Signature
from ...devices.host import HostDevice
from ...errors import InvalidBuffer, UnsupportedDType
from ...stats import Stats
from ...transports.library import MPI
from ..arrays import Array, GPUArrays, gpu_can_encode
from ..buffers import (
    COMPRESSIBLE,
    Packed,
    array_of,
    check,
    compressible,
    nbytes_of,
    on_host,
    overlap,
)
from ..options import Options
from ..streams import StreamOrder
from .channel import Channel, Collective, signature
from .collectives import Collectives, only, same_type, sizes_of
from .data_movement import gather_shares
from .mpi_buffers import BufferSpec, elements_of
from .operations import ReduceOperation, reduce_into, reduce_operation

_log = getLogger("compcoll.torch")


class Coding(NamedTuple):
    """The way in which compcoll's communicator reduces.

    Attributes
    ----------
    op : str
        The reduction.
    codec : Codec or None
        What compresses, if it pays.
    algorithm : str
        As in `compcoll.allreduce`.
    """

    op: str
    codec: Codec | None
    algorithm: str


class AllreducePlan(NamedTuple):
    """The way in which equal allreduces run.

    Attributes
    ----------
    operation : ReduceOperation
        What is done, but for the factor.
    coding : Coding or None
        How compcoll's communicator does it; None where MPI does.
    signature : Signature or None
        What ranks tell each other before MPI's; the communicator has its own.
    direct : bool
        Whether nothing but MPI, and GPUs, touch elements, which may be in a GPU's memory.
    """

    operation: ReduceOperation
    coding: Coding | None
    signature: Signature | None
    direct: bool


class Reductions(Collectives):
    """Prepares reductions.

    Parameters
    ----------
    channel : Channel
        Between the ranks.
    options : Options
        What is compressed.
    """

    def __init__(self, channel: Channel, options: Options) -> None:
        super().__init__(channel)
        self._communicator = channel.communicator
        self._options = options
        self._plan = lru_cache(maxsize=4096)(self._find_plan)
        self._gpu: GPUArrays | None = None
        self._stats: Stats | None = None
        self._stats_are_due = False
        self._codec_ran = options.codec is None
        self._tried: set[tuple[object, ...]] = set()

    @property
    def stats(self) -> Stats | None:
        """Account of the last collective that might be compressed, or went through shared memory; None before it."""
        if self._stats_are_due:
            self._stats, self._stats_are_due = self._communicator.stats, False
        return self._stats

    def tell_unused_codec(self) -> None:
        """Log one line if a codec was asked for, and no collective was compressed."""
        if self._codec_ran or self.rank != 0:
            return
        self._codec_ran = True
        options = self._options
        if not self._tried:
            why = f"no sum or mean of floating-point elements had {options.min_bytes} bytes (min_bytes=) or more"
        else:
            went = "" if self.stats is None else f" (the last went by {self.stats.algorithm})"
            why = (
                f"it would not have paid for any all_reduce or reduce_scatter{went}: with an algorithm=, such as "
                "'ring', it is used whether it pays or not"
            )
        _log.warning("%r was never used: %s", options.codec, why)

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions) -> Collective:
        tensor, op = only(tensors), opts.reduceOp
        if not on_host(tensor):
            if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
                return self._sparse_allreduce(tensor, op)
            plan = self._plan(op, same_type(tensors), tensor.numel())
            order = self._order_there(op, tensors) or self.ordered(tensors, direct=plan.direct)
            return Collective(partial(self._allreduce_packed, tensors, plan), tensors, plan.signature, order)
        plan = self._plan(op, tensor.dtype, tensor.numel())
        if not tensor.is_contiguous():
            return Collective(partial(self._allreduce_packed, tensors, plan), tensors, plan.signature)
        if plan.coding is None and plan.operation.by_mpi:
            whole = self.comm.Allreduce
            run = partial(whole, MPI.IN_PLACE, elements_of(tensor), plan.operation.operation)
            return Collective(run, tensors, plan.signature)
        if plan.operation.scaled:
            plan = plan._replace(operation=reduce_operation(op, tensor.dtype))
        return Collective(partial(self._allreduce, tensor, plan), tensors, plan.signature)

    def _order_there(self, op: ReduceOp, given: Sequence[Tensor], results: Sequence[Tensor] = ()) -> StreamOrder | None:
        """Find the order of sums that a GPU compresses; None of what does not go so."""
        tensors = [*given, *results]
        if all(map(on_host, tensors)):
            return None
        if not all(isinstance(x, Tensor) and x.is_cuda and x.layout is torch.strided for x in tensors):
            return None
        coded = all(self._compress(x.dtype, reduce_operation(op, x.dtype), nbytes_of(x)) for x in given)
        if not coded or not gpu_can_encode():
            return None
        if self._gpu is None:
            self._gpu = GPUArrays(given[0].device)
        # A communicator uses one GPU.
        return self._gpu.ordered(*tensors) if {x.device for x in tensors} == {self._gpu.device} else None

    def _find_plan(self, op: ReduceOp, dtype: torch.dtype, count: int) -> AllreducePlan:
        operation = reduce_operation(op, dtype)
        coding = self._coding(dtype, operation, count * dtype.itemsize) or self._small(dtype, operation, count)
        call = None if coding else signature("allreduce of", count, dtype, operation.name)
        return AllreducePlan(operation, coding, call, operation.as_given and coding is None)

    def _small(self, dtype: torch.dtype, operation: ReduceOperation, count: int) -> Coding | None:
        """Find out how arrays are reduced that are small enough to travel along with the handshake."""
        if self.size < 2 or not operation.by_mpi or not 0 < count * dtype.itemsize <= surely_small(self.size):
            return None
        name = "uint8" if dtype is torch.bool else str(dtype).removeprefix("torch.")
        op = operation_name(operation.operation)
        return Coding(op, None, DISSEMINATION) if HostDevice.gathers(name, op) else None

    def _coding(self, dtype: torch.dtype, operation: ReduceOperation, nbytes: int) -> Coding | None:
        """Find out how what may be compressed, or go through shared memory, is reduced."""
        op, options = "mean" if operation.mean else "sum", self._options
        if self._compress(dtype, operation, nbytes):
            return Coding(op, options.codec, options.algorithm)
        # Inside a node the communicator mostly chooses shared memory.
        large = self.channel.one_node and nbytes >= STREAMED_NBYTES
        if large and operation.linear and dtype in (torch.float32, torch.float64):
            return Coding(op, None, AUTO)
        return None

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions) -> Collective:
        dtype = same_type(tensors)
        operation = reduce_operation(opts.reduceOp, dtype)
        coding = self._coding(dtype, operation, sum(map(nbytes_of, tensors)))
        order = self.ordered(tensors, direct=operation.as_given and coding is None)
        call = signature("allreduce_coalesced of", sizes_of(tensors), dtype, operation.name, coding)
        run = partial(self._allreduce_packed, tensors, AllreducePlan(operation, coding, None, direct=False))
        if coding is not None:
            return Collective(partial(self._run_by_communicator, call, run), tensors, None, order)
        return Collective(run, tensors, call, order)

    def _run_by_communicator(self, call: Signature, run: Callable[[], None]) -> None:
        """Have the communicator run a coalesced call, of which all ranks know more than its own handshakes tell."""
        self.channel.handshake(call)
        run()

    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions) -> Collective:
        tensor = only(tensors)
        operation, root = reduce_operation(opts.reduceOp, same_type(tensors)), self.root(opts.rootRank)
        order = self.ordered(tensors, direct=operation.as_given)
        call = signature("reduce of", tensor.numel(), tensor.dtype, operation.name, "to", root)

        def run() -> None:
            packed = Packed([tensor], filled=True)
            if self.rank != root:
                nothing = packed.memory.new_empty(0)
                to_root = lambda out, into, op: self.comm.Reduce(out, None, op, root)  # noqa: E731
                reduce_into(packed.memory, nothing, operation, self.size, to_root)
                return
            in_place = lambda out, into, op: self.comm.Reduce(MPI.IN_PLACE, into, op, root)  # noqa: E731
            reduce_into(packed.memory, packed.memory, operation, self.size, in_place)
            packed.unpack()

        return Collective(run, tensors, call, order)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ReduceScatterOptions
    ) -> Collective:
        output, parts = only(outputs), only(inputs)
        self.one_each(parts, "reduce_scatter's input list")
        dtype = same_type([output, *parts])
        sizes = sizes_of(parts)
        if output.numel() != sizes[self.rank]:
            raise InvalidBuffer(
                f"reduce_scatter: the output has {output.numel()} elements, input {self.rank} has {sizes[self.rank]}"
            )
        operation = reduce_operation(opts.reduceOp, dtype)
        even = len(set(sizes)) == 1
        compress = even and self._compress(dtype, operation, sum(sizes) * output.element_size())
        order = self.ordered([output, *parts], direct=operation.as_given and not compress)
        call = None if compress else signature("reduce_scatter of", sizes, dtype, operation.name)

        def run() -> None:
            source, target = Packed(parts, filled=True), Packed([output], filled=False)
            self._reduce_scatter(source.memory, target.memory, operation, compress, None if even else sizes)
            target.unpack()

        return Collective(run, outputs, call, order)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: ReduceScatterOptions) -> Collective:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: ReduceScatterOptions
    ) -> Collective:
        op = opts.reduceOp
        dtype = same_type([*outputs, *inputs])
        for output, source in zip(outputs, inputs, strict=True):
            if source.numel() != output.numel() * self.size:
                raise InvalidBuffer(
                    "reduce_scatter: input tensor must be the same size as output size times world size: "
                    f"{source.numel()} elements are not {self.size} x {output.numel()}"
                )
        operation = reduce_operation(op, dtype)
        compress = [self._compress(dtype, operation, nbytes_of(source)) for source in inputs]
        direct = operation.as_given and not any(compress)
        order = self._order_there(op, inputs, outputs) or self.ordered([*outputs, *inputs], direct=direct)
        call = signature("reduce_scatter_single of", sizes_of(inputs), dtype, operation.name, tuple(compress))

        def run() -> None:
            for output, tensor, compressed in zip(outputs, inputs, compress, strict=True):
                source, target = Packed([tensor], filled=True), Packed([output], filled=False)
                self._reduce_scatter(source.memory, target.memory, operation, compressed, None)
                target.unpack()

        if compress == [True]:
            return Collective(run, outputs, None, order)
        if all(compress):
            return Collective(partial(self._run_by_communicator, call, run), outputs, None, order)
        return Collective(run, outputs, call, order)

    def _sparse_allreduce(self, tensor: Tensor, op: ReduceOp) -> Collective:
        if tensor.device.type != "cpu":
            check(tensor)
        operation = reduce_operation(op, tensor.dtype)
        if operation.name != "SUM" or not compressible(tensor):
            raise UnsupportedDType(
                f"{operation.name} of sparse {tensor.dtype}: sums of floating-point elements are known"
            )

        def run() -> None:
            own = tensor.detach().coalesce()
            counted = np.empty(self.size, np.int64)
            self.comm.Allgather(np.array([own._nnz()], np.int64), counted)
            counts, dimensions, row = counted.tolist(), own.sparse_dim(), own.shape[own.sparse_dim() :]
            indices = own.indices().new_empty((sum(counts), dimensions))
            values = own.values().new_empty((sum(counts), *row))
            gather_shares(self.comm, own.indices().t().contiguous(), indices, [n * dimensions for n in counts])
            gather_shares(self.comm, own.values().contiguous(), values, [n * row.numel() for n in counts])
            with torch.no_grad():
                tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, own.shape).coalesce())

        shape = "x".join(map(str, tensor.shape))
        return Collective(run, [tensor], signature("allreduce of sparse", shape, tensor.dtype))

    def _allreduce(self, memory: Tensor, plan: AllreducePlan) -> None:
        if plan.coding is None:
            reduce_into(memory, memory, plan.operation, self.size, self._in_place)
            return
        small = plan.coding.algorithm is DISSEMINATION
        if small and self._stats_are_due:
            self._stats, self._stats_are_due = self._communicator.stats, False
        op, codec, algorithm = plan.coding
        x = _array_of(memory)
        self._communicator.allreduce(x, op=op, out=x, codec=codec, algorithm=algorithm, timeout=self.channel.limit)
        if not small:
            self._ended("allreduce", x, codec)

    def _ended(self, collective: str, x: Array, codec: Codec | None) -> None:
        """Note that a collective that may be compressed has ended."""
        self._stats_are_due = True
        key = collective, x.dtype, x.shape
        if codec is not None and not self._codec_ran and key not in self._tried:
            self._tried.add(key)
            self._codec_ran = self.stats is not None and self.stats.codec is not None

    def _in_place(self, outgoing: BufferSpec, incoming: BufferSpec, operation: MPI.Op) -> None:
        self.comm.Allreduce(MPI.IN_PLACE, incoming, operation)

    def _scatter_blocks(self, outgoing: BufferSpec, incoming: BufferSpec, operation: MPI.Op) -> None:
        memory, _, kind = outgoing
        self.comm.Reduce_scatter_block((memory, incoming[1], kind), incoming, operation)

    def _allreduce_packed(self, tensors: Sequence[Tensor], plan: AllreducePlan) -> None:
        packed = Packed(tensors, filled=True)
        self._allreduce(packed.memory, plan)
        packed.unpack()

    def _reduce_scatter(
        self, source: Tensor, target: Tensor, operation: ReduceOperation, compress: bool, sizes: Sequence[int] | None
    ) -> None:
        result = torch.empty_like(target) if overlap(source, target) else target
        if compress:
            x, out = _array_of(source).reshape(self.size, -1), _array_of(result).reshape(1, -1)
            op, options = "mean" if operation.mean else "sum", self._options
            algorithm = options.algorithm if options.algorithm in NAMES["reduce_scatter"] else AUTO
            self._communicator.reduce_scatter(
                x, op=op, out=out, codec=options.codec, algorithm=algorithm, timeout=self.channel.limit
            )
            self._ended("reduce_scatter", x, options.codec)
        elif sizes is None:
            reduce_into(source, result, operation, self.size, self._scatter_blocks)
        else:
            scatter = self.comm.Reduce_scatter
            uneven = lambda out, into, op: scatter(out, into, sizes, op)  # noqa: E731
            reduce_into(source, result, operation, self.size, uneven)
        if result is not target:
            target.copy_(result)

    def _compress(self, dtype: torch.dtype, operation: ReduceOperation, nbytes: int) -> bool:
        options = self._options
        if options.codec is None or self.size == 1:
            return False
        return nbytes >= max(options.min_bytes, 1) and operation.linear and dtype in COMPRESSIBLE


def _array_of(memory: Tensor) -> Array:
    """View contiguous memory as a communicator takes it."""
    return memory if memory.is_cuda else array_of(memory)
