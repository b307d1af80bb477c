"""Requests, which stand for collectives under way, and the engine that advances them."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from .. import lifetime
from ..errors import CommunicatorBusy, CompcollError
from ..kernels._host import Collective, poll, sleeps_within
from ..pending import OrderingTicket, Pending, Steps, WaitPolicy, give_way, spin_seconds, start_thread
from ..stats import Stats
from .failure_detector import FailureDetector
from .observation import in_profiles

# As in MPI, progress is for all communicators: a rank that waits in one must advance the others.
under_way: set[Engine] = set()
"""The engines of this process with collectives under way, except private ones, which only their own waits advance."""

_all: weakref.WeakSet[Engine] = weakref.WeakSet()

_SECONDS_AT_THE_END = 2.0

_SPINS_BEFORE_EARLY_SLEEPS, _SHORTEST_SLEEP = 20, 50e-6

_SECONDS_BETWEEN_CHECKS = 0.005
"""Seconds between checks of the timeout and for other ranks' announcements. The latter take an MPI call."""

_SECONDS_BEFORE_SLEEPS, _PART_SLEPT, _LONGEST_SLEEP = 0.5e-3, 0.1, 5e-3
"""Nothing wakes a sleeping rank, so a sleep lasts at most a tenth of the time waited so far."""

_FEW = 64
"""Number of a communicator's oldest collectives that are advanced. Fewer run at once; later ones wait."""


def end_all() -> None:
    """Close every engine, before MPI or the interpreter ends. Collectives under way get two seconds to complete. In a
    forked child, do nothing.
    """
    if lifetime.is_forked():
        return
    for engine in tuple(_all):
        engine.close()
    deadline = time.monotonic() + _SECONDS_AT_THE_END
    for engine in tuple(under_way):
        if (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Exception):
                engine.drain(left)


lifetime.before_end(end_all)


@lru_cache(maxsize=1)
def _end_all_at_exit() -> None:
    atexit.register(end_all)


def _completes(pending: Pending, policy: WaitPolicy | None) -> bool:
    """Test a pending request, or wait for it within a policy. Return whether it has completed."""
    if policy is None:
        return pending.Test()
    return pending.wait(*policy) if isinstance(pending, Collective) else poll(pending.Test, *policy)


def _nothing_to_release(error: BaseException | None) -> BaseException | None:
    return error


