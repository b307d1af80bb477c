"""Jobs that run one after another in the order of their submission, which is the same on every rank.

MPI matches collectives by their order. PyTorch starts them from several threads: the caller's, the autograd engine's,
and any thread that completes a future with callbacks. A `JobQueue` orders them. A thread that waits for a job runs the
queue up to that job itself, so a call that is waited for at once needs no change of threads.

A job submitted from inside a job, or from a callback of its future, runs at once, before queued jobs (depth first). So
a communication hook that chains collectives by callbacks, like PyTorch's PowerSGD, has the same order on all ranks,
whether its callbacks run in the submitting or in the completing thread.

Waking a thread costs more than a small collective. So the queue's thread, once it had work, polls the queue for some
time before it sleeps, and finds jobs without being woken. It polls less often the longer other threads run all jobs,
since polling disturbs them. It is woken if it sleeps, or if a future is requested, whose caller does not run the job.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch.futures import Future

from ..errors import CommunicatorBroken, PeerTimeout
from .background import Background
from .handles import Handle
from .streams import StreamOrder
from .untraced import untraced

_SHORTEST_SLEEP, _LONGEST_SLEEP, _LOOKS = 100e-6, 2e-3, 20


class Work(Handle[Any]):
    """A job submitted to a `JobQueue`; also PyTorch's handle of an asynchronous operation.

    Parameters
    ----------
    job : callable
        Function to run; its return value becomes the future's value.
    jobs : JobQueue
        Queue that runs it.

    Attributes
    ----------
    ended : threading.Event
        Set when the job has ended.
    stream_order : StreamOrder or None
        Place of the job between earlier and later work on a GPU's streams, if it works on tensors there.
    """

    stream_order: StreamOrder | None = None
    value: Any = None

    def __init__(self, job: Callable[[], Any], jobs: JobQueue) -> None:
        super().__init__(jobs.lock)
        self.job: Callable[[], Any] | None = job
        self._jobs = jobs
        self.ended = threading.Event()

    def run(self) -> None:
        """Run the job. The queue calls this once."""
        assert self.job is not None
        try:
            self.value = self.job()
        except BaseException as error:
            self.error = error
        self.job = None
        self._end()

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the job has ended.

        Parameters
        ----------
        timeout : datetime.timedelta, optional
            Limit of this wait; without it, the job's own time-outs apply.

        Raises
        ------
        PeerTimeout
            If the job has not ended by then.
        Exception
            The error that the job raised.
        """
        self.note_wait(timeout)
        if not self.done:
            self._jobs.finish(self, -1.0 if timeout is None else timeout.total_seconds())
        if self.error is not None:
            raise self.error
        if self.stream_order is not None:
            self.stream_order.order()
        return True

    def _let_go(self) -> None:
        self.ended.set()

    def result(self) -> Any:
        self.wait()
        return self.value

    @untraced
    def get_future(self) -> Future[Any]:
        future = super().get_future()
        if not self.done:
            self._jobs.background.wake()
        return future

    def _new_future(self) -> Future[None]:
        return Future() if self.stream_order is None else Future(devices=self.stream_order.devices)


class JobQueue:
    """Runs jobs in order, in its own thread or in a thread that waits for a job.

    Use one queue for each MPI communicator. The thread starts with the first job that is not waited for at once.

    Parameters
    ----------
    name : str
        Name of the thread, after the prefix of all threads of compcoll.

    Attributes
    ----------
    background : Background
        The thread.
    """

    def __init__(self, name: str = "jobs") -> None:
        self.lock = threading.Lock()
        self._line: deque[Work] = deque()
        self._ticket = threading.Lock()
        self._owner = 0
        self.background = Background(name, self._look, ends_at_exit=True)
        self._looks, self._nap = 0, _SHORTEST_SLEEP
        self._asleep = True
        self._used = False
        self._closed = False

    def submit(self, job: Callable[[], Any], order: StreamOrder | None = None) -> Work:
        """Append a job to the queue and return at once.

        Parameters
        ----------
        job : callable
            Called without arguments. It may make blocking MPI calls.
        order : StreamOrder, optional
            Stream order of a job on GPU tensors.

        Returns
        -------
        Work
            Handle with ``wait()`` and ``get_future()``.
        """
        work = self._enter(job, order)
        self._used = True
        if self._asleep and not work.done:
            self.background.wake()
        return work

    def run(self, job: Callable[[], Any], order: StreamOrder | None = None) -> Any:
        """Run a job after all jobs before it; in this thread unless another thread is running the queue.

        Returns
        -------
        object
            The job's return value.
        """
        if order is not None or self._line or self._closed or not self._ticket.acquire(False):
            return self._enter(job, order).result()
        return self._as_owner(job)

    def finish(self, work: Work, seconds: float = -1.0) -> None:
        """Wait until a job has ended; without a limit, run queued jobs meanwhile unless another thread does.

        Raises
        ------
        PeerTimeout
            If the job takes longer than a positive number of seconds.
        """
        if self._owner == threading.get_ident():
            self._drain(work)
        elif seconds <= 0 and self._ticket.acquire(blocking=False):
            self._as_owner(partial(self._drain, work))
        else:
            self.background.wake()
            started = time.monotonic()
            if not work.ended.wait(seconds if seconds > 0 else None):
                raise PeerTimeout(
                    f" Timed out after {time.monotonic() - started:.3g} s waiting for an operation to end"
                )

    def close(self, seconds: float | None = None) -> None:
        """End the thread when the queue is empty; wait at most `seconds` for that."""
        self._closed = True
        self.background.close(seconds)

    def _enter(self, job: Callable[[], Any], order: StreamOrder | None) -> Work:
        if self._closed:
            raise CommunicatorBroken("this process group was destroyed")
        work = Work(job if order is None else partial(order.around, job), self)
        work.stream_order = order
        if self._owner == threading.get_ident():
            work.run()
        else:
            self._line.append(work)
        return work

    def _as_owner(self, work: Callable[[], Any]) -> Any:
        """Run some work as the thread that holds the ticket, then release the ticket."""
        self._owner = threading.get_ident()
        try:
            return work()
        finally:
            self._owner = 0
            self._ticket.release()

    def _drain(self, until: Work | None = None) -> None:
        while self._line and (until is None or not until.done):
            self._line.popleft().run()

    def _look(self) -> float | None:
        """Run the queue in its thread; return the seconds until the next poll, or None to sleep."""
        self._asleep = False
        self._nap = min(2 * self._nap, _LONGEST_SLEEP)
        if self._line:
            self._ticket.acquire()
            self._as_owner(self._drain)
            self._nap = _SHORTEST_SLEEP
        self._looks = 0 if self._used else self._looks + 1
        self._used = False
        # This order loses no job: a submitting thread sees that this thread sleeps and wakes it, or this thread sees
        # the job below.
        self._asleep = self._looks > _LOOKS
        if self._line:
            return 0.0
        return None if self._asleep else self._nap
