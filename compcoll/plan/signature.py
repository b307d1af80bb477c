"""The description of a call by which ranks find out whether all make the same one."""

from __future__ import annotations

import os
import re
import sys
from hashlib import blake2b

from ..errors import CollectiveFailed, CollectiveMismatch, CompcollError

NBYTES = 8
"""Bytes of a fingerprint, the most significant one first."""

TEXT_NBYTES = 512
"""Bytes of a line on a call."""

_TWICE = 1 << 8 * NBYTES | 1
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep

FREE, BUSY, ON_GPU = range(3)
"""The levels of a rank in a handshake, of which the highest of all ranks counts: nothing in particular; the rank has
other collectives to advance, so that no rank may block in MPI; the same, and its array is on a GPU. `ON_GPU` counts as
`BUSY` unless it is the level of all ranks.
"""

LEVELS = 3
"""The bits of a fingerprint that carry the level."""


def fingerprint(call: str) -> int:
    """64 bits that differ for calls that do not belong together. The lowest two carry the rank's level."""
    return int.from_bytes(blake2b(call.encode(), digest_size=NBYTES).digest(), "little") & ~LEVELS


class Signature:
    """The description of a call that a rank sends the others.

    Parameters
    ----------
    call : str
        One line on it: equal on all ranks when the calls belong together.
    salt : str
        Not in the line, but makes the fingerprint another.

    Attributes
    ----------
    extremes : tuple of bytes
        Smallest and largest fingerprint that a rank knows of at first, by its level.
    """

    __slots__ = ("call", "extremes")

    def __init__(self, call: str, salt: str = "") -> None:
        self.call = call
        own = fingerprint(call + salt)
        self.extremes = tuple(((own | level) * _TWICE).to_bytes(2 * NBYTES, "big") for level in range(ON_GPU + 1))

    def __str__(self) -> str:
        return self.call

    def here(self) -> Signature:
        """The same call, with the line of the program that makes it."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        made = object.__new__(Signature)
        made.call = f"{self.call[: TEXT_NBYTES // 2]} at {frame.f_code.co_filename}:{frame.f_lineno}"
        made.extremes = self.extremes
        return made


_FAILED = re.compile(r"\w+ failed: ")


def unmade(collective: str, error: Exception) -> str:
    """What a rank tells instead of a call that it cannot make: it refuses its arguments, or memory, say, fails it."""
    how = "refused" if isinstance(error, CompcollError) else "failed"
    return f"{collective} {how}: {type(error).__name__}: {error}"


def told_apart(calls: list[str], own: int) -> CompcollError:
    """The error of ranks that do not make the same call."""
    kind = CollectiveFailed if any(map(_FAILED.match, calls)) else CollectiveMismatch
    return kind(table(calls, own))


def table(calls: list[str], own: int) -> str:
    """The error's text: equal calls on one line, this rank's marked."""
    callers: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        callers.setdefault(call, []).append(rank)
    lines = [
        f"  rank {', '.join(map(str, ranks))}{' (this one)' if own in ranks else ''}: {call}"
        for call, ranks in callers.items()
    ]
    unmade = any(map(_FAILED.match, calls))
    head = "not every rank could make its call" if unmade else "the ranks' calls do not belong together"
    return "\n".join([f"{head}:", *lines])
