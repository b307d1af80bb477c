"""Errors of the hooks of back-propagation: they end ``backward()`` as themselves.

An error in a future that a hook gives DistributedDataParallel comes out of ``backward()`` as text of a RuntimeError. So
the future ends well, and the error is raised when all hooks are through, behind DDP's own end of the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Value = TypeVar("Value")


class HookErrors:
    """What ended the hooks of one model's pass of back-propagation.

    Attributes
    ----------
    error : BaseException or None
        The first of the last pass; None if there was none.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Begin a pass, in its first hook."""
        self.error = None

    def instead(self, job: Callable[[], Value], value: Value) -> Callable[[], Value]:
        """Make a job that ends with a value where it would have raised: the pass raises that at its end.

        Outside of one, where DDP runs hooks for a rank that has joined, the job raises it.
        """
        in_pass = torch._C._current_graph_task_id() != -1

        def run() -> Value:
            try:
                return job()
            except Exception as error:
                self.error = self.error or error
                if not in_pass:
                    raise
                return value

        return run

    def end(self) -> None:
        """Have the pass raise what there is, at its end; called by its last hook."""
        if torch._C._current_graph_task_id() == -1:
            return
        engine = torch.autograd.Variable._execution_engine
        # DDP has its own end called after this hook's first callback, but before one that is added then.
        engine.queue_callback(lambda: engine.queue_callback(self._raise))

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
