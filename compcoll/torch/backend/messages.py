"""Point-to-point messages of a process group."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from ...errors import InvalidArgument, InvalidBuffer, PeerTimeout
from ...pending import keep_forever, wait_for
from ...transports.library import MPI
from ..background import Background
from ..buffers import Packed, nbytes_of, on_host
from ..handles import Handle
from ..streams import JobStreams
from ..untraced import untraced
from .gpu import CallOrder, packed
from .operations import bytes_of

_SHORTEST_SLEEP, _LONGEST_SLEEP = 50e-6, 2e-3
_ON_HOST = nullcontext()


class Message(Handle[list[Tensor]]):
    """A send or a receive in progress; the handle that PyTorch returns to its caller.

    `wait` advances the message, and otherwise a background thread does.

    Parameters
    ----------
    request : mpi4py.MPI.Request
        MPI's request.
    packed : Packed
        The tensor, and the memory that was passed to MPI.
    order : CallOrder or None
        Stream order of a tensor on a GPU; None for a tensor in host memory.
    what : str
        Description for error messages.
    sending : bool
        Whether it is a send.
    seconds : float
        Default time-out of a wait.
    """

    def __init__(
        self, request: MPI.Request, packed: Packed, order: CallOrder | None, what: str, *, sending: bool, seconds: float
    ) -> None:
        super().__init__(threading.RLock())
        self._request = request
        self._packed = packed
        self._order = order
        self._what = what
        self._sending = sending
        self._seconds = seconds
        self._status = MPI.Status()

    def test(self) -> bool:
        """Return whether the message has completed."""
        with self._lock:
            if self.done:
                return True
            try:
                with _bound(self._order):
                    if not self._request.Test(self._status):
                        return False
                    self._arrived()
            except MPI.Exception as error:
                self.error = InvalidBuffer(f"{self._what} failed: {error}")
            self._end()
        return True

    is_completed = Test = test

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has completed.

        Raises
        ------
        PeerTimeout
            If it takes too long. A receive is then cancelled.
        InvalidBuffer
            If the received bytes do not fit the tensor.
        """
        self.note_wait(timeout)
        given = 0.0 if timeout is None else timeout.total_seconds()
        seconds = given if given > 0 else self._seconds
        if not self.done:
            try:
                wait_for(self, seconds, self._what)
            except PeerTimeout:
                self._give_up(seconds)
        if self.error is not None:
            raise self.error
        return True

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self._packed.tensors)

    def _arrived(self) -> None:
        if self._sending:
            return
        self.source = self._status.Get_source()
        nbytes, room = self._status.Get_count(MPI.BYTE), nbytes_of(self._packed.memory)
        if nbytes != room:
            self.error = InvalidBuffer(f"{self._what} got {nbytes} bytes, but the tensor has {room} bytes")
        else:
            self._packed.unpack()
            if self._order is not None:
                self._order.finish()

    def _give_up(self, seconds: float) -> None:
        with self._lock:
            if self.test():
                return
            if self._sending:
                keep_forever((self._request, self._packed))
            else:
                with _bound(self._order):
                    self._request.Cancel()
                    self._request.Wait(self._status)
                    if not self._status.Is_cancelled():
                        self._arrived()
                        self._end()
                        return
            self.error = PeerTimeout(f" Timed out after {seconds:g} s: {self._what}")
            self._end()


class _Progress:
    """Advances all pending messages in a background thread."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._nap = _SHORTEST_SLEEP
        self._background = Background("messages", self._advance)

    def add(self, message: Message) -> None:
        self._messages.append(message)
        self._background.wake()

    def _advance(self) -> float | None:
        if MPI.Is_finalized():
            return None
        ended = [message for message in tuple(self._messages) if message.test()]
        for message in ended:
            self._messages.remove(message)
        self._nap = _SHORTEST_SLEEP if ended else min(self._nap * 1.5, _LONGEST_SLEEP)
        return self._nap if self._messages else None


_progress = _Progress()


def _bound(order: CallOrder | None) -> AbstractContextManager[None]:
    return _ON_HOST if order is None else order.bound()


class Messages:
    """Sends and receives among the ranks of a process group.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Communicator that this object takes over.
    seconds : float
        Time-out of a wait.
    """

    def __init__(self, comm: MPI.Intracomm, seconds: float) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.seconds = seconds
        self._comm = comm
        self._size: int = comm.size
        attribute = comm.Get_attr(MPI.TAG_UB)
        self._largest_tag: int = 32767 if attribute is None else attribute
        self._streams = JobStreams()

    def send(self, tensors: Sequence[Tensor], dest: int, tag: int) -> Message:
        """Start sending a tensor."""
        what = f"a send to rank {dest} with tag {tag}"
        return self._start(self._comm.Isend, tensors, self._rank(dest), tag, what, sending=True)

    def receive(self, tensors: Sequence[Tensor], source: int | None, tag: int) -> Message:
        """Start receiving a tensor, from any rank if `source` is None."""
        rank = MPI.ANY_SOURCE if source is None else self._rank(source)
        what = f"a receive from {'any rank' if source is None else f'rank {source}'} with tag {tag}"
        return self._start(self._comm.Irecv, tensors, rank, tag, what, sending=False)

    def free(self) -> None:
        """Free the communicator."""
        if not MPI.Is_finalized():
            self._comm.Free()

    def _start(self, post: Any, tensors: Sequence[Tensor], rank: int, tag: int, what: str, *, sending: bool) -> Message:
        if len(tensors) != 1:
            raise InvalidBuffer(f"{len(tensors)} tensors were given: a send or receive takes one")
        if not 0 <= tag <= self._largest_tag:
            raise InvalidArgument(f"tag={tag}: 0 to {self._largest_tag} are allowed")
        order = None if on_host(tensors[0]) else CallOrder(self._streams, tensors)
        pack = partial(packed, order, tensors, filled=sending)
        memory = pack() if order is None else order.around(pack)
        with _bound(order):
            request = post(bytes_of(memory.memory), rank, tag)
        message = Message(request, memory, order, what, sending=sending, seconds=self.seconds)
        if not message.test():
            _progress.add(message)
        return message

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise InvalidArgument(f"rank {rank} is not in this group, which has the ranks 0 to {self._size - 1}")
        return rank
