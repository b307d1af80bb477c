"""Failure detection for a process group without MPI: after an error, find out which ranks wait and which are silent.

A rank that gives up announces this in the group's store. Ranks that are waiting at that time answer there. Each rank
writes and reads in a background thread, because a thread that waits in gloo cannot do anything else. If the store does
not answer, the error is raised without this information.

If a rank dies, only ranks that wait for it lose a connection. These close all their connections, so that ranks that
wait for them notice, too.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import CollectiveFailed, CompcollError, PeerFailed, PeerTimeout
from ..execute.failure_detector import FailureDetector
from ..transports.serialization import packed, unpacked
from . import private
from .background import Background

_GONE = ("onnection closed", "onnection reset", "Broken pipe", "pair closure", "onnection refused")
_LATE = ("imed out", "imeout")
_OWN = "Application timeout"
"""Part of gloo's message for connections that it closed itself, because this rank had waited too long."""

_SECONDS_BETWEEN_POLLS = 0.1
_SECONDS_TO_ANSWER = 2.0
_SECONDS_OF_THE_STORE = 0.4
"""How long the store may take to accept an announcement; shorter than any failure detection."""

_GAVE_UP, _LOST, _WAITS = "gave up", "lost a connection", "waits"


_NO_TAG = 2**31 - 1
"""A tag that no message has."""
_NO_TIME = timedelta(milliseconds=1)


class Board:
    """The messages that the ranks of a group exchange through its store when an operation fails.

    Parameters
    ----------
    store : torch.distributed.Store or None
        Store that is used for nothing else. If None, other ranks are not asked.
    rank, size : int
        Rank of this process in the group, and number of ranks.

    Attributes
    ----------
    backends : WeakSet of torch.distributed.ProcessGroupGloo
        The gloo groups of these ranks whose connections are closed if one is lost.
    waiting : dict
        Descriptions of the operations that this rank waits for at the moment, each under a unique key.
    """

    def __init__(self, store: dist.Store | None, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.backends: weakref.WeakSet[dist.ProcessGroupGloo] = weakref.WeakSet()
        self._closed = False
        self._store = store
        self._received: dict[int, tuple[str, str]] = {}
        self._read = 0
        self.waiting: dict[object, str] = {}
        self._own: tuple[str, str] | None = None
        self._own_since = 0.0
        self._written = False
        self._wanted = False
        if store is None:
            return
        # Skip announcements of an earlier group, which had the same keys in the store if it had the same name.
        while store.check([str(self._read + 1)]):
            self._read += 1
        _watched.add(self)
        _background.start()

    @contextmanager
    def waits(
        self, what: str, peer: int | None = None, *, asks: bool = True, started: float | None = None
    ) -> Iterator[None]:
        """Enclose a wait for a PyTorch operation: convert PyTorch's errors to those of `compcoll.errors`.

        Parameters
        ----------
        what : str
            The operation, for error messages.
        peer : int, optional
            The only rank that is waited for.
        asks : bool
            Whether the operation is over if the wait fails. Only then are the other ranks asked whether they wait.
        started : float, optional
            Time at which the operation began, by `time.monotonic`; now by default.

        Raises
        ------
        PeerTimeout
            If the operation did not end in time; lists the ranks that are not waiting for it.
        PeerFailed
            If a connection was lost, and no rank had given up before.
        CollectiveFailed
            If the operation failed otherwise.
        """
        me, started = object(), time.monotonic() if started is None else started
        self.waiting[me] = what
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CompcollError):
                raise
            raise self._error(error, what, peer, time.monotonic() - started, asks=asks) from error
        finally:
            del self.waiting[me]

    def _error(self, error: RuntimeError, what: str, peer: int | None, seconds: float, *, asks: bool) -> CompcollError:
        said = str(error).partition("\n")[0]
        lost = _is_lost(said) or (self._closed and _OWN in said)
        if not lost and not any(sign in said for sign in _LATE):
            return CollectiveFailed(f"rank {self.rank}, {what}: {said}")
        if not asks or self._store is None:
            if not lost:
                return PeerTimeout(f" Timed out after {seconds:.3g} s: {what}: {said}")
            missing, why = tuple[int, ...](), said
        else:
            self._announce(_LOST if lost else _GAVE_UP, f"waits: {what}")
            if lost:
                self._close()
            found = FailureDetector(self, _SECONDS_TO_ANSWER).ask(what, round(seconds, 1))
            gave_up = any(how == _GAVE_UP for how, _ in tuple(self._received.values()))
            if not lost or not isinstance(found, PeerTimeout) or gave_up:
                return found
            missing, why = found.missing, str(found)
        failed = tuple(rank for rank in missing if len(missing) == 1 or rank == peer)
        which = "another rank" if not failed else f"rank {failed[0]}"
        return PeerFailed(
            f"rank {self.rank} of {self.size} lost the connection to {which}, which has died or left: {why}", failed
        )

    def announce(self, text: str) -> None:
        self._announce(_GAVE_UP, text)

    def announced(self) -> Mapping[int, str]:
        """Return what other ranks have announced so far.

        Raises
        ------
        PeerTimeout
            If the store does not answer.
        """
        self._wanted = True
        late = not self._written and time.monotonic() > self._own_since + _SECONDS_OF_THE_STORE
        if self._own is not None and late:
            raise PeerTimeout(
                f"rank {self.rank} gave up, {self._own[1]}; the missing ranks are unknown, because the process group's "
                "store does not answer"
            )
        return {rank: text for rank, (_, text) in tuple(self._received.items())}

    def failure(self, error: BaseException) -> CompcollError | None:
        """Convert PyTorch's error for an operation that could not start because a connection was lost."""
        if isinstance(error, CompcollError) or not isinstance(error, RuntimeError) or not _is_lost(str(error)):
            return None
        return self._error(error, "a message", None, 0.0, asks=True)

    def abandon(self) -> None:
        """Close this rank's connections, which wakes the ranks that wait for it."""
        self._close()

    def _close(self) -> None:
        self._closed = True
        for gloo in tuple(self.backends):
            _disconnect(gloo)

    def _announce(self, how: str, text: str) -> None:
        if self._own is None and self._store is not None:
            self._own, self._own_since = (how, text), time.monotonic()
            _background.wake()

    def look(self) -> None:
        """Write and read announcements, and answer if this rank waits. Only the background thread calls this."""
        store = self._store
        announces = self._own is not None and not self._written
        if store is None or not (self.waiting or self._wanted or announces):
            return
        self._wanted = False
        if announces:
            assert self._own is not None
            store.set(str(store.add("announcements", 1)), packed((self.rank, *self._own)).decode())
            self._written = True
        while store.check([str(self._read + 1)]):
            self._read += 1
            rank, how, text = unpacked(store.get(str(self._read)))
            if rank != self.rank:
                self._received[rank] = how, text
        waits = next(iter(tuple(self.waiting.values())), None)
        if self._received and self._own is None and waits is not None:
            self._own, self._own_since = (_WAITS, f"waits: {waits}"), time.monotonic()
            self.look()


