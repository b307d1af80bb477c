"""Common command-line arguments: codecs and their options, sizes, durations and speeds."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

from ..codecs import Codec
from ..codecs.options import OneOf
from ..codecs.registry import codec_classes, get_codec, is_own, kind_of
from ..errors import InvalidArgument
from ..layout import amount as amount
from ..plan.cost import Link

# Codec options whose names clash with options of the commands.
_OF_COMMANDS = ("dtype", "seed")

_BYTES = {"": 1, "b": 1, **{f"{p}{s}": 1 << 10 * i for i, p in enumerate("kmgt", 1) for s in ("", "b", "ib")}}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BITS_PER_SECOND = {f"{p}bit{s}": 1000**i / 8 for i, p in enumerate(["", "k", "m", "g", "t"]) for s in ("", "/s")}
_PREFIXES = ("", "k", "M", "G", "T")
_SPEEDS = {
    **_BITS_PER_SECOND,
    **{f"{p}b/s": 1000**i / 8 for i, p in enumerate(_PREFIXES)},
    **{f"{p}B/s": 1000**i for i, p in enumerate(_PREFIXES)},
}


def add_codec_options(parser: argparse._ActionsContainer, text: str) -> None:
    """Add ``--codec`` to a parser, and the options of all codecs: the fields of their dataclasses.

    The option for a field is ``--NAME``. It is ``--codec-NAME`` if a command has its own option ``--NAME``, or if only
    codecs of other packages have the field.

    Parameters
    ----------
    parser : argparse.ArgumentParser or group
        The parser that gets the options.
    text : str
        The help of ``--codec``.
    """
    parser.add_argument("--codec", metavar="NAME[:OPTION=VALUE,…]", help=text)
    for name, of_codecs in _options().items():
        told: dict[str, list[str]] = {}
        for cls, field in of_codecs:
            limits = field.metadata.get("limits", "")
            about = ", ".join(filter(None, (field.metadata.get("text", ""), str(limits))))
            told.setdefault(about, []).append(cls.name)
        texts = "; ".join(": ".join(filter(None, (", ".join(codecs), about))) for about, codecs in told.items())
        kinds = {kind_of(field) for _, field in of_codecs}
        how: dict[str, Any] = {"metavar": name.upper()}
        if kinds == {bool}:
            how = {"action": argparse.BooleanOptionalAction}
        elif all(isinstance(field.metadata.get("limits"), OneOf) for _, field in of_codecs):
            how = {"metavar": "NAME"}
        parser.add_argument(_flag(name, of_codecs), dest=f"codec_{name}", default=None, help=texts, **how)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given codec options, as text."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    return {name.removeprefix("codec_"): value for name, value in given.items() if name.startswith("codec_")}


def codec_text(args: argparse.Namespace) -> str | None:
    """Return the codec that the arguments describe, as text with its options; None for uncompressed values.

    Raises
    ------
    InvalidArgument
        If options are given without a codec.
    """
    given = given_options(args)
    if args.codec in (None, "none"):
        if given:
            flags = ", ".join(_flag(name, _options()[name]) for name in given)
            raise InvalidArgument(f"{flags} without a codec: give --codec {', '.join(sorted(codec_classes()))}")
        return None
    codec: str = args.codec
    for name, value in given.items():
        codec += f"{',' if ':' in codec else ':'}{name}={value}"
    return codec


def chosen_codec(args: argparse.Namespace) -> Codec | None:
    """Return the codec that the arguments describe; None for uncompressed values.

    Raises
    ------
    InvalidArgument, UnknownCodec
        If the codec does not exist, or does not have the given options.
    """
    codec = codec_text(args)
    return None if codec is None else get_codec(codec)


def _fields(cls: Any) -> Iterator[Field[Any]]:
    """Yield the fields of a codec that are options of the command line."""
    for field in fields(cls) if is_dataclass(cls) else ():
        if field.init and field.metadata.get("on_command_line", True):
            yield field


def _options() -> dict[str, list[tuple[type[Codec], Field[Any]]]]:
    """Map the name of each option to the codecs that have it, and their fields."""
    found: dict[str, list[tuple[type[Codec], Field[Any]]]] = {}
    for _, cls in sorted(codec_classes().items()):
        for field in _fields(cls):
            found.setdefault(field.name, []).append((cls, field))
    return found


def _flag(name: str, of_codecs: list[tuple[type[Codec], Field[Any]]]) -> str:
    foreign = not any(is_own(cls) for cls, _ in of_codecs)
    return f"--{'codec-' if foreign or name in _OF_COMMANDS else ''}{name.replace('_', '-')}"


def parse_bytes(text: str) -> int:
    """Parse bytes such as ``4096``, ``16M``, ``16MB`` or ``16MiB``. Suffixes are powers of 1024."""
    return round(_parse(text, _BYTES, "a size: bytes are needed, such as 4096, 64K, 16M or 1G"))


def doubling(low: int, high: int) -> list[int]:
    """Return sizes from ``low`` to at most ``high``, each twice the previous one."""
    sizes = [low]
    while 2 * sizes[-1] <= high:
        sizes.append(2 * sizes[-1])
    return sizes


def parse_seconds(text: str) -> float:
    """Parse seconds such as ``2us``, ``0.5ms`` or ``1s``."""
    return _parse(text, _SECONDS, "a duration: s, ms, us or ns are needed, such as 2us")


def parse_speed(text: str) -> float:
    """Parse bytes per second such as ``1.5GB/s``, or bits such as ``100gbit`` or ``25Gb/s``, by powers of 1000."""
    return _parse(text, _SPEEDS, "a speed: bytes or bits per second are needed, such as 1.5GB/s or 100gbit")


def given(text: str | None, parse: Callable[[str], float], otherwise: float) -> float:
    """Parse the text of an option; return ``otherwise`` if it is None, and 0 for ``"0"``, which needs no unit."""
    if text is None:
        return otherwise
    return 0.0 if text.strip() == "0" else parse(text)


def link(speed: str | None, latency: str | None, otherwise: Link) -> Link:
    """Return a link with the given speed and latency, which default to those of ``otherwise``."""
    per_byte = otherwise.per_byte if speed is None else 1 / parse_speed(speed)
    return Link(given(latency, parse_seconds, otherwise.latency), per_byte)


def _parse(text: str, units: Mapping[str, float], expected: str) -> float:
    """Parse a positive number with a unit. The unit may also be one of ``units`` after conversion to lower case."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ/]*)", text.strip(), re.IGNORECASE)
    unit = units.get(match[2], units.get(match[2].lower(), math.nan)) if match else math.nan
    value = float(match[1]) * unit if match else math.nan
    if not 0 < value < math.inf:
        raise InvalidArgument(f"{text!r} is not {expected}")
    return value
