"""Types of command-line arguments: numbers, message sizes, and names separated by commas."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from compcoll.errors import CompcollError
from compcoll.tools.arguments import doubling, parse_bytes

from .errors import UsageError

SMALLEST, LARGEST = 1, 1 << 20
"""OSU's defaults of the smallest and the largest size, in bytes."""

Range = tuple[int | None, int | None]
"""Smallest and largest size; None where the user left it open."""


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a type for argparse that keeps the message of a `UsageError`."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (UsageError, CompcollError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def at_least(low: float, number: Callable[[str], float]) -> Callable[[str], float]:
    """Make a type for argparse that accepts numbers, int or float, from a limit on."""

    def parse(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = low - 1
        if not value >= low:
            kind = "an integer" if number is int else "a number"
            raise UsageError(f"{text!r}: {kind} of at least {low:g} is needed")
        return value

    return argument(parse)


def known_names(text: str, known: Iterable[str], complaint: str) -> list[str]:
    """Split names at commas.

    Parameters
    ----------
    text : str
        The argument.
    known : iterable of str
        The names that exist.
    complaint : str
        The error's message for any other name, with ``{name!r}`` and ``{known}`` in it.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(complaint.format(name=name, known=", ".join(known)))
    return names


def parse_ranges(text: str) -> tuple[Range, ...]:
    """Parse ranges and single sizes, separated by commas."""
    return tuple(parse_range(part) for part in text.split(","))


def parse_range(text: str) -> Range:
    """Parse ``MIN:MAX``, ``MIN:``, ``:MAX`` or one size."""
    low, colon, high = text.partition(":")
    first, last = (parse_bytes(part) if part else None for part in (low, high))
    if not colon:
        last = first
    if first is None and last is None:
        raise UsageError(f"{text!r} is not a range of sizes: MIN:MAX, MIN:, :MAX or one size is needed")
    if first is not None and last is not None and first > last:
        raise UsageError(f"{text!r}: the smallest size is larger than the largest")
    return first, last


def sweeps(ranges: Sequence[Range], itemsize: int, smallest: int = SMALLEST, largest: int = LARGEST) -> list[int]:
    """List all sizes of some ranges: in each, from the smallest, doubling, to the largest.

    Parameters
    ----------
    ranges : sequence of Range
        As `parse_ranges` returns them.
    itemsize : int
        Bytes of an element, of which sizes are multiples.
    smallest, largest : int
        Where a range is open.
    """
    sizes: list[int] = []
    for low, high in ranges:
        low = max(smallest, itemsize) if low is None else low
        high = max(largest, low) if high is None else high
        if low % itemsize:
            rounded = -(-low // itemsize) * itemsize
            raise UsageError(f"size {low} is not a multiple of the element's {itemsize} bytes: give {rounded}")
        if low > high:
            raise UsageError(f"no sizes from {low} to {high} bytes: the smallest is one element, {itemsize} bytes")
        sizes += doubling(low, high)
    return sizes
