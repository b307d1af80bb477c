"""Preparation of a process group's collectives: the base class, with the collectives that do not reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, GatherOptions, ScatterOptions

from ...errors import InvalidArgument, InvalidBuffer
from ...transports.library import MPI
from ..buffers import check, on_host, overlap, split_counts
from ..streams import JobStreams, StreamOrder
from .channel import Channel, Collective, Tensors, signature
from .gpu import CallOrder, packed
from .operations import BufferSpec, Memory, bytes_of

Thing = TypeVar("Thing")


class Collectives:
    """Prepares broadcasts, gathers, scatters and exchanges.

    Each method checks its arguments in the caller's thread. The returned `Collective` accesses memory when it runs.

    Parameters
    ----------
    channel : Channel
        Channel between the ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.comm = channel.comm
        self.rank, self.size = channel.rank, channel.size
        self._streams = JobStreams()

    def ordered(self, tensors: Sequence[Tensor], *, direct: bool = True) -> StreamOrder | None:
        """Return the `CallOrder` of a call on GPU tensors; None for tensors in host memory."""
        return None if all(map(on_host, tensors)) else CallOrder(self._streams, tensors, direct=direct)

    def root(self, root: int) -> int:
        """Check that a rank is in this group, and return it.

        Raises
        ------
        InvalidArgument
            If it is not.
        """
        if not 0 <= root < self.size:
            raise InvalidArgument(f"rank {root} is not in this group, which has the ranks 0 to {self.size - 1}")
        return root

    def one_each(self, parts: Tensors, what: str) -> None:
        """Check that a list has one entry for each rank."""
        if len(parts) != self.size:
            raise InvalidBuffer(f"{what} has {len(parts)} entries: one for each of the {self.size} ranks is needed")

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> Collective:
        tensor, root = only(tensors), self.root(opts.rootRank)
        order = self.ordered([tensor])

        def run() -> None:
            buffer = packed(order, [tensor], filled=self.rank == root)
            self.comm.Bcast(bytes_of(buffer.memory), root)
            buffer.unpack()

        return Collective(run, tensors, signature("broadcast of", tensor.numel(), tensor.dtype, "from", root), order)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Collective:
        parts, own = only(outputs), only(inputs)
        self.one_each(parts, "allgather's output list")
        order, dtype = self.ordered([own, *parts]), same_type([own, *parts])
        sizes = sizes_of(parts)
        if own.numel() != sizes[self.rank]:
            raise InvalidBuffer(
                f"allgather: the input has {own.numel()} elements, output {self.rank} has {sizes[self.rank]}"
            )
        run = lambda: self._gather(order, inputs, parts, sizes)  # noqa: E731
        return Collective(run, outputs, signature("allgather of", sizes, dtype), order)

    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Collective:
        self.one_each(outputs, "allgather_coalesced's output lists")
        parts = [tensor for part in outputs for tensor in part]
        order, dtype = self.ordered([*inputs, *parts]), same_type([*inputs, *parts])
        sizes = sizes_of(inputs)
        if any(sizes_of(part) != sizes for part in outputs):
            raise InvalidBuffer("allgather_coalesced: the output tensors must be as large as the input tensors")
        run = lambda: self._gather(order, inputs, parts, (sum(sizes),) * self.size)  # noqa: E731
        return Collective(run, outputs, signature("allgather_coalesced of", sizes, dtype), order)

    def all_gather_single(self, output: Tensor, source: Tensor) -> Collective:
        return self.all_gather_single_coalesced([output], [source])

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Collective:
        order, dtype = self.ordered([*outputs, *inputs]), same_type([*outputs, *inputs])
        for output, source in zip(outputs, inputs, strict=True):
            if output.numel() != source.numel() * self.size:
                raise InvalidBuffer(
                    "all_gather_single: output tensor size must be equal to world_size times input tensor size: "
                    f"{output.numel()} elements are not {self.size} x {source.numel()}"
                )

        def run() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                self._gather(order, [source], [output], (source.numel(),) * self.size)

        return Collective(run, outputs, signature("all_gather_single of", sizes_of(inputs), dtype), order)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: GatherOptions) -> Collective:
        own, root = only(inputs), self.root(opts.rootRank)
        order, parts = self._parts_at_root(outputs, own, root, "gather's output list")

        def run() -> None:
            source = packed(order, [own], filled=True).memory
            if self.rank != root:
                self.comm.Gather(bytes_of(source), None, root)
                return
            gathered = packed(order, parts, filled=False)
            source = apart(source, gathered.memory)
            self.comm.Gather(bytes_of(source), _shares(gathered.memory, self.size), root)
            gathered.unpack()

        return Collective(run, outputs, signature("gather of", own.numel(), own.dtype, "to", root), order)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ScatterOptions
    ) -> Collective:
        own, root = only(outputs), self.root(opts.rootRank)
        order, parts = self._parts_at_root(inputs, own, root, "scatter's input list")

        def run() -> None:
            target = packed(order, [own], filled=False)
            if self.rank != root:
                self.comm.Scatter(None, bytes_of(target.memory), root)
            else:
                source = apart(packed(order, parts, filled=True).memory, target.memory)
                self.comm.Scatter(_shares(source, self.size), bytes_of(target.memory), root)
            target.unpack()

        return Collective(run, outputs, signature("scatter of", own.numel(), own.dtype, "from", root), order)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Collective:
        self.one_each(outputs, "alltoall's output list")
        self.one_each(inputs, "alltoall's input list")
        order, dtype = self.ordered([*outputs, *inputs]), same_type([*outputs, *inputs])
        run = lambda: self._exchange(order, inputs, sizes_of(inputs), outputs, sizes_of(outputs))  # noqa: E731
        return Collective(run, outputs, signature("alltoall of", dtype), order)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Collective:
        order, dtype = self.ordered([output, source]), same_type([output, source])
        incoming = split_counts(output_splits, output, self.size, "all_to_all_single's output")
        outgoing = split_counts(input_splits, source, self.size, "all_to_all_single's input")
        run = lambda: self._exchange(order, [source], outgoing, [output], incoming)  # noqa: E731
        return Collective(run, [output], signature("all_to_all_single of", dtype), order)

    def barrier(self) -> Collective:
        return Collective(lambda: None, None, signature("barrier"))  # the handshake is a barrier

    def _gather(
        self, order: StreamOrder | None, inputs: Sequence[Tensor], outputs: Sequence[Tensor], sizes: Sequence[int]
    ) -> None:
        gathered = packed(order, outputs, filled=False)
        gather_shares(self.comm, packed(order, inputs, filled=True).memory, gathered.memory, sizes)
        gathered.unpack()

    def _exchange(
        self,
        order: StreamOrder | None,
        inputs: Sequence[Tensor],
        sent: Sequence[int],
        outputs: Sequence[Tensor],
        received: Sequence[int],
    ) -> None:
        announced = np.empty(self.size, np.int64)
        self.comm.Alltoall(np.array(sent, np.int64), announced)
        what = "alltoall's sizes match"
        if announced.tolist() != list(received):
            # The text names the rank, so that two ranks with wrong sizes cannot have equal signatures.
            what = f"alltoall: rank {self.rank} is sent {announced.tolist()} elements, but expects {list(received)}"
        self.channel.communicator._agree(signature(what), self.channel.limit)
        target = packed(order, outputs, filled=False)
        source = apart(packed(order, inputs, filled=True).memory, target.memory)
        self.comm.Alltoallv(_uneven(source, sent), _uneven(target.memory, received))
        target.unpack()

    def _parts_at_root(
        self, lists: Sequence[Sequence[Tensor]], own: Tensor, root: int, what: str
    ) -> tuple[StreamOrder | None, Sequence[Tensor]]:
        if self.rank != root:
            return self.ordered([own]), []
        parts = only(lists)
        self.one_each(parts, what)
        order = self.ordered([own, *parts])
        same_type([own, *parts])
        if set(sizes_of(parts)) != {own.numel()}:
            raise InvalidBuffer(f"{what} has tensors of {sizes_of(parts)} elements: {own.numel()} in each are needed")
        return order, parts


