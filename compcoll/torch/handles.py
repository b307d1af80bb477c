"""PyTorch's handles of operations: what they have in common, those that have ended, and several as one."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work as _Work
from torch.futures import Future, collect_all

from .untraced import untraced

Value = TypeVar("Value")


class Handle(_Work, Generic[Value]):
    """An operation under way: whoever ends it sets `error`, then calls `_end`.

    Parameters
    ----------
    lock : lock
        Taken while it ends, and while somebody asks for its future.

    Attributes
    ----------
    done : bool
        Whether it has ended, well or not.
    error : BaseException or None
        Why it failed.
    source : int
        The rank that a receive heard from; -1 if it is none.
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
        """Wait for the end; raises the operation's error."""

    @abstractmethod
    def result(self) -> Value:
        """Wait for the end, and return the tensors."""

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Tell the rank that a receive from any source heard from."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[Value]:
        """Make a future of the result; it raises what the operation raised.

        Callbacks run in the thread that ends the operation.
        """
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
        """Wake those that wait in other threads."""


class Followed(_Work):
    """PyTorch's handle of an operation whose result is made, of what came, by who waits.

    Parameters
    ----------
    work : torch.distributed.Work
        The operation.
    finish : callable
        Makes the result, once, and returns its tensors.
    """

    def __init__(self, work: dist.Work, finish: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self._work = work
        self._finish: Callable[[], list[Tensor]] | None = finish
        self._made: list[Tensor] = []
        self._lock = threading.Lock()

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(*() if timeout is None else (timeout,))
        self._finished()
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    @untraced
    def get_future(self) -> Future[list[Tensor]]:
        """Make a future of the result."""
        future: Future[list[Tensor]] = self._work.get_future().then(self._finished)
        return future

    def _finished(self, _: object = None) -> list[Tensor]:
        with self._lock:
            if self._finish is not None:
                self._made, self._finish = self._finish(), None
            return self._made


class CompletedWork(_Work):
    """PyTorch's handle of operations that have ended, and well."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        pass

    def get_future(self) -> Future[None]:
        """Make a future of nothing, which has ended."""
        future: Future[None] = Future()
        future.set_result(None)
        return future


class CoalescedWork(_Work):
    """Several operations as one.

    Parameters
    ----------
    works : sequence of torch.distributed.Work
        The operations.
    """

    def __init__(self, works: Sequence[_Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
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
        return collect_all([work.get_future() for work in self._works])
