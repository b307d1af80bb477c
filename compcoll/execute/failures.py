"""Conversion of other errors that end a collective, such as MPI's, to `CompcollError`."""

from __future__ import annotations

from typing import Any

from ..errors import CollectiveFailed, CompcollError
from .compiled_plan import CompiledPlan


def as_failure(error: BaseException, rank: int, *parts: Any) -> BaseException:
    """Return an error that names the rank and the call, with the given error as its cause. A `CompcollError` or an
    interrupt is returned unchanged.

    Parameters
    ----------
    error : BaseException
        The error that ended a collective.
    rank : int
        This process's rank.
    *parts
        Objects of the call. The first `CompiledPlan` or name of a collective among them names the call in the message.
    """
    if isinstance(error, CompcollError) or not isinstance(error, Exception):
        return error
    calls = [part.plan.signature.call if isinstance(part, CompiledPlan) else part for part in parts]
    call = next((call for call in calls if isinstance(call, str)), "a collective")
    kind = "MPI" if type(error).__module__.startswith("mpi4py") else type(error).__name__
    said = str(error).partition("\n")[0].removesuffix(", error stack:")
    failure = CollectiveFailed(f"rank {rank}, {call}: {kind}: {said}")
    failure.__cause__ = error
    return failure
