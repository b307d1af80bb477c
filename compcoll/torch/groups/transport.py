"""Wires through one of PyTorch's process groups, for ranks that no MPI knows.

They travel as uint8 tensors, by isend and irecv of a gloo group of our own among the same ranks: so neither order nor
tags of the caller's calls matter. gloo tells only who waits whether a message has come (``is_completed`` stays false
until somebody has waited), so that ``Test`` of a message waits for it: the transport blocks. A collective then runs in
one go on whichever thread starts it, all in the same order on all ranks, and gloo's threads move sends meanwhile.

Ranks of one node open collectives through memory that they share, as under MPI, and sum through it where that pays.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ... import __version__
from ...errors import CollectiveMismatch, CommunicatorBroken, CompcollError, InvalidArgument, WireCorrupted
from ...gpu.device_transport import DeviceTransport
from ...gpu.stream_transport import Bootstrap
from ...kernels._host import Function
from ...pending import Pending
from ...transports.base import Persistent, Reposted, Result, Wire
from ...transports.nodes import find_nodes, host_name
from ...transports.serialization import packed, unpacked
from ..failure_detector import Board, store_of
from ..membership import gather_bytes, gathered
from .nccl import TorchNCCL

_LENGTH_NBYTES = 8  # in front of what may be shorter than its memory: gloo does not tell how many bytes came

_UNKNOWN = -1  # bytes that gloo sent
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
    """A name of this rank's node: that of its machine, and of the part of it that its launcher takes for a node.

    By LOCAL_WORLD_SIZE, of ranks in a row, as torchrun sets it; not where RANK and LOCAL_RANK do not go with it.
    """
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, local, neighbours = (int(told) if (told := os.environ.get(name, "")).isdecimal() else -1 for name in names)
    return f"{host_name()} {rank - local}" if 0 <= local < neighbours and local <= rank else host_name()


class GroupTransport:
    """Messages among the ranks of a process group, and gloo's own collectives on NumPy arrays (the contracts are
    `Connection` and `Native` of `transports.base`).

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Any backend's. All its ranks make one, together.
    device : torch.device
        Where the group has its tensors: those by which ranks find each other.
    seconds : float
        That any wait may last.
    host : str, optional
        Ranks of the same name share a node; by default `node_name`.

    Raises
    ------
    CollectiveMismatch
        If the ranks run different versions of compcoll.

    Attributes
    ----------
    board : Board
        Where the ranks find out who is silent.
    leaving : set of DeviceTransport
        Those whose wires in device memory this carries.
    """

    blocks = True
    lends_core = False
    library = "gloo"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, seconds: float, *, host: str | None = None
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.limit = timedelta(seconds=min(seconds, timedelta.max.total_seconds() / 2))
        own = packed((__version__, socket.gethostname(), secrets.token_hex(8)))
        told = [unpacked(each) for each in gathered(own, group, device)]
        versions = {version for version, *_ in told}
        if len(versions) > 1:
            texts = [f"{version} on rank {rank}" for rank, (version, *_) in enumerate(told)]
            raise CollectiveMismatch(f"the ranks run different versions of compcoll: {'; '.join(texts)}")
        self._hosts = tuple(sorted({name for _, name, _ in told}))
        # Another group of these ranks, made when this one is gone, gets its name, but not this key.
        store = store_of(group)
        if store is None:
            raise InvalidArgument(
                f"group={group!r} is no group of init_process_group or new_group, and has no store: over which its "
                "ranks could make connections for compressed wires"
            )
        self._store = dist.PrefixStore(f"compcoll/{told[0][-1]}", store)
        self.leaving: WeakSet[DeviceTransport] = WeakSet()
        self.board = Board(dist.PrefixStore("roll call", self._store), self.rank, self.size)
        with self.board.waits("the making of connections"):
            self._gloo = dist.ProcessGroupGloo(self._store, self.rank, self.size, self.limit)
        self.nodes: Sequence[int]
        found = find_nodes(host or node_name(), self.rank, self.size, self.gather, lambda: None)
        self.nodes, self.cores, self.shared, self.mail = found

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

    def send_init(self, wire: Wire, dest: int, tag: int) -> Persistent:
        return Reposted(lambda: self.isend(wire, dest, tag))

    def recv_init(self, wire: Wire, source: int, tag: int) -> Persistent:
        return Reposted(lambda: self.irecv(wire, source, tag))

    @staticmethod
    def _with_length(wire: Wire) -> Tensor:
        """Another piece of memory for a wire that may be shorter than its own, with room for its length."""
        if wire.message is None:
            wire.message = torch.empty(_LENGTH_NBYTES + wire.buffer.nbytes, dtype=torch.uint8)
        message: Tensor = wire.message
        return message

    def forget(self, message: Persistent) -> None:
        """Give nothing back."""

    def free(self) -> None:
        """Give nothing back: connections end with this object, when nobody has it any more."""

    def waiting(self, work: dist.Work, what: str, peer: int | None = None) -> None:
        """Wait for one of gloo's operations, as long as the group's time-out lets. Nothing else goes on meanwhile, so
        all wires leave first: other ranks may wait for them.

        Raises
        ------
        PeerTimeout, PeerFailed, CollectiveFailed
            As `Board.waits` does.
        """
        for device in tuple(self.leaving):
            device.depart_all()
        with self.board.waits(what, peer):
            work.wait(self.limit)

    def gather(self, work: Callable[[], Result]) -> list[Result]:
        """Gather what some work gives on each rank, of what JSON has: tuples come as lists. Collective.

        Raises
        ------
        CompcollError
            If it failed on some rank, on all.
        """
        failed: BaseException | None = None
        result: Result | None = None
        try:
            result = work()
        except Exception as error:
            failed = error
        return self._settled(failed, result)

    def _settled(self, failed: BaseException | None, result: Any = None) -> list[Any]:
        """Gather results, or raise on all ranks what failed on some."""
        text = "" if failed is None else f"{type(failed).__name__}: {failed}"
        told = [unpacked(each) for each in gather_bytes(packed((text, result)), self._all_gather)]
        if failed is not None:
            raise failed
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]
        if failures:
            raise CommunicatorBroken(f"no communicator was made: {'; '.join(failures)}")
        return [result for _, result in told]

    def _all_gather(self, values: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.size)]
        self.waiting(self._gloo.allgather([parts], [values]), "what the ranks tell each other")
        return parts

    def whereabouts(self) -> tuple[str, tuple[str, ...]]:
        return f"gloo of PyTorch {torch.__version__}", self._hosts

    def tell(self, work: Callable[[], Result]) -> Result:
        return self.gather(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def barrier(self) -> None:
        self.waiting(self._gloo.barrier(), "a barrier")

    @contextmanager
    def together(self) -> Iterator[None]:
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        self._settled(failed)

    def takes_device_memory(self) -> bool:
        return False

    def bootstrap(self, device: Any) -> Bootstrap:
        """The way of this rank's GPU to the others': by PyTorch's own NCCL, if it has one."""
        if torch.cuda.is_available() and dist.is_nccl_available():
            return TorchNCCL(device.runtime, device.index, self._store)
        way: Bootstrap = device.bootstrap()
        return way

    def announce(self, text: str) -> None:
        self.board.announce(text)

    def announced(self) -> Mapping[int, str]:
        return self.board.announced()

    def failure(self, error: BaseException) -> CompcollError | None:
        return None

    def abandon(self) -> None:
        """Wake nobody: who waits in gloo does so as long as the time-out lets."""

    @property
    def native(self) -> GroupTransport:
        return self

    def reductions(self, collective: str, op: str) -> tuple[Function, Callable[[Any, Any], Pending]]:
        if op not in _OPERATIONS:
            raise InvalidArgument(f"op={op!r} over a process group of gloo's: there are {', '.join(_OPERATIONS)}")
        start = partial(self._iallreduce if collective == "allreduce" else self._ireduce_scatter, _OPERATIONS[op])
        return Function(lambda x, out: start(x, out).Test(), _UNKNOWN), start

    def _iallreduce(self, op: Any, x: Any, out: Any) -> Pending:
        if out is not x:
            out[...] = x
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._started(self._gloo.allreduce([torch.from_numpy(out)], options), "allreduce")

    def _ireduce_scatter(self, op: Any, x: Any, out: Any) -> Pending:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        given = torch.from_numpy(out).view(-1), torch.from_numpy(x).view(-1)
        return self._started(self._gloo._reduce_scatter_base(*given, options), "reduce_scatter")

    def iallgatherv(self, x: Any, out: Any, counts: Sequence[int]) -> Pending:
        itemsize = x.itemsize
        own, counts = _bytes(x), [count * itemsize for count in counts]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
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

    def _started(self, work: dist.Work, what: str, end: Callable[[], object] | None = None) -> Pending:
        return _Started(self, work, f"gloo's {what}", end=end)


class _Started:
    """An operation of gloo's under way, which can only be waited for; its work keeps its tensors."""

    __slots__ = ("_end", "_peer", "_transport", "_what", "_work")

    def __init__(
        self,
        transport: GroupTransport,
        work: dist.Work,
        what: str,
        peer: int | None = None,
        end: Callable[[], object] | None = None,
    ) -> None:
        self._transport, self._what, self._peer, self._end = transport, what, peer, end
        self._work: dist.Work | None = work

    def Test(self) -> bool:
        """Wait until it has ended."""
        if self._work is not None:
            self._transport.waiting(self._work, self._what, self._peer)
            self._work = None
            if self._end is not None:
                self._end()
        return True


def _unpack(wire: Wire) -> None:
    """Take what has come for a wire that may be shorter than its memory."""
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
    """View an array's memory as bytes: of every element type, those that PyTorch does not know, too."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
