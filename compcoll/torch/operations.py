"""The collectives of a process group: arguments checked, then what will run.

Every method returns a `Prepared`. Checks are made in the caller's thread; memory is only touched when the job runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from ..communicator import Communicator
from ..errors import InvalidArgument, InvalidBuffer, UnsupportedDType
from ..stats import Stats
from .buffers import (
    Message,
    Packed,
    Reduction,
    array_of,
    bytes_of,
    check,
    compressible,
    nbytes_of,
    overlap,
    reduce_into,
    reduction_of,
    split_counts,
)
from .channel import Call, Channel, call
from .options import Options


class Prepared(NamedTuple):
    """A collective whose arguments are checked.

    Attributes
    ----------
    call : Call
        What all ranks must have.
    run : callable
        Does it, once all have agreed.
    value : object
        Of the future.
    """

    call: Call
    run: Callable[[], Any]
    value: Any


class Operations:
    """Prepares collectives.

    Parameters
    ----------
    channel : Channel
        Between the ranks.
    options : Options
        What is compressed.
    """

    def __init__(self, channel: Channel, options: Options) -> None:
        self._channel = channel
        self._comm = channel.comm
        self._rank, self._size = channel.rank, channel.size
        self._options = options
        self._compressing: Communicator | None = None

    @property
    def stats(self) -> Stats | None:
        """Of the compressed collective that ended last."""
        return None if self._compressing is None else self._compressing.stats

    def free(self) -> None:
        if self._compressing is not None and self._channel.broken is None:
            self._compressing.free()
        self._compressing = None

    # Reductions

    def allreduce(self, tensors: Sequence[Tensor], op: Any) -> Prepared:
        tensor = _only(tensors)
        if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            return self._sparse_allreduce(tensor, op)
        check(tensor)
        reduction = reduction_of(op, tensor.dtype)
        compress = self._compress(tensor, reduction)
        what = call("allreduce of", tensor.numel(), tensor.dtype, reduction.name, compress)
        if tensor.is_contiguous():
            memory = tensor.detach()
            return Prepared(what, lambda: self._allreduce(memory, reduction, compress), tensors)
        return Prepared(what, lambda: self._allreduce_packed([tensor], reduction, compress), tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], op: Any) -> Prepared:
        dtype = _same_type(tensors)
        reduction = reduction_of(op, dtype)
        nbytes = sum(map(nbytes_of, tensors))
        compress = self._compress(tensors[0], reduction, nbytes)
        what = call("allreduce_coalesced of", _sizes(tensors), dtype, reduction.name, compress)
        return Prepared(what, lambda: self._allreduce_packed(tensors, reduction, compress), tensors)

    def reduce(self, tensors: Sequence[Tensor], op: Any, root: int) -> Prepared:
        tensor = _only(tensors)
        check(tensor)
        reduction, root = reduction_of(op, tensor.dtype), self._root(root)
        what = call("reduce of", tensor.numel(), tensor.dtype, reduction.name, "to", root)

        def run() -> None:
            packed = Packed([tensor], filled=True)
            if self._rank != root:
                nothing = packed.memory.new_empty(0)
                to_root = lambda out, into, op: self._comm.Reduce(out, None, op, root)  # noqa: E731
                reduce_into(packed.memory, nothing, reduction, self._size, to_root)
                return
            in_place = lambda out, into, op: self._comm.Reduce(MPI.IN_PLACE, into, op, root)  # noqa: E731
            reduce_into(packed.memory, packed.memory, reduction, self._size, in_place)
            packed.unpack()

        return Prepared(what, run, tensors)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: Any) -> Prepared:
        output, parts = _only(outputs), _only(inputs)
        self._one_each(parts, "reduce_scatter's input list")
        dtype = _same_type([output, *parts])
        sizes = _sizes(parts)
        if output.numel() != sizes[self._rank]:
            raise InvalidBuffer(
                f"reduce_scatter: the output has {output.numel()} elements, input {self._rank} has {sizes[self._rank]}"
            )
        reduction = reduction_of(op, dtype)
        even = len(set(sizes)) == 1
        compress = even and self._compress(output, reduction, sum(sizes) * output.element_size())
        what = call("reduce_scatter of", sizes, dtype, reduction.name, compress)

        def run() -> None:
            source, target = Packed(parts, filled=True), Packed([output], filled=False)
            self._reduce_scatter(source.memory, target.memory, reduction, compress, None if even else sizes)
            target.unpack()

        return Prepared(what, run, outputs)

    def reduce_scatter_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any) -> Prepared:
        """Of one tensor, or of several in a coalesced call."""
        dtype = _same_type([*outputs, *inputs])
        for output, source in zip(outputs, inputs, strict=True):
            if source.numel() != output.numel() * self._size:
                raise InvalidBuffer(
                    "reduce_scatter: input tensor must be the same size as output size times world size: "
                    f"{source.numel()} elements are not {self._size} x {output.numel()}"
                )
        reduction = reduction_of(op, dtype)
        compress = [self._compress(source, reduction) for source in inputs]
        what = call("reduce_scatter_single of", _sizes(inputs), dtype, reduction.name, any(compress))

        def run() -> None:
            for output, tensor, compressed in zip(outputs, inputs, compress, strict=True):
                source, target = Packed([tensor], filled=True), Packed([output], filled=False)
                self._reduce_scatter(source.memory, target.memory, reduction, compressed, None)
                target.unpack()

        return Prepared(what, run, outputs)

    # Moving elements as they are

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> Prepared:
        tensor = _only(tensors)
        check(tensor)
        root = self._root(root)
        what = call("broadcast of", tensor.numel(), tensor.dtype, "from", root)

        def run() -> None:
            packed = Packed([tensor], filled=self._rank == root)
            self._comm.Bcast(bytes_of(packed.memory), root)
            packed.unpack()

        return Prepared(what, run, tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Prepared:
        parts, own = _only(outputs), _only(inputs)
        self._one_each(parts, "allgather's output list")
        dtype = _same_type([own, *parts])
        sizes = _sizes(parts)
        if own.numel() != sizes[self._rank]:
            raise InvalidBuffer(
                f"allgather: the input has {own.numel()} elements, output {self._rank} has {sizes[self._rank]}"
            )

        def run() -> None:
            gathered = Packed(parts, filled=False)
            self._allgather(own, gathered.memory, sizes)
            gathered.unpack()

        return Prepared(call("allgather of", sizes, dtype), run, outputs)

    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Prepared:
        self._one_each(outputs, "allgather_coalesced's output lists")
        dtype = _same_type([*inputs, *(tensor for part in outputs for tensor in part)])
        sizes = _sizes(inputs)
        if any(_sizes(part) != sizes for part in outputs):
            raise InvalidBuffer("allgather_coalesced: the output tensors must be as large as the input tensors")

        def run() -> None:
            gathered = Packed([tensor for part in outputs for tensor in part], filled=False)
            self._allgather(Packed(inputs, filled=True).memory, gathered.memory, (sum(sizes),) * self._size)
            gathered.unpack()

        return Prepared(call("allgather_coalesced of", sizes, dtype), run, outputs)

    def all_gather_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Prepared:
        """Of one tensor, or of several in a coalesced call."""
        dtype = _same_type([*outputs, *inputs])
        for output, source in zip(outputs, inputs, strict=True):
            if output.numel() != source.numel() * self._size:
                raise InvalidBuffer(
                    "all_gather_single: output tensor size must be equal to world_size times input tensor size: "
                    f"{output.numel()} elements are not {self._size} x {source.numel()}"
                )

        def run() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                gathered = Packed([output], filled=False)
                self._allgather(source, gathered.memory, (source.numel(),) * self._size)
                gathered.unpack()

        return Prepared(call("all_gather_single of", _sizes(inputs), dtype), run, outputs)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], root: int) -> Prepared:
        own, root = _only(inputs), self._root(root)
        parts = self._parts_at_root(outputs, own, root, "gather's output list")

        def run() -> None:
            outgoing = bytes_of(_contiguous(own))
            if self._rank != root:
                self._comm.Gather(outgoing, None, root)
                return
            gathered = Packed(parts, filled=False)
            if overlap(own, gathered.memory):
                outgoing = bytes_of(own.detach().clone())
            self._comm.Gather(outgoing, _shares(gathered.memory, self._size), root)
            gathered.unpack()

        return Prepared(call("gather of", own.numel(), own.dtype, "to", root), run, outputs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], root: int) -> Prepared:
        own, root = _only(outputs), self._root(root)
        parts = self._parts_at_root(inputs, own, root, "scatter's input list")

        def run() -> None:
            target = Packed([own], filled=False)
            if self._rank != root:
                self._comm.Scatter(None, bytes_of(target.memory), root)
            else:
                source = Packed(parts, filled=True).memory
                if overlap(source, target.memory):
                    source = source.clone()
                self._comm.Scatter(_shares(source, self._size), bytes_of(target.memory), root)
            target.unpack()

        return Prepared(call("scatter of", own.numel(), own.dtype, "from", root), run, outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Prepared:
        self._one_each(outputs, "alltoall's output list")
        self._one_each(inputs, "alltoall's input list")
        dtype = _same_type([*outputs, *inputs])

        def run() -> None:
            target = Packed(outputs, filled=False)
            self._alltoall(Packed(inputs, filled=True).memory, _sizes(inputs), target.memory, _sizes(outputs))
            target.unpack()

        return Prepared(call("alltoall of", dtype), run, outputs)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Prepared:
        dtype = _same_type([output, source])
        incoming = split_counts(output_splits, output, self._size, "all_to_all_single's output")
        outgoing = split_counts(input_splits, source, self._size, "all_to_all_single's input")

        def run() -> None:
            target = Packed([output], filled=False)
            self._alltoall(Packed([source], filled=True).memory, outgoing, target.memory, incoming)
            target.unpack()

        return Prepared(call("all_to_all_single of", dtype), run, [output])

    def barrier(self) -> Prepared:
        return Prepared(call("barrier"), _nothing, None)

    # On memory

    def _allreduce(self, memory: Tensor, reduction: Reduction, compress: bool) -> None:
        if compress:
            x = array_of(memory)
            self._communicator().allreduce(x, op="mean" if reduction.mean else "sum", out=x)
            return
        reduce_into(memory, memory, reduction, self._size, self._in_place)

    def _in_place(self, outgoing: Message, incoming: Message, operation: Any) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, incoming, operation)

    def _scatter_blocks(self, outgoing: Message, incoming: Message, operation: Any) -> None:
        memory, _, kind = outgoing
        self._comm.Reduce_scatter_block([memory, incoming[1], kind], incoming, operation)

    def _allreduce_packed(self, tensors: Sequence[Tensor], reduction: Reduction, compress: bool) -> None:
        packed = Packed(tensors, filled=True)
        self._allreduce(packed.memory, reduction, compress)
        packed.unpack()

    def _reduce_scatter(
        self, source: Tensor, target: Tensor, reduction: Reduction, compress: bool, sizes: Sequence[int] | None
    ) -> None:
        result = torch.empty_like(target) if overlap(source, target) else target
        if compress:
            x, out = array_of(source).reshape(self._size, -1), array_of(result).reshape(1, -1)
            self._communicator().reduce_scatter(x, op="mean" if reduction.mean else "sum", out=out)
        elif sizes is None:
            reduce_into(source, result, reduction, self._size, self._scatter_blocks)
        else:
            scatter = self._comm.Reduce_scatter
            uneven = lambda out, into, op: scatter(out, into, sizes, op)  # noqa: E731
            reduce_into(source, result, reduction, self._size, uneven)
        if result is not target:
            target.copy_(result)

    def _allgather(self, own: Tensor, gathered: Tensor, sizes: Sequence[int]) -> None:
        """Gather ``sizes`` elements of each rank in contiguous memory, which may hold this rank's already."""
        itemsize = gathered.element_size()
        source: Any = bytes_of(_contiguous(own))
        if own.is_contiguous() and own.data_ptr() == gathered.data_ptr() + sum(sizes[: self._rank]) * itemsize:
            source = MPI.IN_PLACE
        elif overlap(own, gathered):
            source = bytes_of(own.detach().clone())
        if len(set(sizes)) == 1:
            self._comm.Allgather(source, _shares(gathered, self._size))
        else:
            self._comm.Allgatherv(source, _uneven(gathered, sizes))

    def _alltoall(self, source: Tensor, sent: Sequence[int], target: Tensor, received: Sequence[int]) -> None:
        announced = np.empty(self._size, np.int64)
        self._comm.Alltoall(np.array(sent, np.int64), announced)
        what = "alltoall's sizes match"
        if announced.tolist() != list(received):
            # Two ranks must not agree on a misfit: hence the rank.
            what = (
                f"alltoall's rank {self._rank} gets {announced.tolist()} elements, but made room for {list(received)}"
            )
        self._channel.agree(call(what), self._channel.seconds)
        if overlap(source, target):
            source = source.clone()
        self._comm.Alltoallv(_uneven(source, sent), _uneven(target, received))

    def _sparse_allreduce(self, tensor: Tensor, op: Any) -> Prepared:
        if tensor.device.type != "cpu":
            check(tensor)
        reduction = reduction_of(op, tensor.dtype)
        if reduction.name != "SUM" or not compressible(tensor):
            raise UnsupportedDType(
                f"{reduction.name} of sparse {tensor.dtype}: sums of floating-point elements are known"
            )

        def run() -> None:
            own = tensor.detach().coalesce()
            counts = np.empty(self._size, np.int64)
            self._comm.Allgather(np.array([own._nnz()], np.int64), counts)
            row = (
                own.values()[:1].numel() if own._nnz() else int(np.prod(own.shape[own.sparse_dim() :], dtype=np.int64))
            )
            places = own.indices().new_empty((int(counts.sum()), own.sparse_dim()))
            values = own.values().new_empty((int(counts.sum()), *own.shape[own.sparse_dim() :]))
            self._allgather(own.indices().t().contiguous(), places, [int(n) * own.sparse_dim() for n in counts])
            self._allgather(own.values().contiguous(), values, [int(n) * row for n in counts])
            with torch.no_grad():
                tensor.copy_(torch.sparse_coo_tensor(places.t(), values, own.shape).coalesce())

        shape = "x".join(map(str, tensor.shape))
        return Prepared(call("allreduce of sparse", shape, tensor.dtype), run, [tensor])

    def _communicator(self) -> Communicator:
        if self._compressing is None:
            channel = self._channel
            self._compressing = Communicator(self._comm, codec=self._options.codec, timeout=channel.seconds)
        return self._compressing

    # Checks

    def _compress(self, tensor: Tensor, reduction: Reduction, nbytes: int | None = None) -> bool:
        options = self._options
        if options.codec is None or self._size == 1:
            return False
        large = (nbytes_of(tensor) if nbytes is None else nbytes) >= options.min_bytes
        return bool(large and reduction.linear and compressible(tensor) and tensor.numel())

    def _root(self, root: int) -> int:
        if not 0 <= root < self._size:
            raise InvalidArgument(f"rank {root} is not in this group: 0 to {self._size - 1}")
        return root

    def _one_each(self, parts: Sequence[Any], what: str) -> None:
        if len(parts) != self._size:
            raise InvalidBuffer(f"{what} has {len(parts)} entries: one for each of the {self._size} ranks is needed")

    def _parts_at_root(self, lists: Sequence[Sequence[Tensor]], own: Tensor, root: int, what: str) -> Sequence[Tensor]:
        if self._rank != root:
            check(own)
            return []
        parts = _only(lists)
        self._one_each(parts, what)
        _same_type([own, *parts])
        if set(_sizes(parts)) != {own.numel()}:
            raise InvalidBuffer(f"{what} has tensors of {_sizes(parts)} elements: {own.numel()} in each are needed")
        return parts


def _nothing() -> None:
    pass


def _only(things: Sequence[Any]) -> Any:
    if len(things) != 1:
        raise InvalidBuffer(f"{len(things)} tensors or lists were given: a process group takes one for each process")
    return things[0]


def _same_type(tensors: Sequence[Tensor]) -> torch.dtype:
    if not tensors:
        raise InvalidBuffer("no tensor was given")
    for tensor in tensors:
        check(tensor)
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise InvalidBuffer(f"tensors of one element type are needed, not of {', '.join(sorted(map(str, dtypes)))}")
    return tensors[0].dtype


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(int(tensor.numel()) for tensor in tensors)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()


def _shares(memory: Tensor, ranks: int) -> Message:
    """Memory in equal shares."""
    buffer, nbytes, byte = bytes_of(memory)
    return [buffer, nbytes // ranks, byte]


def _uneven(memory: Tensor, sizes: Sequence[int]) -> Message:
    """Memory in shares of so many elements."""
    buffer, _, byte = bytes_of(memory)
    counts = [size * memory.element_size() for size in sizes]
    return [buffer, (counts, [0, *np.cumsum(counts)[:-1].tolist()]), byte]
