"""The description of a call. Ranks exchange it to check that all make the same call."""

from __future__ import annotations

import os
import re
import sys
from copy import copy
from hashlib import blake2b
from types import FrameType

from ..errors import CollectiveFailed, CollectiveMismatch, CompcollError, ReferenceMismatch

NBYTES = 8
"""Bytes of a fingerprint, in big-endian order."""

TEXT_NBYTES = 512
"""Bytes of a call's one-line description."""

_TWICE = 1 << 8 * NBYTES | 1
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep

FREE, BUSY, ON_GPU = range(3)
"""The levels of a rank in a handshake. The highest level of all ranks decides how the call runs. `BUSY`: the rank has
other collectives to advance, so no rank may block in MPI. `ON_GPU`: so too, and the rank's array is on a GPU; it counts
as `BUSY` unless all ranks have this level. `FREE`: neither.
"""

LEVELS = 3
"""Mask of the fingerprint bits that carry the level."""


def fingerprint(call: str) -> int:
    """Return a 64-bit hash of a call's description. The lowest two bits are 0: they are for the level."""
    return int.from_bytes(blake2b(call.encode(), digest_size=NBYTES).digest(), "little") & ~LEVELS


class Signature:
    """The description of a call that a rank sends the others.

    Parameters
    ----------
    call : str
        One-line description, equal on all ranks if the calls belong together.
    salt : str
        Changes the fingerprint, but not the description.

    Attributes
    ----------
    extremes : tuple of bytes
        For each level, the smallest and the largest fingerprint that this rank knows at first: both are its own.
    """

    def __init__(self, call: str, salt: str = "") -> None:
        self.call = call
        own = fingerprint(call + salt)
        self.extremes = tuple(((own | level) * _TWICE).to_bytes(2 * NBYTES, "big") for level in range(ON_GPU + 1))

    def __str__(self) -> str:
        return self.call

    def here(self) -> Signature:
        """Return a copy that names the caller's file and line."""
        frame = caller()
        made = copy(self)
        made.call = f"{self.call[: TEXT_NBYTES // 2]} at {frame.f_code.co_filename}:{frame.f_lineno}"
        return made


def caller() -> FrameType:
    """Return the frame of the user's code that called this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


_FAILED = re.compile(r"\w+ failed: ")


def unmade(collective: str, error: Exception) -> str:
    """Describe a call that a rank cannot make: it was refused, or it failed, for example for lack of memory."""
    how = "refused" if isinstance(error, CompcollError) else "failed"
    return f"{collective} {how}: {type(error).__name__}: {error}"


def mismatch(calls: list[str], own: int) -> CompcollError:
    """Return the error for ranks that do not make the same call: a line for each distinct call, this rank's marked."""
    lines = _table(calls, own)
    if any(map(_FAILED.match, calls)):
        return CollectiveFailed("\n".join(["not every rank could make its call:", *lines]))
    return CollectiveMismatch("\n".join(["the ranks' calls do not belong together:", *lines]))


def reference_mismatch(call: Signature, checksums: list[bytes], own: int) -> ReferenceMismatch:
    """Return the error for ranks whose previous results have these checksums, this rank's marked."""
    lines = _table([f"{call}, previous values with checksum {each.hex()}" for each in checksums], own)
    remedy = "Make the call once with codec=None, which sends all values to all ranks."
    return ReferenceMismatch("\n".join(["the previous values in out differ between the ranks:", *lines, remedy]))


def _table(calls: list[str], own: int) -> list[str]:
    """Return a line for each distinct call, with the ranks that made it."""
    callers: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        callers.setdefault(call, []).append(rank)
    return [
        f"  rank {', '.join(map(str, ranks))}{' (this one)' if own in ranks else ''}: {call}"
        for call, ranks in callers.items()
    ]
