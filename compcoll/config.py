"""Settings read from the environment, each in one place."""

from __future__ import annotations

import os

from .errors import InvalidArgument

TIMEOUT = "COMPCOLL_TIMEOUT"
THREADS = "COMPCOLL_THREADS"
INSTRUCTION_SET = "COMPCOLL_INSTRUCTION_SET"
SEGMENT = "COMPCOLL_SEGMENT"

DEFAULT_TIMEOUT = 1800.0
DEFAULT_SEGMENT = 1 << 20


def _number(variable: str, default: float, lowest: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= lowest:
        raise InvalidArgument(f"{variable}={text!r} in the environment: a number of at least {lowest:g} is needed")
    return value


def timeout() -> float:
    """Seconds that a wait may last (COMPCOLL_TIMEOUT, default 1800)."""
    return _number(TIMEOUT, DEFAULT_TIMEOUT, 0.0)


def threads(local_ranks: int) -> int:
    """Threads for each kernel (COMPCOLL_THREADS, else this process's share of the cores that it may run on)."""
    return int(_number(THREADS, max(cores() // max(local_ranks, 1), 1), 1))


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def segment_nbytes() -> int:
    """Uncompressed bytes of a segment, the unit of overlap (COMPCOLL_SEGMENT, default 1 MiB)."""
    return int(_number(SEGMENT, DEFAULT_SEGMENT, 1))


def instruction_set(supported: list[str]) -> str:
    """Name of the kernels' instruction set (COMPCOLL_INSTRUCTION_SET, default the best that the CPU has)."""
    name = os.environ.get(INSTRUCTION_SET) or supported[-1]
    if name not in supported:
        raise InvalidArgument(f"{INSTRUCTION_SET}={name!r} in the environment: this CPU can run {', '.join(supported)}")
    return name
