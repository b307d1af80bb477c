"""The arguments of mpi4py's collectives, read as those of compcoll's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..gpu.discovery import synchronize
from ..transports.library import MPI
from .messages import Message, is_in_place, read, read_blocks


class Caller(Protocol):
    """A communicator whose method was called.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    _least : int
        The bytes below which messages are left to MPI.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def _least(self) -> int: ...

    def _agree(self, *messages: Message | None, ratio: int | None = 1) -> bool:
        """Return whether all ranks can have a call compressed; see `Intracomm._agree`."""
        ...


class Call(NamedTuple):
    """A collective that compcoll runs.

    Attributes
    ----------
    collective : str
        Its name.
    x, param, out : array, Any, array or None
        Its arguments; see `Communicator.call`.
    root : int
        The root, if the collective has one.
    store : callable or None
        Stores the result where the program expects it, if that is not ``out``.
    """

    collective: str
    x: Any
    param: Any
    out: Any
    root: int = 0
    store: Callable[[Any], None] | None = None

    def end(self, result: Any) -> None:
        """Store the result. On a GPU, wait until it is there: MPI's results can be read on any stream."""
        if self.store is not None:
            self.store(result)
        if not isinstance(self.x, np.ndarray):
            synchronize(self.x)


Reader = Callable[..., Call | None]
"""Reads the arguments of a method of a communicator; returns None if the call is left to MPI."""


