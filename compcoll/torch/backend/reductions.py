"""Collectives that reduce: MPI's, and compcoll's, which may compress."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from logging import getLogger
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import AllreduceCoalescedOptions, AllreduceOptions, ReduceOp, ReduceOptions, ReduceScatterOptions

from ...algorithms.dissemination import surely_small
from ...algorithms.shared_memory import STREAMED_NBYTES
from ...codecs.base import Codec
from ...errors import InvalidBuffer, UnsupportedDType
from ...kernels._host import Gathered
from ...plan.call import operation_name
from ...plan.choose import AUTO, DISSEMINATION, NAMES
from ...plan.signature import Signature
from ...stats import Stats
from ...transports.library import MPI
from ..buffers import COMPRESSIBLE, array_of, check, gpu_can_encode, nbytes_of, on_host, overlap
from ..options import Options
from ..streams import StreamOrder
from .channel import Channel, Collective, signature
from .collectives import Collectives, gather_shares, only, same_type, sizes_of
from .gpu import gpu_of, packed
from .operations import BufferSpec, ReduceOperation, elements_of, reduce_into, reduce_operation

_log = getLogger("compcoll.torch")


class Plan(NamedTuple):
    """How allreduces of one operation, element type and size run.

    Attributes
    ----------
    operation : ReduceOperation
        The reduction operation.
    op : str
        Its name as ``op=`` of compcoll's communicator; empty if MPI reduces.
    codec : Codec or None
        ``codec=`` of the communicator's allreduce. ``algorithm="auto"`` uses the codec only if it saves time.
    algorithm : str
        ``algorithm=`` of the communicator's allreduce.
    """

    operation: ReduceOperation
    op: str = ""
    codec: Codec | None = None
    algorithm: str = AUTO

    @property
    def direct(self) -> bool:
        """Whether only MPI and GPUs access the elements. A GPU-aware MPI then needs no copies in host memory."""
        return self.operation.as_given and not self.op


class Reductions(Collectives):
    """Prepares reductions.

    Parameters
    ----------
    channel : Channel
        Channel between the ranks.
    options : Options
        What to compress.

    Attributes
    ----------
    stats : Stats or None
        Statistics of the last collective that might be compressed, or used shared memory; None before the first.
    """

    stats: Stats | None = None

    def __init__(self, channel: Channel, options: Options) -> None:
        super().__init__(channel)
        self._communicator = channel.communicator
        self._options = options
        self._plan = lru_cache(maxsize=4096)(self._find_plan)
        self._gpu: torch.device | None = None
        self._codec_tried = self._codec_ran = False

    def log_unused_codec(self) -> None:
        """Log one line on rank 0 if a codec was requested, but no collective was compressed."""
        options = self._options
        if options.codec is None or self._codec_ran or self.rank != 0:
            return
        if not self._codec_tried:
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
        host = on_host(tensor)
        if not host and isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            return self._sparse_allreduce(tensor, op)
        plan, call = self._plan(op, tensor.dtype if host else same_type(tensors), tensor.numel())
        if plan.operation.scaled:  # the cached plan serves all factors
            plan = plan._replace(operation=reduce_operation(op, tensor.dtype))
        if not (host and tensor.is_contiguous()):
            order = None if host else self._order(tensors, coded=plan.codec is not None, direct=plan.direct)
            return Collective(partial(self._allreduce_packed, order, tensors, plan), tensors, call, order)
        if plan.op or not plan.operation.by_mpi:
            return Collective(partial(self._allreduce, tensor, plan), tensors, call)
        run = partial(self.comm.Allreduce, MPI.IN_PLACE, elements_of(tensor), plan.operation.operation)
        return Collective(run, tensors, call)

    def _order(self, tensors: Sequence[Tensor], *, coded: bool, direct: bool) -> StreamOrder | None:
        """Return the stream order of a call on GPU tensors; None for tensors in host memory.

        Tensors on the first GPU that was used are compressed there, if codecs can run on it: the communicator works on
        one GPU. Tensors on other GPUs are compressed in host memory.
        """
        if coded and not all(map(on_host, tensors)) and gpu_can_encode():
            gpu = gpu_of(tensors)
            self._gpu = self._gpu or gpu
            if self._gpu == gpu:
                return self._streams.order(*tensors)
        return self.ordered(tensors, direct=direct)

    def _find_plan(self, op: ReduceOp, dtype: torch.dtype, count: int) -> tuple[Plan, Signature | None]:
        """Return the plan of an allreduce, and its signature, or None if the communicator makes the handshake."""
        plan = self._plan_of(reduce_operation(op, dtype), dtype, count * dtype.itemsize)
        small = self.size > 1 and plan.operation.by_mpi and 0 < count * dtype.itemsize <= surely_small(self.size)
        if not plan.op and small:  # the handshake's messages carry the values
            name = "uint8" if dtype is torch.bool else str(dtype).removeprefix("torch.")
            op_name = operation_name(plan.operation.operation)
            if Gathered.reducible(name, op_name):
                plan = Plan(plan.operation, op_name, None, DISSEMINATION)
        return plan, None if plan.op else signature("allreduce of", count, dtype, plan.operation.name)

    def _plan_of(self, operation: ReduceOperation, dtype: torch.dtype, nbytes: int) -> Plan:
        """Return the plan of a reduction: compcoll's communicator runs it if compression or shared memory may help."""
        options = self._options
        if self._compress(dtype, operation, nbytes):
            return Plan(operation, operation.linear, options.codec, options.algorithm)
        # For large buffers in one node the communicator mostly chooses shared memory.
        large = self.channel.one_node and nbytes >= STREAMED_NBYTES
        if large and operation.linear and dtype in (torch.float32, torch.float64):
            return Plan(operation, operation.linear)
        return Plan(operation)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions) -> Collective:
        dtype = same_type(tensors)
        plan = self._plan_of(reduce_operation(opts.reduceOp, dtype), dtype, sum(map(nbytes_of, tensors)))
        order = self.ordered(tensors, direct=plan.direct)
        call = signature("allreduce_coalesced of", sizes_of(tensors), dtype, plan.operation.name, plan[1:])
        run = partial(self._allreduce_packed, order, tensors, plan)
        return Collective(run, tensors, call, order, blocks=not plan.op)

    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions) -> Collective:
        tensor = only(tensors)
        operation, root = reduce_operation(opts.reduceOp, same_type(tensors)), self.root(opts.rootRank)
        order = self.ordered(tensors, direct=operation.as_given)
        call = signature("reduce of", tensor.numel(), tensor.dtype, operation.name, "to", root)

        def run() -> None:
            whole = packed(order, [tensor], filled=True)
            if self.rank != root:
                nothing = whole.memory.new_empty(0)
                to_root = lambda out, into, op: self.comm.Reduce(out, None, op, root)  # noqa: E731
                reduce_into(whole.memory, nothing, operation, self.size, to_root)
                return
            in_place = lambda out, into, op: self.comm.Reduce(MPI.IN_PLACE, into, op, root)  # noqa: E731
            reduce_into(whole.memory, whole.memory, operation, self.size, in_place)
            whole.unpack()

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
        run = partial(self._reduce_scatter, order, parts, output, operation, compress, None if even else sizes)
        return Collective(run, outputs, call, order)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: ReduceScatterOptions) -> Collective:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: ReduceScatterOptions
    ) -> Collective:
        dtype = same_type([*outputs, *inputs])
        for output, source in zip(outputs, inputs, strict=True):
            if source.numel() != output.numel() * self.size:
                raise InvalidBuffer(
                    "reduce_scatter: input tensor must be the same size as output size times world size: "
                    f"{source.numel()} elements are not {self.size} x {output.numel()}"
                )
        operation = reduce_operation(opts.reduceOp, dtype)
        compress = [self._compress(dtype, operation, nbytes_of(source)) for source in inputs]
        direct = operation.as_given and not any(compress)
        order = self._order([*inputs, *outputs], coded=all(compress), direct=direct)
        call = signature("reduce_scatter_single of", sizes_of(inputs), dtype, operation.name, tuple(compress))

        def run() -> None:
            for output, source, compressed in zip(outputs, inputs, compress, strict=True):
                self._reduce_scatter(order, [source], output, operation, compressed)

        return Collective(run, outputs, None if compress == [True] else call, order, blocks=not all(compress))

    def _sparse_allreduce(self, tensor: Tensor, op: ReduceOp) -> Collective:
        if tensor.device.type != "cpu":
            check(tensor)
        operation = reduce_operation(op, tensor.dtype)
        if operation.name != "SUM" or tensor.dtype not in COMPRESSIBLE:
            raise UnsupportedDType(
                f"{operation.name} of a sparse {tensor.dtype} tensor: only SUM of floating-point elements is supported"
            )

        def run() -> None:
            own = tensor.detach().coalesce()
            counted = np.empty(self.size, np.int64)
            self.comm.Allgather(np.array([own.indices().shape[1]], np.int64), counted)
            counts, dimensions, row = counted.tolist(), own.sparse_dim(), own.shape[own.sparse_dim() :]
            indices = own.indices().new_empty((sum(counts), dimensions))
            values = own.values().new_empty((sum(counts), *row))
            gather_shares(self.comm, own.indices().t().contiguous(), indices, [n * dimensions for n in counts])
            gather_shares(self.comm, own.values().contiguous(), values, [n * row.numel() for n in counts])
            with torch.no_grad():
                tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, own.shape).coalesce())

        shape = "x".join(map(str, tensor.shape))
        return Collective(run, [tensor], signature("allreduce of sparse", shape, tensor.dtype))

    def _allreduce(self, memory: Tensor, plan: Plan) -> None:
        operation, op, codec, algorithm = plan
        if not op:
            reduce_into(memory, memory, operation, self.size, self._in_place)
            return
        x = array_of(memory)
        self._communicator.allreduce(x, op=op, out=x, codec=codec, algorithm=algorithm, timeout=self.channel.limit)
        if algorithm is not DISSEMINATION:
            self._note(codec)

    def _note(self, codec: Codec | None) -> None:
        """Record the statistics of the communicator's last collective, and whether it used a codec."""
        self.stats = self._communicator.stats
        self._codec_tried = self._codec_tried or codec is not None
        self._codec_ran = self._codec_ran or (self.stats is not None and self.stats.codec is not None)

    def _in_place(self, outgoing: BufferSpec, incoming: BufferSpec, operation: MPI.Op) -> None:
        self.comm.Allreduce(MPI.IN_PLACE, incoming, operation)

    def _allreduce_packed(self, order: StreamOrder | None, tensors: Sequence[Tensor], plan: Plan) -> None:
        whole = packed(order, tensors, filled=True)
        self._allreduce(whole.memory, plan)
        whole.unpack()

    def _reduce_scatter(
        self,
        order: StreamOrder | None,
        parts: Sequence[Tensor],
        output: Tensor,
        operation: ReduceOperation,
        compress: bool,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Reduce the parts of all ranks into this rank's output. Parts are equally large unless `sizes` is given."""
        source, target = packed(order, parts, filled=True).memory, packed(order, [output], filled=False)
        result = torch.empty_like(target.memory) if overlap(source, target.memory) else target.memory
        if compress:
            x, out = array_of(source).reshape(self.size, -1), array_of(result).reshape(1, -1)
            options, op = self._options, operation.linear
            algorithm = options.algorithm if options.algorithm in NAMES["reduce_scatter"] else AUTO
            self._communicator.reduce_scatter(
                x, op=op, out=out, codec=options.codec, algorithm=algorithm, timeout=self.channel.limit
            )
            self._note(options.codec)
        elif sizes is None:
            block = lambda out, into, op: self.comm.Reduce_scatter_block((out[0], into[1], out[2]), into, op)  # noqa: E731
            reduce_into(source, result, operation, self.size, block)
        else:
            uneven = lambda out, into, op: self.comm.Reduce_scatter(out, into, sizes, op)  # noqa: E731
            reduce_into(source, result, operation, self.size, uneven)
        if result is not target.memory:
            target.memory.copy_(result)
        target.unpack()

    def _compress(self, dtype: torch.dtype, operation: ReduceOperation, nbytes: int) -> bool:
        options = self._options
        if options.codec is None or self.size == 1:
            return False
        return nbytes >= max(options.min_bytes, 1) and operation.linear != "" and dtype in COMPRESSIBLE
