"""Jobs that run one after another in the order in which they were submitted, the same on every rank.

MPI matches collectives by their order. PyTorch starts them from several threads: the caller's, the autograd engine's,
and whichever completes a future with callbacks. An `Engine` puts them in one line. Whoever waits for a job takes the
thread's place and runs the line up to it, so that a call that is waited for at once costs no change of threads.

A job submitted from inside a job or from a callback of its future runs at once, in front of the line (depth first): a
communication hook that chains collectives by callbacks, like PyTorch's PowerSGD, then has the same order on all ranks,
whether its callbacks run in the thread that submits or in the one that completes.

Waking a thread costs more than a small collective. So the engine's thread, once it had work, looks for more every now
and then before it sleeps, and a job is left for it to find; the less often, the longer others do all the jobs, since a
look disturbs them. Whoever asks for a future will not run the job: then, and when it sleeps, the thread is woken.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import Any

from torch._C._distributed_c10d import Work as _Work
from torch.futures import Future

from ..errors import CommunicatorBroken, PeerTimeout

_SECONDS_AT_THE_END = 2.0
_SHORTEST_NAP, _LONGEST_NAP, _LOOKS = 100e-6, 2e-3, 20

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@lru_cache(maxsize=1)
def _end_all_at_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """End the threads before MPI ends; what is under way may end within two seconds."""
    for engine in tuple(_engines):
        engine.close(_SECONDS_AT_THE_END)


class Done(_Work):
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

    def get_future(self) -> Any:
        """A `torch.futures.Future` of nothing, which has ended."""
        future: Any = Future()
        future.set_result(None)
        return future


class Work(_Work):
    """A job submitted to an `Engine`; PyTorch's handle of an asynchronous operation.

    Parameters
    ----------
    job : callable
        What to run; its value becomes the future's.
    engine : Engine
        Where it runs.

    Attributes
    ----------
    crossing : Crossing, InOrder or None
        Of tensors on a GPU, whose streams go on after the job.
    """

    done = False
    crossing: Any = None
    value: Any = None
    error: BaseException | None = None
    source = -1
    _completion: Any = None
    _future: Any = None

    def __init__(self, job: Callable[[], Any], engine: Engine) -> None:
        super().__init__()
        self.job: Callable[[], Any] | None = job
        self._engine = engine
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self) -> None:
        """Do the job. The engine calls this, once."""
        assert self.job is not None
        try:
            self.value = self.job()
        except BaseException as error:
            self.error = error
        self.job = None
        with self._engine.lock:
            self.done = True
            completion = self._completion
        self._ended.release()
        if completion is not None:
            completion.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the job.

        Parameters
        ----------
        timeout : datetime.timedelta, optional
            For this wait; without one the job's own time-outs hold.

        Raises
        ------
        PeerTimeout
            If it has not ended by then.
        Exception
            What the job raised.
        """
        seconds = -1.0 if timeout is None else timeout.total_seconds()
        if not self.done:
            self._engine.finish(self, seconds)
        self._conclude()
        return True

    def await_end(self, seconds: float) -> bool:
        """Block until another thread has done the job; whether it was in time (negative: no limit)."""
        if not self._ended.acquire(timeout=seconds if seconds > 0 else -1):
            return False
        self._ended.release()
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> Any:
        """The tensors of the result."""
        self.wait()
        return self.value

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """The rank that a receive from any source heard from."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A `torch.futures.Future` of the job's value; it raises what the job raised.

        Callbacks run in the thread that ends the job.
        """
        with self._engine.lock:
            fresh = self._future is None
            if fresh:
                # The reducer of DDP survives an error raised by a callback, but not one set in the future itself.
                self._completion = Future() if self.crossing is None else Future(devices=self.crossing.devices)
                self._future = self._completion.then(self._deliver)
            ended = self.done
        if fresh and ended:
            self._completion.set_result(None)
        elif not ended:
            self._engine.ring()
        return self._future

    def _deliver(self, _: Any) -> Any:
        self._conclude()
        return self.value

    def _conclude(self) -> None:
        if self.error is not None:
            raise self.error
        if self.crossing is not None:
            self.crossing.order()


class Engine:
    """Runs jobs in their order, in a thread of its own or in that of whoever waits.

    Use one for each MPI communicator. The thread starts with the first job that is not waited for at once.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, name: str = "compcoll") -> None:
        self.lock = threading.Lock()
        self._name = name
        self._line: deque[Work] = deque()
        self._turn = threading.Lock()
        self._owner = 0
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._rung = False
        self._asleep = True
        self._used = False
        self._closed = False
        self._thread: threading.Thread | None = None
        _engines.add(self)
        _end_all_at_exit()

    def submit(self, job: Callable[[], Any]) -> Work:
        """Put a job at the end of the line and return at once.

        Parameters
        ----------
        job : callable
            Without arguments. Calls of MPI in it may block.

        Returns
        -------
        Work
            With ``wait()`` and ``get_future()``.
        """
        work = self._enter(job)
        self._used = True
        if self._asleep and not work.done:
            self.ring()
        return work

    def run(self, job: Callable[[], Any]) -> Any:
        """Run a job and all those in front of it; in this thread unless another is at it already.

        Returns
        -------
        object
            What the job returned.
        """
        if self._line or self._closed or not self._turn.acquire(False):
            return self._enter(job).result()
        self._owner = threading.get_ident()
        try:
            return job()
        finally:
            self._owner = 0
            self._turn.release()

    def finish(self, work: Work, seconds: float = -1.0) -> None:
        """Wait for a job's end, and take part.

        Raises
        ------
        PeerTimeout
            If it takes longer than a positive number of seconds.
        """
        if self._owner == threading.get_ident():
            self._drain(work)
        elif seconds <= 0 and self._turn.acquire(blocking=False):
            self._own_and_drain(work)
        else:
            self.ring()
            started = time.monotonic()
            if not work.await_end(seconds):
                raise PeerTimeout(
                    f" Timed out after {time.monotonic() - started:.3g} s waiting for an operation to end"
                )

    def close(self, seconds: float | None = None) -> None:
        """End the thread when the line is empty, or after so many seconds."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            return
        self._bell.put(False)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _enter(self, job: Callable[[], Any]) -> Work:
        if self._closed:
            raise CommunicatorBroken("this process group was destroyed")
        work = Work(job, self)
        if self._owner == threading.get_ident():
            work.run()
        else:
            self._line.append(work)
        return work

    def _own_and_drain(self, until: Work | None) -> None:
        """With the turn taken: run the line, then give the turn back."""
        self._owner = threading.get_ident()
        try:
            self._drain(until)
        finally:
            self._owner = 0
            self._turn.release()

    def _drain(self, until: Work | None) -> None:
        while self._line and (until is None or not until.done):
            self._line.popleft().run()

    def ring(self) -> None:
        """Have the thread look at the line now."""
        if self._rung:
            return
        self._rung = True
        self._bell.put(True)
        if self._thread is None:
            with self.lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()

    def _serve(self) -> None:
        looks, nap, wanted = 0, _SHORTEST_NAP, True
        while wanted or self._line:
            nap = min(2 * nap, _LONGEST_NAP)
            if self._line:
                self._turn.acquire()
                self._own_and_drain(None)
                nap = _SHORTEST_NAP
            looks = 0 if self._used else looks + 1
            self._used = False
            # Who submits sees that the thread is asleep, or the thread sees the job.
            self._asleep = looks > _LOOKS
            if self._line:
                continue
            try:
                wanted = self._bell.get(timeout=None if self._asleep else nap)
                self._rung, looks = False, 0
            except Empty:
                pass
            self._asleep = False
