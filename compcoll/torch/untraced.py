"""Functions that torch.compile does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from . import private

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function, reason: str = "") -> Function:
    """Exclude a function and its callees from torch.compile.

    Parameters
    ----------
    function : callable
        A Python function.
    reason : str
        Explanation for users who ask for a full graph.
    """
    private.exclude_from_tracing(function, reason or None)
    return function


def constant(function: Function) -> Function:
    """Make torch.compile call a function when it traces, and treat the result as a constant."""
    private.mark_constant(function)
    return function
