"""Point-to-point messages of a process group."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache

import torch
from torch import Tensor

from ...devices.captures import use_thread_local_capture_mode
from ...errors import InvalidArgument, InvalidBuffer, PeerTimeout
from ...progress import THREADS, keep_forever
from ...transports.library import MPI
from ..buffers import Packed, check, nbytes_of, on_host
from ..handles import Handle
from ..untraced import untraced
from .channel import poll
from .gpu_aware import GPUPacked, gpu_for_mpi, streams
from .gpu_copies import StagedTensor, gpu_of, staging_streams
from .mpi_buffers import bytes_of

_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 2e-3


class Message(Handle[list[Tensor]]):
    """A message under way; PyTorch's handle of a send or a receive.

    It advances when it is waited for, and by a thread otherwise.

    Parameters
    ----------
    request : mpi4py.MPI.Request
        MPI's handle.
    packed : Packed or StagedTensor
        The tensor and the memory that MPI was given.
    what : str
        For messages about errors.
    sending : bool
        Whether it is a send.
    seconds : float
        Until a wait gives up.
    """

    def __init__(
        self, request: MPI.Request, packed: Packed | StagedTensor, what: str, *, sending: bool, seconds: float
    ) -> None:
        super().__init__(threading.RLock())
        self._request = request
        self._packed = packed
        self._what = what
        self._sending = sending
        self._seconds = seconds
        self._status = MPI.Status()

    def test(self) -> bool:
        """Tell whether the message is through."""
        with self._lock:
            if self.done:
                return True
            try:
                with self._packed.bound():
                    if not self._request.Test(self._status):
                        return False
                    self._arrived()
            except MPI.Exception as error:
                self.error = InvalidBuffer(f"{self._what} failed: {error}")
            self._end()
        return True

    is_completed = test

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is through.

        Raises
        ------
        PeerTimeout
            If it takes too long. A receive is then cancelled.
        InvalidBuffer
            If what came does not fit.
        """
        self.note_wait(timeout)
        given = 0.0 if timeout is None else timeout.total_seconds()
        seconds = given if given > 0 else self._seconds
        if not self.done and not poll(self.test, seconds):
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
            self.error = InvalidBuffer(f"{self._what}: {nbytes} bytes came for a tensor of {room}")
        else:
            self._packed.unpack()

    def _give_up(self, seconds: float) -> None:
        with self._lock:
            if self.test():
                return
            if self._sending:
                keep_forever((self._request, self._packed))
            else:
                with self._packed.bound():
                    self._request.Cancel()
                    self._request.Wait(self._status)
                    if not self._status.Is_cancelled():
                        self._arrived()
                        self._end()
                        return
            self.error = PeerTimeout(f" Timed out after {seconds:g} s: {self._what}")
            self._end()


class _Progress:
    """Advances messages that nobody waits for."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._work = threading.Event()
        threading.Thread(target=self._advance, name=f"{THREADS}messages", daemon=True).start()

    def add(self, message: Message) -> None:
        self._messages.append(message)
        self._work.set()

    def _advance(self) -> None:
        nap = _SHORTEST_NAP
        while True:
            self._work.wait()
            self._work.clear()
            while self._messages and not MPI.Is_finalized():
                if torch.cuda.is_initialized():
                    use_thread_local_capture_mode()
                remaining = [message for message in tuple(self._messages) if not message.test()]
                ended = [message for message in tuple(self._messages) if message.done]
                for message in ended:
                    self._messages.remove(message)
                nap = _SHORTEST_NAP if ended else min(nap * 1.5, _LONGEST_NAP)
                if remaining:
                    time.sleep(nap)


@lru_cache(maxsize=1)
def _progress() -> _Progress:
    return _Progress()


class Messages:
    """Sends and receives among the ranks of a process group.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Becomes theirs.
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
        self._stream = streams()

    def send(self, tensors: Sequence[Tensor], dest: int, tag: int) -> Message:
        """Start to send a tensor."""
        packed = self._packed(tensors, tag, filled=True)
        with packed.bound():
            request = self._comm.Isend(bytes_of(packed.memory), self._rank(dest), tag)
        return self._start(request, packed, f"a send to rank {dest} with tag {tag}", sending=True)

    def receive(self, tensors: Sequence[Tensor], source: int | None, tag: int) -> Message:
        """Start to receive a tensor, from any rank if none is given."""
        packed = self._packed(tensors, tag, filled=False)
        rank = MPI.ANY_SOURCE if source is None else self._rank(source)
        with packed.bound():
            request = self._comm.Irecv(bytes_of(packed.memory), rank, tag)
        sender = "any rank" if source is None else f"rank {source}"
        return self._start(request, packed, f"a receive from {sender} with tag {tag}", sending=False)

    def free(self) -> None:
        """Give the communicator back."""
        if not MPI.Is_finalized():
            self._comm.Free()

    def _start(self, request: MPI.Request, packed: Packed | StagedTensor, what: str, *, sending: bool) -> Message:
        message = Message(request, packed, what, sending=sending, seconds=self.seconds)
        if not message.test():
            _progress().add(message)
        return message

    def _packed(self, tensors: Sequence[Tensor], tag: int, *, filled: bool) -> Packed | StagedTensor:
        if len(tensors) != 1:
            raise InvalidBuffer(f"{len(tensors)} tensors were given: one is sent at a time")
        if not 0 <= tag <= self._largest_tag:
            raise InvalidArgument(f"tag={tag}: 0 to {self._largest_tag} are allowed")
        if on_host(tensors[0]):
            return Packed(tensors, filled=filled)
        if (gpu := gpu_for_mpi(tensors)) is not None:
            return GPUPacked(gpu, self._stream(gpu), tensors[0], filled=filled)
        if (gpu := gpu_of(tensors)) is not None:
            return StagedTensor(staging_streams(gpu), tensors[0], filled=filled)
        check(tensors[0])
        return Packed(tensors, filled=filled)

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise InvalidArgument(f"rank {rank} is not in this group: 0 to {self._size - 1}")
        return rank
