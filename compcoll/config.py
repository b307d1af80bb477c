"""Settings from environment variables."""

from __future__ import annotations

import os
import threading

from . import deprecated
from .errors import InvalidArgument

TIMEOUT = "COMPCOLL_TIMEOUT"
THREADS = "COMPCOLL_THREADS"
INSTRUCTION_SET = "COMPCOLL_INSTRUCTION_SET"
SEGMENT = "COMPCOLL_SEGMENT"
PROFILE = "COMPCOLL_PROFILE"
DEBUG = "COMPCOLL_DEBUG"
LOG = "COMPCOLL_LOG"
CODEC = "COMPCOLL_CODEC"
RATE = "COMPCOLL_RATE"
ALGORITHM = "COMPCOLL_ALGORITHM"
GPU_AWARE = "COMPCOLL_GPU_AWARE"
NVTX = "COMPCOLL_NVTX"
CUBINS = "COMPCOLL_CUBINS"
TRACE = "COMPCOLL_TRACE"

NO_PROFILE = "defaults"

DEFAULT_TIMEOUT = 1800.0
DEFAULT_SEGMENT = 1 << 20
DEFAULT_SEGMENT_ON_GPUS = 8 << 20
DEFAULT_SEGMENT_BETWEEN_NODES = 1 << 19  # small: the network idles during the first encoding and last decoding
_LONGEST_SEGMENT = 1 << 21
_LARGEST = 1e15
_LARGEST_SEGMENT = 1 << 28  # wires may be longer than the values, and MPI counts bytes with an int
_MOST_THREADS = 4096
_MESSAGES_BETWEEN_NODES = (
    1 << 17,
    1 << 18,
)  # for longer messages MPI uses a rendezvous, and the receiver's answer waits behind its own data
_MESSAGES_OF_GROUPS = (1 << 19, 1 << 20)  # gloo uses a rendezvous for each message, so few long ones are faster


def _number(variable: str, default: float, lowest: float, highest: float = _LARGEST) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not lowest <= value <= highest:
        raise InvalidArgument(
            f"{variable}={text!r} in the environment: a number from {lowest:g} to {highest:g} is needed"
        )
    return value


def timeout(given: float | None = None) -> float:
    """Return the seconds that a wait may last: ``given``, else COMPCOLL_TIMEOUT, else 1800."""
    if given is None:
        given = _number(TIMEOUT, DEFAULT_TIMEOUT, 0.0)
    elif not isinstance(given, int | float) or not given >= 0:
        raise InvalidArgument(f"timeout={given!r}: a number of seconds, 0 or more, is needed")
    return float(min(given, threading.TIMEOUT_MAX))


def timeout_is_set() -> bool:
    """Return whether COMPCOLL_TIMEOUT is set."""
    return bool(os.environ.get(TIMEOUT))


def debug() -> bool:
    """Return whether to record where in the program each collective was called (COMPCOLL_DEBUG=1, default no)."""
    return bool(_switch(DEBUG))


def log_level() -> str:
    """Return the level from which messages are printed on stderr: INFO, DEBUG, or empty (COMPCOLL_LOG)."""
    level = os.environ.get(LOG, "")
    if level not in ("", "INFO", "DEBUG"):
        raise InvalidArgument(f"{LOG}={level!r} in the environment: INFO or DEBUG is needed")
    return level


def threads(share: float) -> int:
    """Return the threads for each kernel: COMPCOLL_THREADS, else this process's ``share`` of cores, rounded down."""
    return int(_number(THREADS, max(int(share), 1), 1, _MOST_THREADS))


def segment_nbytes(nodes: int = 1, ratio: float = 1.0, *, blocks: bool = False) -> int:
    """Return the uncompressed bytes of a segment, the unit of overlap.

    COMPCOLL_SEGMENT, if set. Else 1 MiB inside a node. Between nodes 512 KiB, adjusted to the compression ``ratio`` so
    that a message has 128 to 256 KiB, but at most 2 MiB. With ``blocks``, for transports without a nonblocking test, a
    message has 512 to 1024 KiB.
    """
    shortest, longest = _MESSAGES_OF_GROUPS if blocks else _MESSAGES_BETWEEN_NODES
    between = int(min(max(DEFAULT_SEGMENT_BETWEEN_NODES, ratio * shortest), ratio * longest, _LONGEST_SEGMENT))
    return int(_number(SEGMENT, DEFAULT_SEGMENT if nodes == 1 else between, 1, _LARGEST_SEGMENT))


def segment_nbytes_on_gpus() -> int:
    """Return the uncompressed bytes of a segment if all ranks' arrays are on GPUs.

    COMPCOLL_SEGMENT; by default 8 MiB, since each segment costs the host launches and copies.
    """
    return int(_number(SEGMENT, DEFAULT_SEGMENT_ON_GPUS, 1, _LARGEST_SEGMENT))


def profile() -> str:
    """Return the path of a profile, "defaults", or "" for the profile that `tune` stored (COMPCOLL_PROFILE)."""
    return os.environ.get(PROFILE, "")


def codec() -> str | None:
    """Return the codec for PyTorch's process groups, with its options (COMPCOLL_CODEC; formerly COMPCOLL_RATE)."""
    codec, rate = os.environ.get(CODEC) or None, os.environ.get(RATE)
    if not rate:
        return codec
    if codec is None:
        raise InvalidArgument(f"{RATE} is set in the environment, but {CODEC} is not: set {CODEC}=zfp:rate={rate}")
    codec += f"{',' if ':' in codec else ':'}rate={rate}"
    deprecated.warn(RATE, f"{CODEC}={codec}")
    return codec


def algorithm() -> str | None:
    """Return the algorithm for PyTorch's process groups (COMPCOLL_ALGORITHM, default None: "auto")."""
    return os.environ.get(ALGORITHM) or None


def _switch(variable: str) -> bool | None:
    text = os.environ.get(variable)
    if text not in (None, "", "0", "1"):
        raise InvalidArgument(f"{variable}={text!r} in the environment: 0 or 1 is needed")
    return text == "1" if text else None


def gpu_aware() -> bool | None:
    """Return whether MPI accepts GPU memory (COMPCOLL_GPU_AWARE); None if the variable is not set."""
    return _switch(GPU_AWARE)


def nvtx() -> bool:
    """Return whether to mark steps with NVTX ranges for profilers (COMPCOLL_NVTX, default no)."""
    return bool(_switch(NVTX))


def cubins() -> str:
    """Return the folder of compiled CUDA kernels (COMPCOLL_CUBINS, default empty: a folder in the user's cache)."""
    return os.environ.get(CUBINS, "")


def trace() -> str:
    """Return the folder for timelines of collectives (COMPCOLL_TRACE, default empty: none are written)."""
    return os.environ.get(TRACE, "")


def instruction_set(supported: list[str]) -> str:
    """Return the kernels' instruction set (COMPCOLL_INSTRUCTION_SET, default the best that the CPU supports)."""
    name = os.environ.get(INSTRUCTION_SET) or supported[-1]
    if name not in supported:
        raise InvalidArgument(f"{INSTRUCTION_SET}={name!r} in the environment: this CPU can run {', '.join(supported)}")
    return name