def _is_lost(said: str) -> bool:
    """Return whether PyTorch's message says that another rank closed a connection."""
    return any(sign in said for sign in _GONE) and _OWN not in said


def _disconnect(gloo: dist.ProcessGroupGloo) -> None:
    """Close the connections to all ranks. Ranks that wait for this one, now or later, lose their connection."""
    # gloo has no call for this, but closes all connections when a wait times out.
    for other in range(gloo.size()):
        if other != gloo.rank():
            with suppress(RuntimeError):
                gloo.recv([torch.empty(1, device="cpu")], other, _NO_TAG).wait(_NO_TIME)


_watched: weakref.WeakSet[Board] = weakref.WeakSet()


def _look_at_boards() -> float:
    for board in tuple(_watched):
        with suppress(Exception):
            board.look()
    return _SECONDS_BETWEEN_POLLS


_background = Background("roll-call", _look_at_boards, ends_at_exit=True)
"""The thread that writes and reads for all boards. It must not be in the store's C++ when the interpreter ends."""

_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, Board] = weakref.WeakKeyDictionary()


def board_of(group: dist.ProcessGroup) -> Board:
    """Return the board of a process group, for operations of its own backends."""
    if (known := _boards.get(group)) is None:
        store = store_of(group)
        if store is not None:
            store = dist.PrefixStore("compcoll roll call", store)
        known = _boards[group] = Board(store, group.rank(), group.size())
    return known


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """Return the store through which a group's ranks found each other, if it has one."""
    known = private.group_entry(group)
    store = known[1] if known is not None else getattr(group, "store", None)
    return store if isinstance(store, dist.Store) else None
