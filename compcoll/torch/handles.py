"""Handles of operations, as PyTorch's `Work`: base classes, completed operations, and several operations as one.

A handle has a C++ half and a Python half, and the C++ half does nothing alone. C++ code that holds a handle, such as
DDP's reducer in `Join`, keeps only the C++ half alive. So this module keeps a handle alive if Python drops it before
any code has waited for it or requested its future.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from . import private
from .failure_detector import Board
from .untraced import untraced

Value = TypeVar("Value")

_unasked: deque[dist.Work] = deque(maxlen=64)
"""The last dropped handles that no code had waited for. C++ may hold one for each model that is joining."""
_waited: deque[dist.Work] = deque(maxlen=2)
"""The last dropped handles that only C++ had waited for; it may request the future next. Few, to free tensors soon."""


class Lasting(dist.Work):
    """Base class of all handles, which keeps them alive while C++ may hold them.

    Attributes
    ----------
    asked : bool
        Whether Python has waited for the operation, or its future was requested.
    waited : bool
        Whether C++ has waited for it.
    """

    asked = waited = False

    def __del__(self) -> None:
        if not self.asked:
            (_waited if self.waited else _unasked).append(self)  # alive again; __del__ runs once (PEP 442)

    def note_wait(self, timeout: timedelta | None) -> None:
        """Record a wait. C++ always passes a time-out, and 0 for no limit; a wait without one counts as Python's."""
        if timeout is None:
            self.asked = True
        else:
            self.waited = True


class Handle(Lasting, Generic[Value]):
    """An operation in progress. The thread that completes it sets `error`, then calls `_end`.

    Parameters
    ----------
    lock : lock
        Held while the operation completes, and while its future is requested.

    Attributes
    ----------
    done : bool
        Whether the operation has completed, successfully or not.
    error : BaseException or None
        Why it failed.
    source : int
        The rank whose message a receive got; -1 for other operations.
    """

    done = False
    error: BaseException | None = None
    source = -1
    _completion: Future[None] | None = None
    _future: Future[Value] | None = None

    def __init__(self, lock: threading.Lock | threading.RLock) -> None:
        super().__init__()
        self._lock = lock

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion, and raise the operation's error."""

    @abstractmethod
    def result(self) -> Value:
        """Wait for completion, and return the tensors."""

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Return the rank whose message a receive from any source got."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[Value]:
        """Return a future of the result; it raises the operation's error.

        Callbacks run in the thread that completes the operation.
        """
        self.asked = True
        with self._lock:
            fresh = self._future is None
            if fresh:
                # The reducer of DDP survives an error raised by a callback, but not one set in the future itself.
                self._completion = self._new_future()
                self._future = self._completion.then(lambda _: self.result())
            completion, future, ended = self._completion, self._future, self.done
        assert completion is not None and future is not None
        if fresh and ended:
            completion.set_result(None)
        return future

    def _new_future(self) -> Future[None]:
        return Future()

    def _end(self) -> None:
        with self._lock:
            self.done = True
            completion = self._completion
        self._let_go()
        if completion is not None:
            completion.set_result(None)

    def _let_go(self) -> None:
        """Wake threads that wait."""


class Followed(Lasting):
    """Handle of an operation of PyTorch's own backends, which raises errors of `compcoll.errors`.

    Parameters
    ----------
    work : torch.distributed.Work
        The operation.
    board : Board
        Reports the missing ranks if the operation fails.
    what : str
        The operation, for error messages.
    finish : callable, optional
        Makes the result from the data that arrived, and returns its tensors. It is called once, at the first wait.
    """

    def __init__(
        self, work: dist.Work, board: Board, what: str, finish: Callable[[], list[Tensor]] | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._waits = partial(board.waits, what, started=time.monotonic())
        self._finish = finish
        self._made: list[Tensor] | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        self.note_wait(timeout)
        own = timeout or None  # C++ passes 0 for none
        try:
            with self._waits(asks=own is None):
                self._work.wait(*() if own is None else (own,))
        except Exception as error:
            self._error = error
            raise
        self._finished()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self._work.synchronize()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._work.result() if self._made is None else self._made

    def source_rank(self) -> int:
        return private.source_rank(self._work)

    _source_rank = source_rank

    @untraced
    def get_future(self) -> Future[Any]:
        """Return a future of the result."""
        self.asked = True
        waiting = ExitStack()
        waiting.enter_context(self._waits())

        def ended(future: Future[Any]) -> Any:
            with waiting:
                value = future.value()
            made = self._finished()
            return value if made is None else made

        return self._work.get_future().then(ended)

    def _finished(self) -> list[Tensor] | None:
        with self._lock:
            if self._finish is not None:
                self._made, self._finish = self._finish(), None
            return self._made


class CompletedWork(Handle[None]):
    """An operation that has completed successfully."""

    done = True

    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.note_wait(timeout)
        return True

    def result(self) -> None:
        return None


class CoalescedWork(Lasting):
    """Several operations as one.

    Parameters
    ----------
    works : sequence of torch.distributed.Work
        The operations.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.note_wait(timeout)
        for work in self._works:
            work.wait(*() if timeout is None else (timeout,))
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[list[Future[list[Tensor]]]]:
        self.asked = True
        return collect_all([work.get_future() for work in self._works])
