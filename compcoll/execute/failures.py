"""What a collective ends with that is none of compcoll's errors, such as MPI's, as one that is."""

from __future__ import annotations

from typing import Any

from ..errors import CollectiveFailed, CompcollError
from .compiled_plan import CompiledPlan


def as_failure(error: BaseException, rank: int, *parts: Any) -> BaseException:
    """Return an error that says which rank and call it is of, and has what was raised as its cause; one of compcoll's,
    and what is no error but an interrupt, as it is.

    Parameters
    ----------
    error : BaseException
        What a collective ended with.
    rank : int
        Of this process.
    *parts
        What belongs to the call: its compiled plan, or the collective's name, among others.
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
