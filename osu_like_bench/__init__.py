"""Benchmarks in the manner of the OSU micro-benchmarks and nccl-tests: compressed collectives against MPI's own."""

from __future__ import annotations


class UsageError(Exception):
    """Arguments that cannot be right; the message says what is allowed."""
