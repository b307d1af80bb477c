"""Memory that the ranks of a node share: an unnamed file in memory, which the system removes with the processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..kernels._host import SharedMessage
from ..layout import longest_message

_NAME = "compcoll"
_SUMS_NBYTES_EACH = 3 * (256 * 1024 + 4096)
_SCARCE_SUMS_NBYTES_EACH = 3 * (1024 * 1024 + 4096)
"""With fewer cores than ranks, a rank may wait a time slice for each piece of a sum, so pieces of large buffers are
larger than is best for the caches. 4 ranks on 2 cores, 16 MiB: 6.3 instead of 5.9 ms, but 24 instead of 48 ms beside
two busy processes (MPI's own: 27 ms).
"""
_MOST_SUMS_NBYTES = 32 << 20
_NUMBER_NBYTES, _LINE_NBYTES = 8, 64
_MARK_NBYTES = 16


@dataclass(frozen=True)
class Room:
    """The layout of a node's shared memory: sums, messages of handshakes, and a mark.

    Parameters
    ----------
    ranks : int
        Number of ranks on the node.
    size : int
        Number of ranks on all nodes.
    """

    ranks: int
    size: int

    @property
    def sums_nbytes(self) -> int:
        return min(self.ranks * _SCARCE_SUMS_NBYTES_EACH, _MOST_SUMS_NBYTES)

    @property
    def message_nbytes(self) -> int:
        """The bytes of a handshake message and its sequence number, in whole cache lines."""
        return -(-(_NUMBER_NBYTES + longest_message(self.size)) // _LINE_NBYTES) * _LINE_NBYTES

    @property
    def nbytes(self) -> int:
        return self.place(self.ranks, 0)[0] + _MARK_NBYTES

    def place(self, rank: int, number: int) -> tuple[int, int]:
        """Return offset and bytes of the memory for messages to a rank in a round. Two messages fit and alternate."""
        rounds, nbytes = (self.size - 1).bit_length(), 2 * self.message_nbytes
        return self.sums_nbytes + (rank * rounds + number) * nbytes, nbytes

    def sums(self, memory: mmap.mmap, scarce: bool = False) -> memoryview:
        """Return the memory for sums. It is larger if cores are ``scarce``: some rank has less than one core."""
        usual = min(self.ranks * _SUMS_NBYTES_EACH, _MOST_SUMS_NBYTES)
        return memoryview(memory)[: self.sums_nbytes if scarce else usual]

    def memory(self, descriptor: int = -1) -> mmap.mmap:
        """Map the memory. It begins as zeros, and unused pages take no memory.

        It is private to this process unless a file descriptor is given.
        """
        return mmap.mmap(descriptor, self.nbytes)


class Shared(NamedTuple):
    """Shared memory of a node's ranks for sums.

    Attributes
    ----------
    memory : buffer
        The memory.
    rank, ranks : int
        This rank's number on the node, and the number of ranks there.
    """

    memory: Any
    rank: int
    ranks: int


class Mail:
    """Messages of handshakes between ranks of a node, through shared memory.

    Parameters
    ----------
    room : Room
        The layout of the memory.
    memory : buffer
        The whole memory.
    nodes : sequence of int
        Each rank's node.
    progress : callable
        Advances other messages while a rank waits for one of these.
    """

    def __init__(self, room: Room, memory: Any, nodes: Sequence[int], progress: Callable[[], object]) -> None:
        self._room = room
        self._memory = memory
        self._nodes = nodes
        self._progress = progress

    def message(self, source: int, dest: int, number: int, *, sending: bool) -> SharedMessage | None:
        """Return one end of the messages of round ``number``; None if the ranks are on different nodes."""
        node = self._nodes[dest]
        if self._nodes[source] != node:
            return None
        at, nbytes = self._room.place(self._nodes[:dest].count(node), number)
        return SharedMessage(self._memory, at, nbytes, sending, self._progress)


class Offer(NamedTuple):
    """The information with which another process can open and verify a file in memory."""

    process: int
    descriptor: int
    nbytes: int
    mark: str


def offer(room: Room) -> tuple[mmap.mmap, Offer] | None:
    """Create the memory, and return it with the offer for other processes; None if the system has no memfd_create."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.memfd_create(_NAME)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, descriptor)
            os.ftruncate(descriptor, room.nbytes)
            mapped = room.memory(descriptor)
            mark = secrets.token_bytes(_MARK_NBYTES)
            mapped[-_MARK_NBYTES:] = mark
            failed.pop_all()
        return mapped, Offer(os.getpid(), descriptor, len(mapped), mark.hex())
    return None


def accept(offered: Offer) -> mmap.mmap | None:
    """Map the memory that another process of this node offers; None if that fails, as between containers."""
    path = f"/proc/{offered.process}/fd/{offered.descriptor}"
    with contextlib.suppress(OSError):
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != offered.nbytes:
                return None
            mapped = mmap.mmap(descriptor, offered.nbytes)
        finally:
            os.close(descriptor)
        if mapped[-_MARK_NBYTES:].hex() == offered.mark:
            return mapped
    return None


def withdraw(offered: Offer) -> None:
    """Close the offered file descriptor, so that no other process can open the memory."""
    os.close(offered.descriptor)
