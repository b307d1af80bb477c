"""Types of arguments of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .errors import UsageError


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type of argparse's that keeps the message of a `UsageError`."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def at_least(low: float, number: Callable[[str], float]) -> Callable[[str], float]:
    """A number that is not below a limit.

    Parameters
    ----------
    low : float
        The limit.
    number : callable
        int or float.
    """

    def parse(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = low - 1
        if not value >= low:
            kind = "an integer" if number is int else "a number"
            raise UsageError(f"{text!r}: {kind} of at least {low:g} is needed")
        return value

    parsed: Callable[[str], float] = argument(parse)
    return parsed
