"""Settings read from the environment, each in one place."""

from __future__ import annotations

import os
from typing import Any

from .errors import InvalidArgument

TIMEOUT = "COMPCOLL_TIMEOUT"
THREADS = "COMPCOLL_THREADS"
INSTRUCTION_SET = "COMPCOLL_INSTRUCTION_SET"
SEGMENT = "COMPCOLL_SEGMENT"
PROFILE = "COMPCOLL_PROFILE"
CODEC = "COMPCOLL_CODEC"
RATE = "COMPCOLL_RATE"

NO_PROFILE = "defaults"

DEFAULT_TIMEOUT = 1800.0
DEFAULT_SEGMENT = 1 << 20
DEFAULT_SEGMENT_BETWEEN_NODES = 1 << 19  # a network idles while the first one is encoded and the last one decoded


def _number(variable: str, default: float, lowest: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not lowest <= value < float("inf"):
        raise InvalidArgument(f"{variable}={text!r} in the environment: a number of at least {lowest:g} is needed")
    return value


def timeout(given: float | None = None) -> float:
    """Seconds that a wait may last: those given, else COMPCOLL_TIMEOUT, else 1800."""
    if given is None:
        return _number(TIMEOUT, DEFAULT_TIMEOUT, 0.0)
    if not isinstance(given, int | float) or not given >= 0:
        raise InvalidArgument(f"timeout={given!r}: a number of seconds, 0 or more, is needed")
    return given


def threads(local_ranks: int) -> int:
    """Threads for each kernel (COMPCOLL_THREADS, else this process's share of the cores that it may run on)."""
    return int(_number(THREADS, max(cores() // max(local_ranks, 1), 1), 1))


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def segment_nbytes(nodes: int = 1) -> int:
    """Uncompressed bytes of a segment, the unit of overlap (COMPCOLL_SEGMENT, default 1 MiB; 512 KiB between nodes)."""
    return int(_number(SEGMENT, DEFAULT_SEGMENT if nodes == 1 else DEFAULT_SEGMENT_BETWEEN_NODES, 1))


def profile() -> str:
    """A file with a measured profile, or "defaults" (COMPCOLL_PROFILE, default empty: the one that `tune` stored)."""
    return os.environ.get(PROFILE, "")


def codec() -> tuple[str | None, dict[str, Any]]:
    """Name and options of the codec for PyTorch's process groups (COMPCOLL_CODEC, COMPCOLL_RATE; default none)."""
    name = os.environ.get(CODEC) or None
    if not os.environ.get(RATE):
        return name, {}
    if name is None:
        raise InvalidArgument(f"{RATE} is set in the environment, but {CODEC} is not")
    rate = _number(RATE, 0.0, 0.0)
    return name, {"rate": int(rate) if rate.is_integer() else rate}


def instruction_set(supported: list[str]) -> str:
    """Name of the kernels' instruction set (COMPCOLL_INSTRUCTION_SET, default the best that the CPU has)."""
    name = os.environ.get(INSTRUCTION_SET) or supported[-1]
    if name not in supported:
        raise InvalidArgument(f"{INSTRUCTION_SET}={name!r} in the environment: this CPU can run {', '.join(supported)}")
    return name
