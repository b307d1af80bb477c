"""Memory that the ranks of a node have in common: an unnamed file in memory, of which nothing stays behind."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from typing import Any, NamedTuple

_NAME = "compcoll"
_NBYTES_EACH = 3 * (256 * 1024 + 4096)
_MOST_NBYTES = 32 << 20
_MARK_NBYTES = 16


class Shared(NamedTuple):
    """Memory of some ranks, filled with zeros at first; what of it nobody uses takes no room.

    Attributes
    ----------
    memory : buffer
        The memory.
    rank, ranks : int
        This rank's place among them, and how many they are.
    """

    memory: Any
    rank: int
    ranks: int


class Offer(NamedTuple):
    """Where another process finds a file in memory, and by what it knows that it is the one."""

    process: int
    descriptor: int
    nbytes: int
    mark: bytes


def memory(ranks: int, descriptor: int = -1) -> mmap.mmap:
    """Memory for so many ranks, of this process alone unless the file of a descriptor is given."""
    return mmap.mmap(descriptor, size(ranks))


def size(ranks: int) -> int:
    """Bytes for so many ranks, and a mark."""
    return min(ranks * _NBYTES_EACH, _MOST_NBYTES) + _MARK_NBYTES


def offer(ranks: int) -> tuple[mmap.mmap, Offer] | None:
    """Memory for so many ranks, and where the others find it until it is withdrawn; None where the system has no files
    in memory.
    """
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.memfd_create(_NAME)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, descriptor)
            os.ftruncate(descriptor, size(ranks))
            mapped = memory(ranks, descriptor)
            mark = secrets.token_bytes(_MARK_NBYTES)
            mapped[-_MARK_NBYTES:] = mark
            failed.pop_all()
        return mapped, Offer(os.getpid(), descriptor, len(mapped), mark)
    return None


def accept(offered: Offer) -> mmap.mmap | None:
    """The memory that another process of this node offers; None where it cannot be reached: in another container."""
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
        if mapped[-_MARK_NBYTES:] == offered.mark:
            return mapped
    return None


def withdraw(offered: Offer) -> None:
    """Let nobody else find the memory."""
    os.close(offered.descriptor)
