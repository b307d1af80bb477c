"""Options of codecs: dataclass fields with the allowed values and a short description."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import InvalidArgument


def real(what: str, value: Any) -> float:
    """Convert a setting's value to a float.

    Raises
    ------
    InvalidArgument
        If the value is not a number.
    """
    try:
        return _number(value)
    except ValueError as error:
        raise InvalidArgument(f"{what}={_shown(value)} {error}") from None


def _shown(value: Any) -> str:
    """Return an option's value as text for a message. Python refuses to print integers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "(an integer of thousands of digits)"


def _number(value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError("must be a number")


@dataclass(frozen=True)
class Integers:
    """Integers from ``low`` to ``high`` that are multiples of ``multiple``.

    As in `Reals` and `OneOf`, ``checked`` returns the value in the form that codecs store, or raises a `ValueError`
    with the reason. ``str`` describes the allowed values.
    """

    low: int
    high: int
    multiple: int = 1

    def checked(self, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            raise ValueError("must be an integer") from None
        if not self.low <= number <= self.high or number % self.multiple:
            raise ValueError(f"must be {self}")
        return number

    def __str__(self) -> str:
        kind = "an integer" if self.multiple == 1 else f"a multiple of {self.multiple}"
        power = self.high.bit_length()
        return f"{kind} from {self.low} to {f'2**{power} - 1' if power >= 32 else self.high}"


@dataclass(frozen=True)
class Reals:
    """Finite numbers above ``low`` (``closed``: or equal to it) and up to ``high``."""

    low: float
    high: float = math.inf
    closed: bool = False

    def checked(self, value: Any) -> float:
        number = _number(value)
        if not (self.low < number <= self.high or (self.closed and number == self.low)) or math.isinf(number):
            raise ValueError(f"must be {self}")
        return number

    def __str__(self) -> str:
        if self.closed:
            return f"from {self.low:g} to {self.high:g}"
        return f"above {self.low:g} and {'finite' if math.isinf(self.high) else f'at most {self.high:g}'}"


@dataclass(frozen=True)
class OneOf:
    """A fixed set of names or numbers."""

    values: tuple[Any, ...]

    def checked(self, value: Any) -> Any:
        if not any(type(known) is type(value) and known == value for known in self.values):
            names = [f'"{known}"' if isinstance(known, str) else str(known) for known in self.values]
            raise ValueError(
                f"is neither {' nor '.join(names)}" if len(names) == 2 else f"is none of {', '.join(names)}"
            )
        return value

    def __str__(self) -> str:
        *names, last = (str(known) for known in self.values if known is not None)
        return f"{', '.join(names)} or {last}" if names else last


# Bits of a code.
BITS = Integers(1, 8)

# Values of a block: a multiple of 8, so that packed codes fill whole bytes.
BLOCK = Integers(8, 1 << 20, 8)

# Values of a block whose sums must be exact.
SHORT_BLOCK = Integers(8, 1 << 16, 8)

# The seed of random numbers.
SEED = Integers(0, (1 << 64) - 1)


def option(default: Any, limits: Integers | Reals | OneOf, text: str, *, on_command_line: bool = True) -> Any:
    """Return a field of a codec's dataclass. Its value is checked when a codec is made, and command lines offer it.

    Parameters
    ----------
    default
        The default value; None means that the option may be omitted.
    limits : Integers, Reals or OneOf
        The allowed values.
    text : str
        A short description for help texts.
    on_command_line : bool
        Whether command lines offer the option.
    """
    return field(default=default, metadata={"limits": limits, "text": text, "on_command_line": on_command_line})


def check_options(codec: Any) -> None:
    """Check a new codec's options and store them in their normal form, so that equal codecs have the same ``repr``.

    Raises
    ------
    InvalidArgument
        If a value is not allowed.
    """
    for one in type(codec).__dataclass_fields__.values():
        limits = one.metadata.get("limits")
        if limits is None or ((value := getattr(codec, one.name)) is None and one.default is None):
            continue
        try:
            object.__setattr__(codec, one.name, limits.checked(value))
        except ValueError as error:
            raise InvalidArgument(f"{codec.name}: {one.name}={_shown(value)} {error}") from None


def set_one_mode(codec: Any, name: str, value: Any) -> None:
    """Check that at most one option of a new codec is set, and if none is, set this one.

    Raises
    ------
    InvalidArgument
        If several are set.
    """
    given = [one.name for one in fields(codec) if getattr(codec, one.name)]
    if len(given) > 1:
        raise InvalidArgument(f"{codec.name}: {' and '.join(given)} exclude each other: give one")
    if not given:
        object.__setattr__(codec, name, value)


def repr_of_mode(codec: Any) -> str:
    """Return the ``repr`` of a codec of which one option is set: only that one is shown."""
    mode = next(one.name for one in fields(codec) if getattr(codec, one.name))
    return f"{type(codec).__name__}({mode}={getattr(codec, mode)!r})"