def only(things: Sequence[Thing]) -> Thing:
    """Return the only tensor or list of a call. Raise InvalidBuffer for any other number."""
    if len(things) != 1:
        raise InvalidBuffer(f"{len(things)} tensors or lists were given: this collective takes one from each rank")
    return things[0]


def same_type(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the common element type of some tensors.

    Raises
    ------
    InvalidBuffer
        If there are no tensors, or several types.
    """
    if not tensors:
        raise InvalidBuffer("no tensor was given")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            check(tensor)
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise InvalidBuffer(f"tensors of one element type are needed, not of {', '.join(sorted(map(str, dtypes)))}")
    return tensors[0].dtype


def sizes_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the number of elements of each tensor."""
    return tuple(int(tensor.numel()) for tensor in tensors)


def apart(source: Tensor, target: Tensor) -> Tensor:
    """Return the source, or a copy if it overlaps with the target: MPI forbids overlapping buffers.

    The caller keeps a reference to the result until MPI has read it.
    """
    return source.clone() if overlap(source, target) else source


def gather_shares(comm: MPI.Intracomm, source: Tensor, gathered: Tensor, sizes: Sequence[int]) -> None:
    """Gather ``sizes[r]`` elements of each rank r into contiguous memory. `source` may be this rank's part of it."""
    in_place = source.data_ptr() == gathered.data_ptr() + sum(sizes[: comm.rank]) * gathered.element_size()
    source = source if in_place else apart(source, gathered)
    outgoing = MPI.IN_PLACE if in_place else bytes_of(source)
    if len(set(sizes)) == 1:
        comm.Allgather(outgoing, _shares(gathered, comm.size))
    else:
        comm.Allgatherv(outgoing, _uneven(gathered, sizes))


def _shares(memory: Tensor, ranks: int) -> BufferSpec:
    """Describe memory as equal shares, one for each rank."""
    buffer, nbytes, byte = bytes_of(memory)
    return buffer, nbytes // ranks, byte


def _uneven(memory: Tensor, sizes: Sequence[int]) -> tuple[Memory, tuple[list[int], list[int]], MPI.Datatype]:
    """Describe memory as shares of the given numbers of elements."""
    buffer, _, byte = bytes_of(memory)
    counts = [size * memory.element_size() for size in sizes]
    return buffer, (counts, [0, *np.cumsum(counts)[:-1].tolist()]), byte
