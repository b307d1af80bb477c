"""What a rank is told by a call that cannot end well, and how soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from compcoll.errors import (
    CollectiveFailed,
    CompcollError,
)

WORLD = MPI.COMM_WORLD
X = np.ones(50_000, np.float32)
TIMEOUT = 1.0
SOON = TIMEOUT + 10.0  # other work may want the cores, and a machine may stand still


def told(call: Callable[[], Any], *kinds: type[CompcollError], within: float = SOON) -> str:
    """What a call raises, which must be one of these, in time."""
    begin, error = time.monotonic(), None
    try:
        call()
    except CompcollError as raised:
        error = raised
    seconds = time.monotonic() - begin
    assert type(error) in kinds, repr(error)
    assert seconds < within, (seconds, error)
    if isinstance(error, CollectiveFailed):
        assert error.__cause__ is not None and f"rank {WORLD.rank}" in str(error), repr(error)
    return f"{type(error).__name__}: {error}"
