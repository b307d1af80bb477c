"""Persistent requests: collectives whose arguments are checked once and that run many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InvalidArgument
from ..stats import Stats
from .engine import Request


class PersistentRequest(Request):
    """A collective that can be started repeatedly on the same arrays (MPI-4.1, section 6.13).

    All ranks create it together by `compcoll.allreduce_init` or another ``_init`` function, which checks the
    arguments. Every run reads the current values of ``x``, and stores its result in the same array.

    Attributes
    ----------
    stats : Stats
        Statistics of the last run.
    done : bool
        Whether no run is under way.

    Examples
    --------
    >>> x = np.ones(4, np.float32)
    >>> request = compcoll.allreduce_init(x, op="mean")
    >>> for step in range(3):
    ...     mean = request.start().wait()
    >>> request.free()
    """

    def __init__(self, begin: Callable[[PersistentRequest], None], stats: Stats, result: Any) -> None:
        super().__init__()
        self._begin: Callable[[PersistentRequest], None] | None = begin  # holds the arrays
        self._result = result
        self.stats = stats
        self.done = True

    def start(self) -> PersistentRequest:
        """Start a run and return the request.

        Raises
        ------
        InvalidArgument
            If the previous run has not ended, or the request was freed.
        """
        if self._begin is None:
            raise InvalidArgument("start() of a request that was freed: create a new request")
        if not self.done:
            raise InvalidArgument("start() before the last run has ended: wait() first")
        self._begin(self)
        return self

    def has_ended(self, stats: Stats, result: Any) -> None:
        """Store the end of a run that needed no wait."""
        self.stats, self._result, self._error, self.steps = stats, result, None, 0

    def free(self) -> None:
        """Release the arrays. The request cannot be started any more.

        Raises
        ------
        InvalidArgument
            If a run is under way.
        """
        if not self.done:
            raise InvalidArgument("free() before the last run has ended: wait() first")
        self._begin = None
