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
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ... import __version__
from ...errors import (
    CollectiveMismatch,
    CommunicatorBroken,
    CompcollError,
    InvalidArgument,
    WireCorrupted,
)
from ...progress import Pending
from ...transports.base import Persistent, Reposted, Result, Wire
from ...transports.device import DeviceTransport
from ...transports.nodes import find_nodes, host_name
from ...transports.streamed import Joining
from ...transports.told import packed, unpacked
from ..membership import gathered
from ..roll_call import Board, store_of
from .native import GlooCollectives
from .nccl import TorchNCCL

_LENGTH_NBYTES = 8  # in front of what may be shorter than its memory: gloo does not tell how many bytes came


def node_name() -> str:
    """A name of this rank's node: that of its machine, and of the part of it that its launcher takes for a node.

    By LOCAL_WORLD_SIZE, of ranks in a row, as torchrun sets it; not where RANK and LOCAL_RANK do not go with it.
    """
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, local, neighbours = (int(told) if (told := os.environ.get(name, "")).isdecimal() else -1 for name in names)
    return f"{host_name()} {rank - local}" if 0 <= local < neighbours and local <= rank else host_name()


class GroupTransport:
    """Point-to-point messages among the ranks of a process group (the contract is `transports.base.Connection`).

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
        self.native = GlooCollectives(self._gloo, self.rank, self.size, self.waiting)

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        sent = _memory(wire)
        if not wire.exact:
            memory = self._with_length(wire)
            memory[:_LENGTH_NBYTES].view(torch.int64)[0] = wire.nbytes
            memory[_LENGTH_NBYTES : _LENGTH_NBYTES + wire.nbytes] = sent[: wire.nbytes]
            sent = memory[: _LENGTH_NBYTES + wire.nbytes]
        return _Message(self, self._gloo.send([sent], dest, tag), f"a message to rank {dest}", dest)

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        what = f"a message from rank {source}"
        if wire.exact:
            return _Message(self, self._gloo.recv([_memory(wire)], source, tag), what, source)
        return _Arrival(self, self._gloo.recv([self._with_length(wire)], source, tag), what, source, wire)

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
        text = "" if failed is None else f"{type(failed).__name__}: {failed}"
        told = [unpacked(each) for each in self._gathered(packed((text, result)))]
        if failed is not None:
            raise failed
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]
        if failures:
            raise CommunicatorBroken(f"no communicator was made: {'; '.join(failures)}")
        return [result for _, result in told]

    def _gathered(self, data: bytes) -> list[bytes]:
        """Gather bytes, as `membership.gathered` does."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.waiting(self._gloo.allgather([sizes], [torch.tensor([own.numel()])]), "what the ranks tell each other")
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self.waiting(self._gloo.allgather([parts], [padded]), "what the ranks tell each other")
        return [bytes(part[: int(size)].tolist()) for part, size in zip(parts, sizes, strict=True)]

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

        def settle() -> None:
            if failed is not None:
                raise failed

        self.gather(settle)

    def takes_device_memory(self) -> bool:
        return False

    def joining(self, device: Any) -> Joining:
        """The way of this rank's GPU to the others': by PyTorch's own NCCL, if it has one."""
        if torch.cuda.is_available() and dist.is_nccl_available():
            return TorchNCCL(device.runtime, device.index, self._store)
        way: Joining = device.joining()
        return way

    def announce(self, text: str) -> None:
        self.board.announce(text)

    def announced(self) -> Mapping[int, str]:
        return self.board.announced()

    def failure(self, error: BaseException) -> CompcollError | None:
        return None

    def abandon(self) -> None:
        """Wake nobody: who waits in gloo does so as long as the time-out lets."""


class _Message:
    """A message under way; gloo's work keeps its tensor."""

    __slots__ = ("_peer", "_transport", "_what", "_work")

    def __init__(self, transport: GroupTransport, work: dist.Work, what: str, peer: int) -> None:
        self._transport, self._what, self._peer = transport, what, peer
        self._work: dist.Work | None = work

    def Test(self) -> bool:
        """Wait until it has left or come."""
        if self._work is not None:
            self._transport.waiting(self._work, self._what, self._peer)
            self._work = None
        return True


class _Arrival(_Message):
    """A receive of what may be shorter than its memory."""

    __slots__ = ("_wire",)

    def __init__(self, transport: GroupTransport, work: dist.Work, what: str, peer: int, wire: Wire) -> None:
        super().__init__(transport, work, what, peer)
        self._wire = wire

    def Test(self) -> bool:
        super().Test()
        memory = _memory(self._wire)
        nbytes = int(self._wire.message[:_LENGTH_NBYTES].view(torch.int64))
        if not 0 <= nbytes <= memory.numel():
            raise WireCorrupted(f"{nbytes} bytes were announced, where at most {memory.numel()} are expected")
        memory[:nbytes] = self._wire.message[_LENGTH_NBYTES : _LENGTH_NBYTES + nbytes]
        self._wire.nbytes = nbytes
        return True


def _memory(wire: Wire) -> Tensor:
    """View a wire's memory as a tensor."""
    buffer = wire.buffer
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)
