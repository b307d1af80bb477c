"""A collective under way, for whoever started it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..kernels._host import poll
from ..stats import Stats
from .steps import Patience, Pending, Steps

if TYPE_CHECKING:
    from .engine import Engine


class Ended:
    """The end of a collective under way, as something to wait for."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def Test(self) -> bool:
        return self._request.done


def _nothing_to_release(error: BaseException | None) -> BaseException | None:
    return error


class Request:
    """A collective under way on this rank.

    Attributes
    ----------
    stats : Stats
        What it did; complete when the request is.
    done : bool
        Whether it has ended, well or with an error.

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
        self.finish: Callable[[Any], Any] | None = None  # what makes the result that the caller gets

    def begin(
        self,
        steps: Steps,
        stats: Stats,
        engine: Engine,
        *,
        release: Callable[[BaseException | None], BaseException | None],
        timeout: float | None = None,
    ) -> None:
        """Begin to wait for some steps."""
        self.stats = stats
        self.timeout = timeout
        self.done = False
        self.steps = 0
        self.waiting_for: Pending | None = None
        self._steps = steps
        self._engine = engine
        self._release = release
        self._error = None
        self._finished = False  # and about to be done
        self._started = time.perf_counter()
        self._blocked = 0.0

    def test(self) -> bool:
        """Advance without blocking; tell whether the collective has ended.

        Raises
        ------
        CompcollError
            If it ended with an error.
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
            Seconds without any progress after which to give up; by default those of the call, or the communicator's.

        Raises
        ------
        PeerTimeout
            If nothing came for that long: the communicator cannot be used any more.
        PeerFailed
            If a rank has died, and MPI tells.
        CompcollError
            If the collective ended with an error.
        """
        if not self.done:
            self._engine.wait(self, self.timeout if timeout is None else timeout)
        if self._error is not None:
            raise self._error
        if self.finish is not None:
            self._result, self.finish = self.finish(self._result), None
        return self._result

    def describe(self) -> str:
        """One line on what it is and waits for."""
        return f"{self.stats.collective} by {self.stats.algorithm}, after {self.steps} steps"

    def _advance(self, patience: Patience | None = None) -> bool:
        """Go on until something must be waited for, with so much patience; tell whether there was any progress."""
        if self._finished:
            return False
        pending, steps = self.waiting_for, self.steps
        try:
            while pending is None or (pending.Test() if patience is None else poll(pending.Test, *patience)):
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
            # An interrupt while the steps waited has left them as they were.
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
        self._release = _nothing_to_release  # it has the communicator, which would never be collected
        self.done = True