def _sum(
    comm: Caller, sendbuf: Any, recvbuf: Any, op: MPI.Op, ratio: int = 1, blocks: int = 1
) -> tuple[Any, Any] | None:
    """Return the input and the result of a sum; None if it is left to MPI.

    Parameters
    ----------
    comm, sendbuf, recvbuf, op
        The method's arguments.
    ratio : int
        The length of the input divided by that of the result.
    blocks : int
        The blocks of the input, if a count is that of one block.
    """
    if op != MPI.SUM:
        return None
    if is_in_place(sendbuf):
        message = read(recvbuf, comm._least, blocks)
        return None if message is None or message.values is None else (message.values, message.values)
    received = read(recvbuf, -(-comm._least // ratio))
    sent = None if received is None or received.values is None else read(sendbuf, 0, blocks)
    if received is None or sent is None or sent.values is None or sent.values.dtype != received.values.dtype:
        return None
    return (sent.values, received.values) if sent.nbytes == ratio * received.nbytes else None


def allreduce(comm: Caller, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: Any = None) -> Call | None:
    if (found := _sum(comm, sendbuf, recvbuf, op)) is None:
        return None
    return Call("allreduce", found[0], "sum", found[1])


def reduce(
    comm: Caller, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, info: Any = None
) -> Call | None:
    root = operator.index(root)
    if not 0 <= root < comm.size:
        return None  # MPI refuses it
    if comm.rank == root:
        found = _sum(comm, sendbuf, recvbuf, op)
        return None if found is None else Call("reduce", found[0], ("sum", root), found[1], root)
    sent = read(sendbuf, comm._least)
    if sent is None or sent.values is None or op != MPI.SUM:
        return None
    return Call("reduce", sent.values, ("sum", root), None, root)


def reduce_scatter_block(
    comm: Caller, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: Any = None
) -> Call | None:
    found = _sum(comm, sendbuf, recvbuf, op, comm.size, comm.size)
    return None if found is None else _scattered(comm, *found)


def reduce_scatter(
    comm: Caller,
    sendbuf: Any,
    recvbuf: Any,
    recvcounts: Sequence[int] | None = None,
    op: MPI.Op = MPI.SUM,
    info: Any = None,
) -> Call | None:
    counts = [] if recvcounts is None else [operator.index(count) for count in recvcounts]
    if len(counts) != comm.size or len(set(counts)) != 1:
        return None  # blocks of which only this rank knows, or uneven ones
    found = _sum(comm, sendbuf, recvbuf, op, comm.size)
    if found is None or found[0].size not in (factor * comm.size * counts[0] for factor in (1, 2)):
        return None  # a complex element is a pair
    return _scattered(comm, *found)


def _scattered(comm: Caller, x: Any, out: Any) -> Call:
    if x is not out:
        return Call("reduce_scatter", x, "sum", out)
    block = out[: out.size // comm.size]  # MPI's place for a result in place
    return Call("reduce_scatter", x, "sum", None, store=partial(_copy, block))


def bcast(comm: Caller, buf: Any, root: int = 0) -> Call | None:
    root = operator.index(root)
    message = read(buf)
    if not comm._agree(message) or message is None:
        return None
    # MPI reads the root's buffer alone, which may therefore be read-only.
    out = message.values if getattr(message.values.flags, "writeable", True) or comm.rank != root else None
    return Call("bcast", message.values, root, out, root)


def allgather(comm: Caller, sendbuf: Any, recvbuf: Any) -> Call | None:
    received = read(recvbuf, blocks=comm.size)
    sent = _own_block(comm, received) if is_in_place(sendbuf) else read(sendbuf)
    if not comm._agree(sent, received, ratio=comm.size) or sent is None or received is None:
        return None
    return Call("allgather", sent.values, None, received.values.reshape(comm.size, -1))


def gather(comm: Caller, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call | None:
    root = operator.index(root)
    received = read(recvbuf, blocks=comm.size) if comm.rank == root else None
    sent = read(sendbuf) if received is None or not is_in_place(sendbuf) else _own_block(comm, received)
    if comm.rank != root:
        return Call("gather", sent.values, root, None, root) if comm._agree(sent) and sent is not None else None
    if not comm._agree(sent, received, ratio=comm.size) or sent is None or received is None:
        return None
    return Call("gather", sent.values, root, received.values.reshape(comm.size, -1), root)


def scatter(comm: Caller, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call | None:
    root = operator.index(root)
    sent = read(sendbuf, blocks=comm.size) if comm.rank == root else None
    in_place = is_in_place(recvbuf) and sent is not None
    received = _own_block(comm, sent) if in_place else read(recvbuf)
    if received is not None and not isinstance(received.values, np.ndarray):
        received = None  # other ranks have no array on a GPU of which only the shape is used
    if comm.rank != root:
        if not comm._agree(received) or received is None:
            return None
        like = np.empty(comm.size * received.values.size, received.values.dtype)  # of which no value is read
        return Call("scatter", like, root, received.values, root)
    if not comm._agree(received, sent, ratio=comm.size) or received is None or sent is None:
        return None
    return Call("scatter", sent.values, root, None if in_place else received.values, root)


def alltoall(comm: Caller, sendbuf: Any, recvbuf: Any) -> Call | None:
    received = read(recvbuf, blocks=comm.size)
    sent = received if is_in_place(sendbuf) else read(sendbuf, blocks=comm.size)
    if not comm._agree(sent, received) or sent is None or received is None:
        return None
    return Call("alltoall", sent.values.copy() if sent is received else sent.values, None, received.values)


def allgatherv(comm: Caller, sendbuf: Any, recvbuf: Any) -> Call | None:
    received = read_blocks(recvbuf, comm.size)
    sent = _own_block(comm, received) if is_in_place(sendbuf) else read(sendbuf)
    if not comm._agree(sent, received, ratio=None) or sent is None or received is None:
        return None
    return Call("allgatherv", sent.values, None, None, store=received.store)


def gatherv(comm: Caller, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call | None:
    root = operator.index(root)
    received = read_blocks(recvbuf, comm.size) if comm.rank == root else None
    sent = read(sendbuf) if received is None or not is_in_place(sendbuf) else _own_block(comm, received)
    messages = (sent, received) if comm.rank == root else (sent,)
    if not comm._agree(*messages, ratio=None) or sent is None:
        return None
    counts = tuple(sent.values.size if rank == root else 0 for rank in range(comm.size))
    return Call("alltoallv", sent.values, counts, None, root, _ignore if received is None else received.store)


def scatterv(comm: Caller, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call | None:
    root = operator.index(root)
    sent = read_blocks(sendbuf, comm.size) if comm.rank == root else None
    in_place = is_in_place(recvbuf) and sent is not None
    received = _own_block(comm, sent) if in_place else read(recvbuf)
    messages = (received, sent) if comm.rank == root else (received,)
    if not comm._agree(*messages, ratio=None) or received is None:
        return None
    x, counts = (received.values[:0], [0] * comm.size) if sent is None else (sent.joined(), sent.counts)
    store = _ignore if in_place else partial(_copy, received.values)
    return Call("alltoallv", x, tuple(counts or ()), None, root, store)


def alltoallv(comm: Caller, sendbuf: Any, recvbuf: Any) -> Call | None:
    received = read_blocks(recvbuf, comm.size)
    sent = received if is_in_place(sendbuf) else read_blocks(sendbuf, comm.size)
    if not comm._agree(sent, received, ratio=None) or sent is None or received is None:
        return None
    return Call("alltoallv", sent.joined(), tuple(sent.counts or ()), None, store=received.store)


def _own_block(comm: Caller, message: Message | None) -> Message | None:
    """Return this rank's block of a message in place, a copy."""
    if message is None or message.values is None:
        return message
    if message.counts is None or message.displacements is None:
        count = message.values.size // comm.size
        at = comm.rank * count
    else:
        count, at = message.counts[comm.rank], message.displacements[comm.rank]
    values = message.values[at : at + count].copy()
    return Message(values.nbytes, values)


def _copy(out: Any, result: Any) -> None:
    out[:] = result


def _ignore(result: Any) -> None:
    pass
