"""Compare compressed collectives with MPI's own, in the manner of the OSU micro-benchmarks and nccl-tests."""

from __future__ import annotations


class UsageError(Exception):
    """Raised for invalid arguments. The message says what is allowed."""
