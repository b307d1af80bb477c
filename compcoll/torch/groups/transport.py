"""A transport over a PyTorch process group, for ranks that do not run under MPI.

Wires are sent as uint8 tensors in a separate gloo group of the same ranks, so they cannot be confused with messages of
the caller. gloo reports the arrival of a message only to a thread that waits for it: until then, ``is_completed`` stays
false. So ``Test`` of a message waits for it: the transport blocks. A collective runs from its start to its end in the
thread that starts it, in the same order on all ranks. Meanwhile, gloo's threads send.

Ranks of one node make handshakes through shared memory, as under MPI, and sum through it where that is faster.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ... import __version__
from ...errors import CollectiveMismatch, CompcollError, InvalidArgument, WireCorrupted
from ...gpu.device_transport import DeviceTransport
from ...gpu.stream_transport import Bootstrap
from ...kernels._host import Function
from ...pending import Pending
from ...stats import UNKNOWN
from ...transports.base import LibraryConnection, Wire
from ...transports.nodes import find_nodes, host_name
from ...transports.serialization import packed, unpacked
from .. import private
from ..agreement import gather_bytes, gathered
from ..failure_detector import Board, store_of
from .gloo import make_gloo
from .nccl import TorchNCCL

_LENGTH_NBYTES = 8  # a wire that may be shorter than its memory begins with its length, which gloo does not report

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # multiplied by 1/p afterwards
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def node_name() -> str:
    """Return a name of this rank's node: the host name, and the rank at which the launcher's node begins.

    A launcher may start several nodes on one host. Ranks of a node are consecutive under torchrun, so its first rank is
    RANK - LOCAL_RANK. The name omits this rank if RANK, LOCAL_RANK and LOCAL_WORLD_SIZE are missing or inconsistent.
    """
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, local, neighbours = (int(text) if (text := os.environ.get(name, "")).isdecimal() else -1 for name in names)
    return f"{host_name()} {rank - local}" if 0 <= local < neighbours and local <= rank else host_name()


class GroupTransport(LibraryConnection):
    """Messages among the ranks of a process group, and gloo's own collectives on NumPy arrays.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Group of any backend. All its ranks make the transport together.
    device : torch.device
        Device of the tensors with which the ranks of the group exchange settings.
    seconds : float
        Time-out of a wait.
    host : str, optional
        Name of the node, the same for ranks that share one; `node_name` by default.

    Raises
    ------
    CollectiveMismatch
        If the ranks run different versions of compcoll.

    Attributes
    ----------
    board : Board
        Reports which ranks are silent.
    leaving : set of DeviceTransport
        Transports of wires in device memory that send over this transport.
    """

    blocks = True
    library = "gloo"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, seconds: float, *, host: str | None = None
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.limit = timedelta(seconds=min(seconds, timedelta.max.total_seconds() / 2))
        in_job = dist.get_rank() if dist.is_initialized() else self.rank
        own = packed((__version__, socket.gethostname(), in_job, secrets.token_hex(8)))
        ranks = [unpacked(each) for each in gathered(own, group, device)]
        versions = {version for version, *_ in ranks}
        if len(versions) > 1:
            texts = [f"{version} on rank {rank}" for rank, (version, *_) in enumerate(ranks)]
            raise CollectiveMismatch(f"the ranks run different versions of compcoll: {'; '.join(texts)}")
        self._hosts = tuple(sorted({name for _, name, *_ in ranks}))
        self._global_ranks = [in_job for *_, in_job, _ in ranks]
        # The random key keeps this group's entries apart from those of a later group, which may get the same name.
        store = store_of(group)
        if store is None:
            raise InvalidArgument(
                f"group={group!r} has no store, over which its ranks could make connections: use a group made by "
                "init_process_group or new_group"
            )
        self._store = dist.PrefixStore(f"compcoll/{ranks[0][-1]}", store)
        self.leaving: WeakSet[DeviceTransport] = WeakSet()
        self.board = Board(dist.PrefixStore("roll call", self._store), self.rank, self.size)
        self._gloo = make_gloo(self.board, self._store, self.limit)
        find_nodes(self, host or node_name(), lambda: None)

    def global_ranks(self) -> Sequence[int]:
        return self._global_ranks

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        sent = _memory(wire)
        if not wire.exact:
            memory = self._with_length(wire)
            memory[:_LENGTH_NBYTES].view(torch.int64)[0] = wire.nbytes
            memory[_LENGTH_NBYTES : _LENGTH_NBYTES + wire.nbytes] = sent[: wire.nbytes]
            sent = memory[: _LENGTH_NBYTES + wire.nbytes]
        return _Started(self, self._gloo.send([sent], dest, tag), f"a message to rank {dest}", dest)

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        what = f"a message from rank {source}"
        if wire.exact:
            return _Started(self, self._gloo.recv([_memory(wire)], source, tag), what, source)
        work = self._gloo.recv([self._with_length(wire)], source, tag)
        return _Started(self, work, what, source, lambda: _unpack(wire))

    @staticmethod
    def _with_length(wire: Wire) -> Tensor:
        """Return a buffer for the length and the bytes of a wire. It is allocated once per wire."""
        if wire.message is None:
            wire.message = torch.empty(_LENGTH_NBYTES + wire.buffer.nbytes, dtype=torch.uint8, device="cpu")
        message: Tensor = wire.message
        return message

    def waiting(self, work: dist.Work, what: str, peer: int | None = None) -> None:
        """Wait for a gloo operation, at most as long as the group's time-out.

        Nothing else runs in this thread meanwhile. So this method first sends all wires in device memory, since other
        ranks may wait for them.

        Raises
        ------
        PeerTimeout, PeerFailed, CollectiveFailed
            As `Board.waits` does.
        """
        for device in tuple(self.leaving):
            device.depart_all()
        with self.board.waits(what, peer):
            work.wait(self.limit)

    def _every(self, own: Any) -> list[Any]:
        return [unpacked(each) for each in gather_bytes(packed(own), self._all_gather)]

    def _all_gather(self, values: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.size)]
        self.waiting(self._gloo.allgather([parts], [values]), "a gather of settings")
        return parts

    def whereabouts(self) -> tuple[str, tuple[str, ...]]:
        return f"gloo of PyTorch {torch.__version__}", self._hosts

    def barrier(self) -> None:
        self.waiting(self._gloo.barrier(), "a barrier")

    def bootstrap(self, device: Any) -> Bootstrap:
        """Return the bootstrap that connects the GPUs of the ranks: that of PyTorch's NCCL, if there is one."""
        if torch.cuda.is_available() and dist.is_nccl_available():
            return TorchNCCL(device.runtime, device.index, self._store)
        way: Bootstrap = device.bootstrap()
        return way

    def failure(self, error: BaseException) -> CompcollError | None:
        return self.board.failure(error)

    def abandon(self) -> None:
        self.board.abandon()

    def announce(self, text: str) -> None:
        self.board.announce(text)

    def announced(self) -> Mapping[int, str]:
        return self.board.announced()

    def reductions(
        self, collective: str, op: str, root: int | None = None
    ) -> tuple[Function, Callable[[Any, Any], Pending]]:
        if op not in _OPERATIONS:
            raise InvalidArgument(f"op={op!r} is not supported over gloo: use one of {', '.join(_OPERATIONS)}")
        if root is not None:
            start = partial(self._ireduce, root, _OPERATIONS[op])
        else:
            start = partial(self._iallreduce if collective == "allreduce" else self._ireduce_scatter, _OPERATIONS[op])
        return Function(lambda x, out: start(x, out).Test(), UNKNOWN), start

    def _iallreduce(self, op: Any, x: Any, out: Any) -> Pending:
        if out is not x:
            out[...] = x
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._started(self._gloo.allreduce([torch.from_numpy(out)], options), "allreduce")

    def _ireduce(self, root: int, op: Any, x: Any, out: Any) -> Pending:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = op, root
        sums = x.copy() if out is None else out  # gloo works in place, on the other ranks, too
        if sums is not x:
            sums[...] = x
        return self._started(self._gloo.reduce([torch.from_numpy(sums)], options), "reduce")

    def _ireduce_scatter(self, op: Any, x: Any, out: Any) -> Pending:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        given = torch.from_numpy(out).view(-1), torch.from_numpy(x).view(-1)
        return self._started(getattr(self._gloo, private.REDUCE_SCATTER_SINGLE)(*given, options), "reduce_scatter")

    def iallgatherv(self, x: Any, out: Any, counts: Sequence[int]) -> Pending:
        itemsize = x.itemsize
        own, counts = _bytes(x), [count * itemsize for count in counts]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device="cpu")
        padded[: own.numel()] = own
        parts = [torch.empty_like(padded) for _ in counts]

        def joined() -> None:
            torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)], out=_bytes(out))

        return self._started(self._gloo.allgather([parts], [padded]), "allgather", joined)

    def ibcast(self, x: Any, root: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._started(self._gloo.broadcast([_bytes(x)], options), "broadcast")

    def ialltoall(self, x: Any, out: Any) -> Pending:
        return self._started(self._gloo.alltoall_base(_bytes(out), _bytes(x), [], []), "alltoall")

    def ialltoallv(self, x: Any, out: Any, sent: Sequence[int], received: Sequence[int]) -> Pending:
        sizes = ([count * x.itemsize for count in counts] for counts in (received, sent))
        return self._started(self._gloo.alltoall_base(_bytes(out), _bytes(x), *sizes), "alltoallv")

    def igather(self, x: Any, out: Any, root: int) -> Pending:
        options = dist.GatherOptions()
        options.rootRank = root
        parts = [] if out is None else [list(_bytes(out).view(self.size, -1))]
        return self._started(self._gloo.gather(parts, [_bytes(x)], options), "gather")

    def iscatter(self, x: Any, out: Any, root: int) -> Pending:
        options = dist.ScatterOptions()
        options.rootRank = root
        parts = [list(_bytes(x).view(self.size, -1))] if self.rank == root else []
        return self._started(self._gloo.scatter([_bytes(out)], parts, options), "scatter")

    def _started(self, work: dist.Work, what: str, end: Callable[[], object] | None = None) -> Pending:
        return _Started(self, work, f"gloo's {what}", end=end)


@dataclass(slots=True, eq=False)
class _Started:
    """A gloo operation in progress, which can only be waited for; its work keeps its tensors alive."""

    transport: GroupTransport
    work: dist.Work | None
    what: str
    peer: int | None = None
    end: Callable[[], object] | None = None

    def Test(self) -> bool:
        """Wait until the operation has completed."""
        if self.work is not None:
            self.transport.waiting(self.work, self.what, self.peer)
            self.work = None
            if self.end is not None:
                self.end()
        return True


def _unpack(wire: Wire) -> None:
    """Copy the received bytes to the memory of a wire, which may be longer."""
    memory = _memory(wire)
    nbytes = int(wire.message[:_LENGTH_NBYTES].view(torch.int64))
    if not 0 <= nbytes <= memory.numel():
        raise WireCorrupted(f"{nbytes} bytes were announced, where at most {memory.numel()} are expected")
    memory[:nbytes] = wire.message[_LENGTH_NBYTES : _LENGTH_NBYTES + nbytes]
    wire.nbytes = nbytes


def _memory(wire: Wire) -> Tensor:
    """View a wire's memory as a tensor."""
    buffer = wire.buffer
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)


def _bytes(array: Any) -> Tensor:
    """View an array's memory as bytes, also for element types that PyTorch does not have."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
