"""Deprecated names, which work until version 0.4 with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that a name is deprecated, and name the new one."""
    warnings.warn(
        f"{old} is deprecated and will be removed in compcoll 0.4: use {new}", DeprecationWarning, stacklevel + 1
    )


def renamed_arguments(**names: str) -> Callable[[Function], Function]:
    """Return a decorator that accepts keyword arguments by their former names.

    Parameters
    ----------
    **names : str
        The new name for each former name.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def accepting(*args: Any, **given: Any) -> Any:
            for old in names.keys() & given.keys():
                warn(f"{old}=", f"{names[old]}=", stacklevel=2)
                given[names[old]] = given.pop(old)
            return function(*args, **given)

        return accepting  # type: ignore[return-value]

    return decorate


def renamed_attribute(old: str, new: str) -> Any:
    """Return a property that reads and writes the attribute by its new name."""

    def get(owner: Any) -> Any:
        warn(f".{old}", f".{new}", stacklevel=2)
        return getattr(owner, new)

    def put(owner: Any, value: Any) -> None:
        warn(f".{old}", f".{new}", stacklevel=2)
        setattr(owner, new, value)

    return property(get, put, doc=f"Former name of `{new}`.")
