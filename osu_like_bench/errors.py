"""What goes wrong on purpose."""

from __future__ import annotations


class UsageError(Exception):
    """Arguments that cannot be right; the message says what is allowed."""