class Request:
    """A collective under way on this rank.

    Attributes
    ----------
    stats : Stats
        Statistics of the collective; complete when the request is.
    done : bool
        Whether the collective has ended, successfully or with an error.

    Examples
    --------
    >>> request = compcoll.iallreduce(np.ones(4, np.float32), op="mean")
    >>> total = request.wait()
    >>> request.done, request.stats.collective
    (True, 'allreduce')
    """

    def __init__(self) -> None:
        self.done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.finish: Callable[[Any], Any] | None = None  # converts the result for the caller
        self.range_name = ""  # in profiles; empty if it is not shown
        self.on_end: Callable[[], None] | None = None  # called when it is done, by the thread that advances it

    def begin(
        self,
        steps: Steps,
        stats: Stats,
        engine: Engine,
        *,
        release: Callable[[BaseException | None], BaseException | None],
        timeout: float | None = None,
    ) -> None:
        """Begin a collective that runs as a generator."""
        self.stats = stats
        self.timeout = timeout
        self.done = False
        self.steps = 0
        self.waiting_for: Pending | None = None
        self._steps = steps
        self._engine = engine
        self._release = release
        self._error = None
        self._finished = False  # true a little before `done`, while the result is stored
        self._started = time.perf_counter()
        self._blocked = 0.0

    def test(self) -> bool:
        """Advance without blocking; return whether the collective has ended.

        Raises
        ------
        CompcollError
            If the collective ended with an error.
        """
        if not self.done:
            self._engine.advance()
        if self._error is not None:
            raise self._error
        return self.done

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end and return the result.

        Parameters
        ----------
        timeout : float, optional
            Seconds without any progress after which to raise an error; by default the call's or the communicator's.

        Raises
        ------
        PeerTimeout
            If there was no progress for that long. The communicator cannot be used any more.
        PeerFailed
            If a rank has died, and MPI reports it.
        CompcollError
            If the collective ended with an error.
        """
        if not self.done:
            with in_profiles(f"{self.range_name} wait") if self.range_name else contextlib.nullcontext():
                self._engine.wait(self, self.timeout if timeout is None else timeout)
        if self._error is not None:
            raise self._error
        if self.finish is not None:
            self._result, self.finish = self.finish(self._result), None
        return self._result

    def describe(self) -> str:
        """Return one line that describes the collective and its progress."""
        return f"{self.stats.collective} by {self.stats.algorithm}, after {self.steps} steps"

    def _advance(self, policy: WaitPolicy | None = None) -> bool:
        """Run the steps until a wait exceeds the policy (None: a test fails). Return whether there was progress."""
        if self._finished:
            return False
        pending, steps = self.waiting_for, self.steps
        try:
            while pending is None or _completes(pending, policy):
                if self._blocked:
                    self.stats.wait_seconds += time.perf_counter() - self._blocked
                    self._blocked = 0.0
                self.steps += 1
                pending = self.waiting_for = next(self._steps)
        except StopIteration as end:
            self._finish(end.value, None)
        except Exception as error:
            self._finish(None, error)
        except BaseException as error:
            # An interrupt outside the generator does not end it, so the request can continue.
            if getattr(self._steps, "gi_frame", None) is None:
                self._finish(None, error)
            raise
        else:
            if not self._blocked:
                self._blocked = time.perf_counter()
        return self.steps != steps

    def _finish(self, result: Any, error: BaseException | None) -> None:
        if self._finished:
            return
        self._finished = True
        self.waiting_for = None
        self.stats.total_seconds = time.perf_counter() - self._started
        self._result, self._error = result, self._release(error)
        self._release = _nothing_to_release  # drops a reference to the communicator, for garbage collection
        self.done = True
        if self.on_end is not None:
            self.on_end()


class OneCall:
    """A context for one call of a communicator at a time, since calls share messages and memory.

    Attributes
    ----------
    entered : bool
        Whether a call is in it. Between a test of this and its assignment nothing is called, so no other thread runs.

    Raises
    ------
    CommunicatorBusy
        If a call is in it, of another thread or of one that interrupted.
    """

    __slots__ = ("entered",)

    def __init__(self) -> None:
        self.entered = False

    def __enter__(self) -> None:
        if self.entered:
            raise busy()
        self.entered = True

    def __exit__(self, *error: object) -> None:
        self.entered = False


def busy() -> CommunicatorBusy:
    """Return the error of a call while another one is in `OneCall`."""
    return CommunicatorBusy(
        "another thread is in a call of this communicator: give each thread a Communicator of its own, or let the "
        "threads take turns, in the same order on all ranks"
    )


class Engine:
    """All collectives of a communicator that are under way, in the order in which they were started.

    Parameters
    ----------
    timeout : float
        Seconds that a wait may last.
    threaded : bool
        Whether a thread advances the collectives while the caller does other things.
    crowded : bool
        Whether other work needs this core: ranks that share it, or the network's own work. Unless ``lent``, a waiting
        rank then yields the core after 2 failed polls instead of 50.
    lent : bool
        Whether each poll for a message already yields the core to other work, as MPI does.
    sleeps : bool
        Whether waits sleep after 20 failed polls, because other threads of this process need the core; otherwise they
        sleep after half a millisecond.
    private : bool
        Whether only this engine's own waits advance its collectives, because a test of their messages blocks.
    peers : FailureDetector
        Finds missing ranks when a wait takes too long.

    Attributes
    ----------
    alone, beside : WaitPolicy
        Policies of waits in C++ for the only collective under way. ``beside`` does not sleep; it is used beside MPI's
        own nonblocking collectives, which need polling.
    """

    def __init__(
        self,
        timeout: float,
        peers: FailureDetector,
        *,
        threaded: bool = False,
        crowded: bool = False,
        lent: bool = False,
        sleeps: bool = False,
        private: bool = False,
    ) -> None:
        self.timeout = timeout
        self._peers = peers
        self._spins = 2 if sleeps or (crowded and not lent) else 50
        # Linux 6.18 prefers threads that sleep and wake to threads that yield, which would make almost no progress.
        self._sleeps = sleeps or (crowded and threaded)
        self.alone, self.beside = (self._spins, sleeps_within(timeout)), (self._spins, 0)
        self._private = private
        self.active: deque[Request] = deque()
        self.lock = threading.RLock()
        self._work = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = start_thread("progress", partial(_progress, weakref.ref(self), self._work))
            weakref.finalize(self, self._work.set)
        _all.add(self)
        _end_all_at_exit()

    def start(self, request: Request) -> None:
        """Start a collective, and advance it as far as it goes without waiting."""
        with self.lock:
            self.active.append(request)
            if not self._private:
                under_way.add(self)
            request._advance()
            if request.done:
                self._forget(request)
                return
        if self._thread is not None:
            self._work.set()

    def advance(self) -> bool:
        """Advance each collective as far as possible; return whether any made progress."""
        moved = False
        with self.lock:
            for request in tuple(islice(self.active, _FEW)):
                moved = request._advance() or moved
                if request.done:
                    self._forget(request)
                elif isinstance(request.waiting_for, OrderingTicket):  # all later ones wait for tickets, too
                    break
        return moved

    def drive(self, finished: Callable[[], bool], timeout: float | None, waiting: Callable[[], str]) -> None:
        """Advance the collectives of all communicators (a private engine: only its own) until ``finished()`` is true.

        Raises
        ------
        PeerTimeout, PeerFailed, CommunicatorBroken
            If there is no progress for ``timeout`` seconds, or another rank has given up. All collectives under way in
            this communicator then end with this error.
        """
        limit = self.timeout if timeout is None else timeout
        idle, since = 0, time.monotonic()
        check = since + _SECONDS_BETWEEN_CHECKS
        while not finished():
            moved = False
            for engine in (self,) if self._private else tuple(under_way):
                moved = engine.advance() or moved
            now = time.monotonic()  # after each poll, which takes long if other work has the core
            if moved:
                idle, since = 0, now
                continue
            idle += 1
            if now > check:
                if now > since + limit or self._peers.gave_up():
                    if finished():  # it has just ended, with the error for which a rank gave up
                        return
                    error = self._peers.ask(waiting(), limit)
                    self.fail(error)
                    raise error
                check = now + _SECONDS_BETWEEN_CHECKS
            early = self._sleeps and idle > _SPINS_BEFORE_EARLY_SLEEPS
            if early or now > since + max(_SECONDS_BEFORE_SLEEPS, spin_seconds()):
                time.sleep(min(max((now - since) * _PART_SLEPT, _SHORTEST_SLEEP), _LONGEST_SLEEP))
                continue
            if idle > self._spins:
                give_way()

    def wait(self, request: Request, timeout: float | None) -> None:
        """Advance all collectives until this one has ended, as `drive` does."""
        # A collective that is the only one under way first waits in C++, which costs less.
        while (
            not request.done
            and len(self.active) == 1
            and self._thread is None
            and (self._private or len(under_way) == 1)
        ):
            with self.lock:
                if not request._advance(self.beside if spin_seconds() else self.alone):
                    break
                if request.done:
                    self._forget(request)
        if not request.done:
            try:
                self.drive(lambda: request.done, timeout, request.describe)
            except CompcollError:
                if request._error is None:  # else `Request.wait` raises the request's own error
                    raise

    def fail(self, error: BaseException) -> None:
        """End all collectives under way with this error."""
        with self.lock:
            for request in tuple(self.active):
                request._finish(None, error)
                self._forget(request)

    def _forget(self, request: Request) -> None:
        if request in self.active:  # else `fail` has removed it
            self.active.remove(request)
        if not self.active:
            under_way.discard(self)

    def follow(self, steps: Steps, waiting: object = "a blocking collective", timeout: float | None = None) -> Any:
        """Run a generator to its end and return its result. Each of its waits may take as long as the timeout."""
        while True:
            try:
                pending = next(steps)
            except StopIteration as end:
                return end.value
            if pending is not None and not pending.Test():
                self.drive(pending.Test, timeout, lambda: str(waiting))

    def drain(self, timeout: float | None = None) -> None:
        """Complete all collectives under way."""
        if self.active:
            self.drive(lambda: not self.active, timeout, lambda: "; ".join(r.describe() for r in self.active))

    def close(self) -> None:
        """End the progress thread."""
        self._closed = True
        self._work.set()
        if self._thread is not None:
            self._thread.join()


def _progress(engine_of: Callable[[], Engine | None], work: threading.Event) -> None:
    """Advance the collectives of an engine until it is closed or garbage-collected."""
    while True:
        work.wait()
        work.clear()
        while (engine := engine_of()) is not None and engine.active and not engine._closed:
            # Without progress, a short sleep leaves the GIL and the core to the caller.
            if not engine.advance():
                time.sleep(20e-6)
        if engine is None or engine._closed:
            return
        del engine
